"""The memory of the host tier beside a GPU: what is stored is what stood there, whoever writes next; copies do not overtake each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.engine.host_block_store import MAX_STAGED_NBYTES, new_host_block_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
SHAPE = (64, 8, 2, 8, 16, 64)
"""Blocks of 256 KiB."""


def random_cache() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(torch.bfloat16)


def test_blocks_are_stored_as_they_stood_though_their_next_owner_writes_at_once() -> None:
    cache = random_cache()
    original = cache.cpu()
    store = new_host_block_store(cache, 48 * cache[0].nbytes)
    torch.cuda.synchronize()
    for first in range(0, 48, 8):
        store.store(list(range(first, first + 8)), list(range(first, first + 8)))
        cache[first : first + 8] = 7.0  # on another stream, right after
    with ThreadPoolExecutor(1) as executor:
        executor.submit(store.load, list(range(47, -1, -1)), list(range(48))).result(30)
    assert torch.equal(cache[:48].cpu(), original[:48].flip(0))


def test_a_slot_that_is_used_again_does_not_spoil_a_load_of_what_it_held() -> None:
    cache = random_cache()
    original = cache.cpu()
    store = new_host_block_store(cache, cache[0].nbytes)
    torch.cuda.synchronize()
    for block_id in range(32):
        assert store.num_storable() == 1
        store.store([block_id], [0])
        store.load([0], [63])
        assert torch.equal(cache[63].cpu(), original[block_id])


def test_staging_memory_comes_back_when_its_blocks_have_left() -> None:
    cache = random_cache()
    num_staged = min(MAX_STAGED_NBYTES // cache[0].nbytes, 64)
    store = new_host_block_store(cache, 64 * cache[0].nbytes)
    assert store.num_storable() == num_staged
    store.store(list(range(num_staged)), list(range(num_staged)))
    torch.cuda.synchronize()
    assert store.num_storable() == num_staged
    assert store.checksum(0) != store.checksum(1)
