"""What a model is, independent of the file format it came in: sizes, rotary embedding, special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.errors import ModelLoadError


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


RopeScaling = LinearRopeScaling | Llama3RopeScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama architecture. Frozen and hashable."""

    architecture: Literal["llama"]
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
    """[head_dim / 2] divisors of the inverse frequencies (GGUF's rope_freqs.weight); never together with llama3 scaling."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k, v projections have a bias."""
    attention_output_bias: bool = False
    """o projection has a bias."""
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False

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
        if self.head_dim % 2:
            raise ModelLoadError(f"head size {self.head_dim} is odd: rotary embedding needs pairs")
        if self.rope_freq_factors is not None and len(self.rope_freq_factors) != self.head_dim // 2:
            raise ModelLoadError(f"rope_freqs.weight has {len(self.rope_freq_factors)} values, expected {self.head_dim // 2}")
