"""Phi-3 and Phi-4: Llama's layers from checkpoints that hold q, k, v in one tensor and gate, up in another."""

from __future__ import annotations

from shared.engine.layers.attention import take_attention
from shared.engine.layers.decoder_layer import PreNormLayer, take_pre_norm_layer
from shared.engine.layers.gated_mlp import take_gated_mlp
from shared.engine.layers.linear import Weights
from shared.engine.models.causal_lm import CausalLM
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_phi3(config: ModelConfig, weights: Weights, rotary: RotaryTables) -> CausalLM:
    def layer(index: int) -> PreNormLayer:
        attention = take_attention(weights, config, rotary, index, projections=["qkv_proj"])
        feed_forward = take_gated_mlp(weights, f"model.layers.{index}.mlp", gate_up=["gate_up_proj"])
        return take_pre_norm_layer(weights, config, index, attention, feed_forward)

    return CausalLM(config, weights, [layer(i) for i in range(config.num_layers)])
