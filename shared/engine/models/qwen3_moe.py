"""Qwen3-MoE: Qwen3's attention, with a mixture of experts in all layers or in some."""

from __future__ import annotations

from shared.engine.layers.attention import take_attention
from shared.engine.layers.decoder_layer import FeedForward, PreNormLayer, take_pre_norm_layer
from shared.engine.layers.experts import take_experts
from shared.engine.layers.gated_mlp import take_gated_mlp
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import RMSNorm
from shared.engine.models.causal_lm import CausalLM
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_qwen3_moe(config: ModelConfig, weights: Weights, rotary: RotaryTables) -> CausalLM:
    def feed_forward(index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        if config.experts is not None and config.has_experts(index):
            return take_experts(weights, config.experts, prefix)
        return take_gated_mlp(weights, prefix)

    def layer(index: int) -> PreNormLayer:
        attention = take_attention(weights, config, rotary, index, head_norm=RMSNorm)
        return take_pre_norm_layer(weights, config, index, attention, feed_forward(index))

    return CausalLM(config, weights, [layer(i) for i in range(config.num_layers)])
