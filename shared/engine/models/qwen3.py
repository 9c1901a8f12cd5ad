"""Qwen3: Llama's layers with norms of queries and keys."""

from __future__ import annotations

from shared.engine.layers.attention import take_attention
from shared.engine.layers.decoder_layer import PreNormLayer, take_pre_norm_layer
from shared.engine.layers.gated_mlp import take_gated_mlp
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import RMSNorm
from shared.engine.models.causal_lm import CausalLM
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_qwen3(config: ModelConfig, weights: Weights, rotary: RotaryTables) -> CausalLM:
    def layer(index: int) -> PreNormLayer:
        attention = take_attention(weights, config, rotary, index, head_norm=RMSNorm)
        return take_pre_norm_layer(weights, config, index, attention, take_gated_mlp(weights, f"model.layers.{index}.mlp"))

    return CausalLM(config, weights, [layer(i) for i in range(config.num_layers)])
