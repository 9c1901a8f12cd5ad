"""What a model is, independent of the file format it came in: sizes, rotary embedding, special tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.errors import ModelLoadError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Positions divided by `factor`."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Long wavelengths stretched by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Pairs that turn more than `beta_fast` times within the original context are kept, those under `beta_slow` stretched by `factor`,
    a ramp in between (Peng et al. 2023)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """cos and sin are multiplied by it."""
    is_truncated: bool = True
    """The ramp starts and ends at whole pairs."""
    kind: Literal["yarn"] = "yarn"

    @staticmethod
    def magnitude(factor: float, scale: float = 1.0) -> float:
        """The attention factor published for a context stretched by `factor`."""
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each pair stretched by a factor of its own (Ding et al. 2024). Of a model's two sets of factors this is the one in use."""

    factors: tuple[float, ...]
    """[rotary_dim / 2]"""
    attention_factor: float
    """cos and sin are multiplied by it."""
    is_long: bool
    """The set for sequences past the original context."""
    kind: Literal["longrope"] = "longrope"

    @classmethod
    def for_context(
        cls,
        max_served: int,
        short_factors: Sequence[float],
        long_factors: Sequence[float],
        original: int,
        max_position: int,
        factor: float | None = None,
        attention_factor: float | None = None,
    ) -> LongRopeScaling:
        """For sequences of up to `max_served` positions, by a model trained for `original` and stretched to `max_position`. One set for
        all of them: a key in the cache has been rotated for good, so a sequence cannot change over where it passes the original context."""
        if factor is None:
            factor = max_position / original
        if attention_factor is None:
            attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
        is_long = max_served > original
        return cls(tuple(map(float, long_factors if is_long else short_factors)), float(attention_factor), is_long)


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling

Architecture = Literal["llama", "mistral", "mixtral", "smollm3", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of the feed-forward part."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    is_normalized: bool
    """The weights of a token's experts are scaled to a sum of 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary feed-forward part."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of the families. Frozen and hashable."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding and of the head."""
    tokenizer_vocab_size: int
    """Ids at or above this are padding: they must never be sampled."""
    max_model_len: int
    rope_theta: float
    rms_norm_eps: float
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = None
    """[rotary_dim / 2] divisors of the inverse frequencies (GGUF's rope_freqs.weight); never together with llama3 scaling."""
    partial_rotary_dim: int | None = None
    """Rotary embedding covers the first so many items of a head; None: all."""
    local_rope_theta: float | None = None
    """Base of the layers with a sliding window where it is one of its own (Gemma 3); they take no scaling."""
    nope_layers: tuple[int, ...] = ()
    """Layers without rotary embedding."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer, how many positions a query sees, itself included; None: all. Empty: all layers see all. See `sliding_window`."""
    attention_scale: float | None = None
    """Factor of query . key; None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    """Scores become soft_cap x tanh(score / soft_cap)."""
    logit_soft_cap: float | None = None
    """The same for logits."""
    experts: ExpertsConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k, v projections have a bias."""
    attention_output_bias: bool = False
    """o projection has a bias."""
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False

    @property
    def rotary_dim(self) -> int:
        return self.partial_rotary_dim or self.head_dim

    def is_local(self, layer: int) -> bool:
        """A layer of the kind with a sliding window, whether any sequence is long enough to pass it or not."""
        return bool(self.sliding_windows) and self.sliding_windows[layer] is not None

    def sliding_window(self, layer: int) -> int | None:
        """None where it would hide nothing, since no sequence is longer."""
        window = self.sliding_windows[layer] if self.sliding_windows else None
        return None if window is None or window >= self.max_model_len else window

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"the model's {name} is {getattr(self, name)}; the model file is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} query heads do not divide into {self.num_kv_heads} key/value heads")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ModelLoadError(f"rotary embedding over {self.rotary_dim} of {self.head_dim} items of a head: it needs pairs of them")
        factor = getattr(self.rope_scaling, "factor", 1.0)
        if not factor > 0:
            raise ModelLoadError(f"the model's rope scaling factor is {factor}; it must be greater than 0")
        num_pairs = self.rotary_dim // 2
        if self.rope_freq_factors is not None and len(self.rope_freq_factors) != num_pairs:
            raise ModelLoadError(f"rope_freqs.weight has {len(self.rope_freq_factors)} values, expected {num_pairs}")
        factors = self.rope_scaling.factors if isinstance(self.rope_scaling, LongRopeScaling) else self.rope_freq_factors
        if factors is not None and not min(factors) > 0:
            raise ModelLoadError(f"the model's rotary frequencies are divided by {min(factors)}; all factors must be greater than 0")
        if self.add_bos and self.bos_token_id is not None and not 0 <= self.bos_token_id < self.tokenizer_vocab_size:
            raise ModelLoadError(
                f"bos_token_id {self.bos_token_id}, put before each text, is outside the vocabulary (0 to {self.tokenizer_vocab_size - 1})"
            )
        if isinstance(self.rope_scaling, LongRopeScaling) and len(self.rope_scaling.factors) != num_pairs:
            raise ModelLoadError(f"rope scaling 'longrope' has {len(self.rope_scaling.factors)} factors, expected {num_pairs}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(f"sliding windows are given for {len(self.sliding_windows)} of {self.num_layers} layers")
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ModelLoadError(f"the model's sliding window is {window}; it must be at least 1")
        for name in ("rope_theta", "local_rope_theta", "attention_scale", "attention_soft_cap", "logit_soft_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ModelLoadError(f"the model's {name} is {value}; it must be greater than 0")
        experts = self.experts
        if experts is not None and not 1 <= experts.num_experts_per_token <= experts.num_experts:
            raise ModelLoadError(f"{experts.num_experts_per_token} of {experts.num_experts} experts a token: the model file is damaged")
        if experts is not None and experts.intermediate_size < 1:
            raise ModelLoadError(f"the experts' intermediate size is {experts.intermediate_size}; the model file is damaged")


def ending_ids(token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Each of them once, in order; one outside the vocabulary, which nothing would ever draw, is left out and logged."""
    unique = tuple(dict.fromkeys(token_ids))
    if outside := [token_id for token_id in unique if not 0 <= token_id < vocab_size]:
        _log.warning("ignoring eos_token_id %s: the vocabulary has ids 0 to %d", outside, vocab_size - 1)
    return tuple(token_id for token_id in unique if 0 <= token_id < vocab_size)
