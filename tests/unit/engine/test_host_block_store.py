"""The memory of the host tier beside a CPU engine: whole blocks go out and in as they are, and sizes that cannot be are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_hf

from shared.config import Settings
from shared.engine import host_block_store
from shared.engine.engine_core import EngineCore
from shared.engine.host_block_store import new_host_block_store
from shared.errors import ConfigurationError
from shared.model_files.model_source import resolve_model

SHAPE = (6, 3, 2, 2, 4, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_by_bit_in_other_places(dtype: torch.dtype) -> None:
    cache = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    original = cache.clone()
    store = new_host_block_store(cache, 4 * cache[0].nbytes)
    assert (store.num_slots, store.num_storable(), store.block_nbytes) == (4, 4, cache[0].nbytes)
    store.store([5, 0, 2], [1, 3, 0])
    cache.zero_()
    store.load([3, 1], [4, 1])
    assert torch.equal(cache[4], original[0]) and torch.equal(cache[1], original[5])
    assert not cache[[0, 2, 3, 5]].any()


def test_a_checksum_tells_one_bit() -> None:
    cache = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    store = new_host_block_store(cache, 2 * cache[0].nbytes)
    store.store([0, 1], [0, 1])
    before = store.checksum(0)
    assert before != store.checksum(1)
    cache.view(torch.uint8)[0, 0, 0, 0, 0, 0] ^= 1
    store.store([0], [0])
    assert store.checksum(0) != before


def test_sizes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(SHAPE)
    with pytest.raises(ConfigurationError, match="set it higher, or 0"):
        new_host_block_store(cache, cache[0].nbytes - 1)
    monkeypatch.setattr(host_block_store, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigurationError, match="PAGEWIRE_KV_HOST_CACHE_GIB lower"):
        new_host_block_store(cache, 2 << 20)


def test_host_memory_without_prefix_caching_is_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    settings = Settings(num_blocks=16, block_size=4, kv_host_cache_gib=0.01, enable_prefix_caching=False)
    with pytest.raises(ConfigurationError, match="enable_prefix_caching"):
        EngineCore(resolve_model(str(tmp_path)), settings, lambda *_: None, lambda *_: None)
