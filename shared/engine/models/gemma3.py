"""Gemma 3, text: Gemma 2 with norms of queries and keys in the place of soft caps, and a rotary base for each kind of layer."""

from __future__ import annotations

from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import UnitOffsetRMSNorm
from shared.engine.models.causal_lm import CausalLM
from shared.engine.models.gemma2 import build_gemma2
from shared.engine.rotary import RotaryTables
from shared.model_files.model_config import ModelConfig


def build_gemma3(config: ModelConfig, weights: Weights, rotary: RotaryTables) -> CausalLM:
    return build_gemma2(config, weights, rotary, head_norm=UnitOffsetRMSNorm)
