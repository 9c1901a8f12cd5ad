"""Gemma 2: norms around each block, a gated GELU, scaled embeddings, soft caps, every other layer with a sliding window."""

from __future__ import annotations

from shared.engine.layers.attention import take_attention
from shared.engine.layers.decoder_layer import SandwichNormLayer, take_sandwich_norm_layer
from shared.engine.layers.gated_mlp import gelu_and_mul, take_gated_mlp
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import NormFactory, UnitOffsetRMSNorm
from shared.engine.models.causal_lm import CausalLM
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_gemma2(config: ModelConfig, weights: Weights, rotary: RotaryTables, head_norm: NormFactory | None = None) -> CausalLM:
    """`head_norm`: of queries and keys, which later models of the family have."""

    def layer(index: int) -> SandwichNormLayer:
        attention = take_attention(weights, config, rotary, index, head_norm=head_norm)
        feed_forward = take_gated_mlp(weights, f"model.layers.{index}.mlp", activation=gelu_and_mul)
        return take_sandwich_norm_layer(weights, config, index, attention, feed_forward, UnitOffsetRMSNorm)

    layers = [layer(i) for i in range(config.num_layers)]
    return CausalLM(config, weights, layers, UnitOffsetRMSNorm, has_scaled_embedding=True)
