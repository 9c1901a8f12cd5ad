"""Fields of config.json and its like, checked for their kind before anything is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shared.errors import ModelLoadError

Fields = Mapping[str, Any]

_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "sliding_window",
    "max_window_layers",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    # of rope_parameters
    "factor",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_DIVISORS = ("num_attention_heads", "sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step")
_NULL_SAYS_SOMETHING = ("head_dim", "num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def given_fields(fields: Fields) -> dict[str, Any]:
    """Without those whose null says no more than their absence. Raises ModelLoadError naming a number that is none."""
    for name in (*_NUMBERS, *_DIVISORS):
        value = fields.get(name)
        if value is not None and not _is_number(value):
            raise ModelLoadError(f"config.json: {name} = {value!r} must be a number")
        if value is not None and name in _DIVISORS and int(value) < 1:
            raise ModelLoadError(f"config.json: {name} = {value!r} must be at least 1")
    return {name: value for name, value in fields.items() if value is not None or name in _NULL_SAYS_SOMETHING}


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """A field like `eos_token_id`: a number, a list of numbers, or null. Raises ModelLoadError naming it."""
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise ModelLoadError(f"config.json: {name} = {value!r} must be a token id or a list of them")
    return tuple(values)


def rope_parameters(fields: Fields) -> Fields:
    """`rope_parameters`, or `rope_scaling` as it was called before. Of both the latter goes over the former: somebody has added it, as
    model cards say, to a file that was written with the former. Raises ModelLoadError naming one that is no object."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(fields.get(name) or {}, dict):
            raise ModelLoadError(f"config.json: {name} = {fields[name]!r} must be an object with a rope_type")
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not parameters or not scaling or _is_by_layer(scaling):
        return {**parameters, **scaling}
    if _is_by_layer(parameters):
        return {**parameters, "full_attention": _over(parameters.get("full_attention") or {}, scaling)}
    return _over(parameters, scaling)


def _is_by_layer(parameters: Fields) -> bool:
    """A set of parameters for each kind of layer."""
    return any(isinstance(value, dict) for value in parameters.values())


def _over(parameters: Fields, scaling: Fields) -> Fields:
    return {**parameters, "rope_type": scaling.get("type", "default"), **scaling}
