"""Rotary embedding as config.json asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelLoadError
from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, RopeScaling, YarnRopeScaling


@dataclass(frozen=True, slots=True)
class HFRope:
    theta: float
    scaling: RopeScaling | None
    rotary_share: float
    """Of the items of a head."""
    max_position: int
    """How long a sequence may be: with YaRN more than max_position_embeddings, where that speaks of the model before it."""


def hf_rope(config: Mapping[str, Any], parameters: Mapping[str, Any], max_model_len: int | None) -> HFRope:
    """`parameters`: `rope_parameters`, or `rope_scaling` as it was called before. `max_model_len`: what is served at most, where
    somebody said so; LongRoPE has one set of factors for up to the original context and another one for more.

    Raises ModelLoadError naming the kind or the field."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    share = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    max_position = int(config.get("max_position_embeddings", 2048))
    original = int(config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings") or max_position)
    scaling: RopeScaling | None = None
    try:
        if kind == "linear":
            scaling = LinearRopeScaling(float(parameters["factor"]))
        elif kind == "llama3":
            original = int(parameters["original_max_position_embeddings"])
            low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
            scaling = Llama3RopeScaling(float(parameters["factor"]), low, high, original)
        elif kind == "yarn":
            scaling = _yarn(parameters, original)
            max_position = max(max_position, int(original * scaling.factor))
        elif kind == "longrope":
            scaling = LongRopeScaling.for_context(
                min(max_position, max_model_len or max_position),
                parameters["short_factor"],
                parameters["long_factor"],
                original,
                max_position,
                parameters.get("factor"),
                parameters.get("attention_factor"),
            )
        elif kind != "default":
            supported = "default, linear, llama3, yarn, longrope"
            raise ModelLoadError(f"config.json: rope_type {kind!r} is not supported; supported are {supported}")
    except KeyError as error:
        raise ModelLoadError(f"config.json: rope scaling {kind!r} lacks {error.args[0]!r}") from error
    return HFRope(theta, scaling, share, max_position)


def _yarn(parameters: Mapping[str, Any], original: int) -> YarnRopeScaling:
    factor = float(parameters["factor"])
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        scales = (parameters.get("mscale"), parameters.get("mscale_all_dim"))
        scale, divisor = (float(scales[0]), float(scales[1])) if scales[0] and scales[1] else (1.0, 0.0)
        attention_factor = YarnRopeScaling.magnitude(factor, scale) / YarnRopeScaling.magnitude(factor, divisor)
    return YarnRopeScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        is_truncated=bool(parameters.get("truncate", True)),
    )
