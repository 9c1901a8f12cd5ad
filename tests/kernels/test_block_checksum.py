"""The checksum of blocks is the library's xxh3_64, wherever the blocks lie."""

from __future__ import annotations

import pytest
import torch
import xxhash

from kernels.block_checksum import block_checksums, can_checksum

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]),
]
SIZES = (256, 1008, 1024, 1040, 2048, 4096 + 64, 64 << 10, (64 << 10) + 16, (130 << 10) + 512, 1 << 20)


def expected(cache: torch.Tensor, ids: list[int], per_payload: int) -> list[int]:
    blocks = [cache[i].contiguous().view(torch.uint8).cpu().numpy().tobytes() for i in ids]
    return [xxhash.xxh3_64_intdigest(b"".join(blocks[i : i + per_payload])) for i in range(0, len(blocks), per_payload)]


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in sums.tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_one_block_a_payload(device: str, size: int) -> None:
    cache = torch.randint(0, 256, (5, size), dtype=torch.uint8, device=device)
    ids = [3, 0, 4, 3]
    assert unsigned(block_checksums(cache, torch.tensor(ids, device=device))) == expected(cache, ids, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1024, 3072, 65536, 66 << 10])
def test_several_blocks_a_payload_in_the_order_named(device: str, size: int) -> None:
    cache = torch.randint(0, 256, (9, size), dtype=torch.uint8, device=device)
    ids = [8, 1, 2, 0, 5, 8]
    for per_payload in (1, 2, 3, 6):
        assert unsigned(block_checksums(cache, torch.tensor(ids, device=device), per_payload)) == expected(cache, ids, per_payload)


@pytest.mark.parametrize("device", DEVICES)
def test_some_layers_of_a_cache(device: str) -> None:
    cache = torch.randn(4, 6, 2, 3, 16, 32, device=device).view(4, -1)[:, 2 * 3072 : 5 * 3072]
    assert unsigned(block_checksums(cache, torch.tensor([2, 1], device=device))) == expected(cache, [2, 1], 1)


@pytest.mark.parametrize("device", DEVICES)
def test_every_flipped_bit_changes_it(device: str) -> None:
    cache = torch.zeros(1, 2064, dtype=torch.uint8, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    seen = {int(block_checksums(cache, ids))}
    for place in range(0, 2064, 41):
        cache[0, place] = 1 << (place % 8)
        seen.add(int(block_checksums(cache, ids)))
        cache[0, place] = 0
    assert len(seen) == 1 + len(range(0, 2064, 41))


def test_what_cannot_be_hashed_is_refused() -> None:
    assert not can_checksum(128, 1)
    assert not can_checksum(1040, 2)
    assert not can_checksum(1030, 1)
    assert not can_checksum(1024, 1, alignment=8)
    with pytest.raises(ValueError, match="divide"):
        block_checksums(torch.zeros(2, 1024), torch.tensor([0, 1, 1]), 2)
    with pytest.raises(ValueError, match="can_checksum"):
        block_checksums(torch.zeros(2, 130, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(IndexError):
        block_checksums(torch.zeros(2, 1024), torch.tensor([2]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_block_outside_the_cache_is_never_read() -> None:
    cache = torch.ones(2, 1024, device="cuda")
    assert block_checksums(cache, torch.tensor([1 << 40, -1, 0], device="cuda")).tolist()[:2] == [0, 0]
