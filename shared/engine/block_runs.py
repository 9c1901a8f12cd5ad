"""Regions of KV blocks as rows of memory: the form in which kernels and copy engines take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from shared.transport.protocol.region import Region


@dataclass(frozen=True)
class BlockRuns:
    """Rows `ids` of `rows`, one after the other, are some regions' bytes in their order: [layer][K|V][head][token][head_dim]."""

    rows: torch.Tensor
    """[num_rows, elements of a run], a view of the cache; runs are contiguous."""
    ids: NDArray[np.int64]

    @property
    def run_nbytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()

    @property
    def nbytes(self) -> int:
        return len(self.ids) * self.run_nbytes

    @property
    def alignment(self) -> int:
        """Addresses, or-ed together, as far as their low bits are concerned."""
        return self.rows.data_ptr() | self.rows.stride(0) * self.rows.element_size()

    @property
    def addresses(self) -> NDArray[np.int64]:
        return self.rows.data_ptr() + self.ids * (self.rows.stride(0) * self.rows.element_size())


def block_runs(cache: torch.Tensor, regions: Sequence[Region]) -> list[BlockRuns]:
    """cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous. One entry for each sequence of regions that
    differ only in their block, in order. Raises IndexError for a region outside the cache."""
    return [_runs_of(cache, shape, [region.block_id for region in group]) for shape, group in groupby(regions, _shape)]


def regions_nbytes(cache: torch.Tensor, regions: Sequence[Region]) -> int:
    row_nbytes = 2 * cache.shape[5] * cache.element_size()
    return sum(region.layer_count * region.head_count * region.token_count * row_nbytes for region in regions)


def _shape(region: Region) -> tuple[int, int, int, int, int, int]:
    return (region.layer_start, region.layer_count, region.head_start, region.head_count, region.token_start, region.token_count)


def _runs_of(cache: torch.Tensor, shape: tuple[int, int, int, int, int, int], block_ids: list[int]) -> BlockRuns:
    num_blocks, num_layers, _, num_heads, block_size, head_dim = cache.shape
    layer, num_region_layers, head, num_region_heads, token, num_tokens = shape
    bounds = ((layer, num_region_layers, num_layers), (head, num_region_heads, num_heads), (token, num_tokens, block_size))
    for first, count, limit in bounds:
        if not (first >= 0 and 1 <= count <= limit - first):
            raise IndexError(f"layers, heads and tokens {shape} are outside blocks of {num_layers}, {num_heads} and {block_size}")
    blocks = np.array(block_ids, np.int64)
    if blocks.min() < 0 or blocks.max() >= num_blocks:
        raise IndexError(f"blocks {block_ids[:8]} are outside a cache of {num_blocks}")
    head_size = block_size * head_dim
    layer_size = 2 * num_heads * head_size
    if (num_region_heads, num_tokens) == (num_heads, block_size):  # a run is all layers of a region
        rows = cache.view(num_blocks, -1)[:, layer * layer_size : (layer + num_region_layers) * layer_size]
        return BlockRuns(rows, blocks)
    layers = blocks[:, None] * num_layers + np.arange(layer, layer + num_region_layers)
    parts = (layers[..., None] * 2 + np.arange(2)).reshape(-1)
    if num_tokens == block_size:  # ... the heads of K or V of one layer
        rows = cache.view(num_blocks * num_layers * 2, -1)[:, head * head_size : (head + num_region_heads) * head_size]
        return BlockRuns(rows, parts)
    ids = (parts[:, None] * num_heads + np.arange(head, head + num_region_heads)).reshape(-1)
    rows = cache.view(prod(cache.shape[:4]), -1)[:, token * head_dim : (token + num_tokens) * head_dim]
    return BlockRuns(rows, ids)
