"""Every box of a block is named row by row, in the order of the wire."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shared.engine.block_runs import block_runs, regions_nbytes
from shared.transport.protocol.region import Region

CACHE = torch.arange(7 * 5 * 2 * 4 * 8 * 6, dtype=torch.int32).view(7, 5, 2, 4, 8, 6)


def box(region: Region) -> torch.Tensor:
    return CACHE[
        region.block_id,
        region.layer_start : region.layer_start + region.layer_count,
        :,
        region.head_start : region.head_start + region.head_count,
        region.token_start : region.token_start + region.token_count,
    ]


@pytest.mark.parametrize("layers", [(0, 5), (1, 3), (4, 1)])
@pytest.mark.parametrize("heads", [(0, 4), (2, 2), (3, 1)])
@pytest.mark.parametrize("tokens", [(0, 8), (0, 3), (4, 4)])
def test_rows_are_the_regions_bytes_in_order(layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int]) -> None:
    regions = [Region(block, *layers, *heads, *tokens) for block in (6, 0, 3)]
    [runs] = block_runs(CACHE, regions)
    expected = torch.cat([box(region).flatten() for region in regions])
    assert torch.equal(runs.rows[torch.from_numpy(runs.ids)].flatten(), expected)
    assert runs.nbytes == regions_nbytes(CACHE, regions) == expected.nbytes
    for address, row in zip(runs.addresses.tolist(), runs.rows[torch.from_numpy(runs.ids)], strict=True):
        first = (address - CACHE.data_ptr()) // 4
        assert torch.equal(CACHE.flatten()[first : first + len(row)], row)


def test_regions_of_unequal_form_are_kept_in_order() -> None:
    regions = [Region(0, 0, 5, 0, 4, 0, 8), Region(2, 0, 5, 0, 4, 0, 8), Region(2, 0, 5, 0, 4, 0, 3), Region(1, 0, 5, 0, 4, 0, 8)]
    runs = block_runs(CACHE, regions)
    assert [len(run.ids) for run in runs] == [2, 5 * 2 * 4, 1]
    joined = torch.cat([run.rows[torch.from_numpy(run.ids)].flatten() for run in runs])
    assert torch.equal(joined, torch.cat([box(region).flatten() for region in regions]))


@pytest.mark.parametrize("field", ["block_id", "layer_start", "layer_count", "head_start", "head_count", "token_start", "token_count"])
def test_nothing_outside_the_cache_is_named(field: str) -> None:
    good = dict(zip(Region.__slots__, (3, 1, 2, 1, 2, 2, 4), strict=True))
    block_runs(CACHE, [Region(**good)])
    for value, _ in itertools.product((-1, 9), range(1)):
        with pytest.raises(IndexError):
            block_runs(CACHE, [Region(**(good | {field: value}))])


def test_ids_are_what_kernels_take() -> None:
    [runs] = block_runs(CACHE, [Region(1, 0, 1, 0, 4, 0, 2)])
    assert runs.ids.dtype == np.int64
    assert runs.ids.flags.c_contiguous
