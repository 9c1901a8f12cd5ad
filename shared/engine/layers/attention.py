"""The attention block of all families: projections, norms of queries and keys, rotary embedding, the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cache_ops import reshape_and_cache
from kernels.rotary_embedding import rotary_embedding_and_cache
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.layers.linear import Linear, Weights, take_linear
from shared.engine.layers.norm import Norm, NormFactory
from shared.engine.rotary import RotaryTable, RotaryTables
from shared.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class Attention:
    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: RotaryTable | None
    """None: a layer without positions."""
    sliding_window: int | None = None
    soft_cap: float | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V. Caches of this layer: [num_blocks, num_kv_heads,
        block_size, head_dim]."""
        return self.output(self._mix(self.qkv(x), metadata, key_cache, value_cache))

    def of_rows(
        self, rows: torch.Tensor, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """[len(rows), hidden_size]: those rows of self(x, ...); writes the K and V of all tokens."""
        mixed = self._mix(self.qkv(x), metadata, key_cache, value_cache, rows)
        return self.output(mixed) if len(rows) else torch.empty_like(x[:0])

    def add_normed(
        self, residual: torch.Tensor, norm: Norm, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> None:
        self.output.add_to(residual, self._mix(self.qkv.normed(residual, norm), metadata, key_cache, value_cache))

    def _mix(
        self,
        qkv: torch.Tensor,
        metadata: AttentionMetadata,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All between the projections: [len(rows), num_heads * head_dim], None: of all rows."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(qkv.view(len(qkv), -1, self.head_dim), heads, dim=1)
        if self.query_norm is not None:
            query = self.query_norm(query)
        if self.key_norm is not None:
            key = self.key_norm(key)
        kv_cache_dtype = "fp8" if key_cache.dtype is torch.float8_e4m3fn else "auto"
        if self.rotary is None:
            reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping, kv_cache_dtype)
        else:
            table, slots = (self.rotary.cos, self.rotary.sin), metadata.slot_mapping
            rotary_embedding_and_cache(query, key, value, metadata.positions, *table, key_cache, value_cache, slots, kv_cache_dtype)
        if rows is not None and not len(rows):  # of chunks before a prompt's last
            return qkv.new_empty(0, self.num_heads * self.head_dim)
        mixed = metadata.attention(
            query, key_cache, value_cache, self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap
        ).flatten(1)  # fmt: skip
        return mixed if rows is None else mixed[rows]


def take_attention(
    weights: Weights,
    config: ModelConfig,
    rotary: RotaryTables,
    layer: int,
    *,
    projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    head_norm: NormFactory | None = None,
) -> Attention:
    """`projections`: as the checkpoint calls them. `head_norm`: of queries and keys, in families that have one."""
    prefix = f"model.layers.{layer}.self_attn"
    norms: list[Norm | None] = [None, None]
    if head_norm is not None:
        norms = [head_norm(weights.pop(f"{prefix}.{part}_norm.weight"), config.rms_norm_eps) for part in "qk"]
    return Attention(
        qkv=take_linear(weights, [f"{prefix}.{name}" for name in projections]),
        output=take_linear(weights, [f"{prefix}.o_proj"]),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        rotary=rotary.of_layer(layer),
        sliding_window=config.sliding_window(layer),
        soft_cap=config.attention_soft_cap,
        query_norm=norms[0],
        key_norm=norms[1],
    )
