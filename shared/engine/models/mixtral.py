"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from shared.engine.layers.attention import take_attention
from shared.engine.layers.decoder_layer import PreNormLayer, take_pre_norm_layer
from shared.engine.layers.experts import take_experts
from shared.engine.layers.linear import Weights
from shared.engine.models.causal_lm import CausalLM
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_mixtral(config: ModelConfig, weights: Weights, rotary: RotaryTables) -> CausalLM:
    experts = config.experts
    assert experts is not None

    def layer(index: int) -> PreNormLayer:
        attention = take_attention(weights, config, rotary, index)
        feed_forward = take_experts(weights, experts, f"model.layers.{index}.block_sparse_moe", ("w1", "w3"), "w2")
        return take_pre_norm_layer(weights, config, index, attention, feed_forward)

    return CausalLM(config, weights, [layer(i) for i in range(config.num_layers)])
