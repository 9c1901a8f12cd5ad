"""KV in GPU memory: every region comes out and goes in as it is, its checksum is the library's, and slots and pins are given back."""

from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kernels import device_memory
from shared.engine.device_blocks import DeviceBlocks
from shared.engine.peer_device_memory import PeerDeviceMemory, offer_of
from shared.engine.staging_ring import POISON
from shared.errors import TransferError
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import checksum, chunk_checksum
from shared.transport.protocol.region import Region
from shared.transport.wires.shared_segment import SegmentReader, SharedSegment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
SMALL, LARGE = (24, 4, 2, 4, 16, 64), (24, 8, 2, 8, 16, 128)
"""Blocks of 64 KiB, which kernels move, and of 512 KiB, which the copy engines do."""


def cache_of(shape: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def blocks_of(cache: torch.Tensor, **options: object) -> DeviceBlocks:
    return DeviceBlocks(cache, **{"staging_nbytes": 32 << 20, "max_chunk_nbytes": 4 << 20, **options})  # type: ignore[arg-type]


def box(cache: torch.Tensor, region: Region) -> torch.Tensor:
    return cache[
        region.block_id,
        region.layer_start : region.layer_start + region.layer_count,
        :,
        region.head_start : region.head_start + region.head_count,
        region.token_start : region.token_start + region.token_count,
    ]


def expected_bytes(cache: torch.Tensor, regions: list[Region]) -> bytes:
    return b"".join(box(cache, region).contiguous().cpu().view(torch.uint8).numpy().tobytes() for region in regions)


def forms(shape: tuple[int, ...]) -> list[tuple[int, int, int, int, int, int]]:
    _, layers, _, heads, tokens, _ = shape
    return [
        (*of_layers, *of_heads, *of_tokens)
        for of_layers, of_heads, of_tokens in itertools.product(
            ((0, layers), (1, 2)), ((0, heads), (heads // 2, heads // 2)), ((0, tokens), (0, 5), (8, 8))
        )
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_regions_of_every_form_are_read_and_written_as_they_are(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source, target = cache_of(shape, dtype=dtype), torch.zeros(shape, dtype=dtype, device="cuda")
    reader, writer = blocks_of(source), blocks_of(target)
    for form in forms(shape):
        regions, others = ([Region(block, *form) for block in ids] for ids in ((5, 2, 11), (3, 20, 0)))
        stored = reader.read(regions)
        assert bytes(stored.view) == expected_bytes(source, regions)
        if stored.checksum is not None:
            assert stored.checksum == chunk_checksum(stored.view, len(regions))
        landed = writer.write(others, stored.view)
        assert expected_bytes(target, others) == bytes(stored.view)
        assert landed in (None, chunk_checksum(stored.view, len(regions)))
    untouched = [block for block in range(24) if block not in (3, 20, 0)]
    assert not bool(target.view(torch.uint8)[untouched].any())


def test_whole_blocks_and_groups_of_layers_get_their_checksum_from_the_gpu() -> None:
    blocks = blocks_of(cache_of(LARGE))
    for regions in ([Region(3, 0, 8, 0, 8, 0, 16)], [Region(i, 2, 4, 0, 8, 0, 16) for i in (7, 1, 9, 4)]):
        stored = blocks.read(regions)
        assert stored.checksum == chunk_checksum(stored.view, len(regions))


def test_regions_of_mixed_form_go_together() -> None:
    cache = cache_of(LARGE)
    regions = [Region(1, 0, 8, 0, 8, 0, 16), Region(2, 0, 8, 0, 8, 0, 16), Region(3, 0, 8, 0, 8, 0, 7)]
    stored = blocks_of(cache).read(regions)
    assert bytes(stored.view) == expected_bytes(cache, regions)
    target = torch.zeros_like(cache)
    blocks_of(target).write(regions, stored.view)
    assert expected_bytes(target, regions) == bytes(stored.view)


def test_what_was_read_stands_in_the_segment_until_it_is_let_go() -> None:
    cache = cache_of(LARGE)
    blocks = blocks_of(cache, is_debug=True)
    regions = [Region(4, 0, 8, 0, 8, 0, 16)]
    stored = blocks.read(regions)
    assert blocks.segment is not None
    assert stored.segment_offset is not None
    seen = SegmentReader(blocks.segment).read(stored.segment_offset, stored.view.nbytes)
    assert bytes(seen) == expected_bytes(cache, regions)
    del stored
    assert set(bytes(seen)) == {POISON}, "a freed slot is poisoned in debug mode, so that a checksum finds whoever reads it late"


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_bytes_in_an_adopted_segment_are_copied_from_where_they_are(shape: tuple[int, ...]) -> None:
    source, target = cache_of(shape), torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    reader, writer = blocks_of(source), blocks_of(target)
    assert reader.segment is not None
    # The same process opens it by its name, as another would.
    theirs = SegmentReader(reader.segment)
    writer.adopt(theirs.read(0, theirs.size_bytes))
    assert len(writer._adopted) == 1
    for form in forms(shape):
        regions = [Region(block, *form) for block in (9, 8)]
        stored = reader.read(regions)
        assert stored.segment_offset is not None
        writer.write(regions, theirs.read(stored.segment_offset, stored.view.nbytes))
        assert expected_bytes(target, regions) == bytes(stored.view)
    del theirs
    gc.collect()
    assert not writer._adopted, "the mapping went, and its pin with it"
    again = SegmentReader(reader.segment)
    writer.adopt(again.read(0, again.size_bytes))
    assert len(writer._adopted) == 1, "the same addresses can be pinned again"


def test_host_kv_of_a_cpu_worker_lands_in_a_gpu() -> None:
    target = torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    writer, segment = blocks_of(target), SharedSegment(8 << 20)
    np.frombuffer(segment.view, np.uint8)[:] = np.random.default_rng(3).integers(0, 256, 8 << 20, dtype=np.uint8)
    theirs = SegmentReader(segment.offer)
    writer.adopt(theirs.read(0, theirs.size_bytes))
    for number in range(8):
        data = theirs.read(number << 19, 1 << 19)
        assert writer.write([Region(23 - number, 0, 8, 0, 8, 0, 16)], data) == checksum(data)
        assert expected_bytes(target, [Region(23 - number, 0, 8, 0, 8, 0, 16)]) == bytes(data)


def test_what_lands_is_what_is_summed_not_what_was_sent() -> None:
    cache = torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    blocks = blocks_of(cache)
    data = bytes(np.random.default_rng(1).integers(0, 256, 1 << 19, dtype=np.uint8))
    regions = [Region(0, 0, 8, 0, 8, 0, 16)]
    assert blocks.write(regions, memoryview(data)) == checksum(data)
    assert blocks.locate(regions).checksum == checksum(data)
    cache[0, 3, 1, 2, 5, 7] += 1
    assert blocks.locate(regions).checksum != checksum(data)


def test_bad_regions_sizes_and_offers_are_refused_and_take_nothing() -> None:
    blocks = blocks_of(cache_of(SMALL), staging_nbytes=8 << 20)
    num_free = blocks._ring.num_free
    with pytest.raises(IndexError):
        blocks.read([Region(24, 0, 4, 0, 4, 0, 16)])
    with pytest.raises(IndexError):
        blocks.write([Region(0, 3, 2, 0, 4, 0, 16)], memoryview(bytes(2 * 2 * 4 * 16 * 64 * 2)))
    with pytest.raises(ValueError, match="bytes for regions"):
        blocks.write([Region(0, 0, 4, 0, 4, 0, 16)], memoryview(bytes(10)))
    with pytest.raises(TransferError, match="does not fit a slot"):
        blocks.read([Region(0, 0, 4, 0, 4, 0, 16)] * 65)
    with pytest.raises(TransferError, match="reached"):
        PeerDeviceMemory(DeviceMemoryOffer(handle="00" * 64, offset=0, size_bytes=1), torch.device("cuda", 0))
    with pytest.raises(TransferError, match="reached"):
        PeerDeviceMemory(offer_of(blocks._cache), torch.device("cuda", 0))  # one's own memory
    gc.collect()
    assert blocks._ring.num_free == num_free


def test_many_lanes_at_once_mix_up_nothing() -> None:
    source, target = cache_of(LARGE), torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    reader, writer, lock, failures = blocks_of(source), blocks_of(target), threading.Lock(), []

    def carry(number: int) -> None:
        regions = [Region(number % 24, 0, 8, 0, 8, 0, 16)]
        stored = reader.read(regions)
        with lock:
            is_own = stored.checksum == checksum(stored.view)
        if not is_own or writer.write(regions, stored.view) != stored.checksum:
            failures.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(carry, range(240)))
    assert not failures
    assert torch.equal(source, target)
    gc.collect()
    assert reader._ring.num_free == 8


def test_a_ring_gives_its_pin_back() -> None:
    blocks = blocks_of(cache_of(SMALL))
    address, nbytes = blocks._ring.tensor.data_ptr(), blocks._ring.tensor.nbytes
    with pytest.raises(Exception, match="pinned"):
        device_memory.pin(address, nbytes)
    held = blocks._ring.tensor
    del blocks
    gc.collect()
    device_memory.pin(address, nbytes)
    device_memory.unpin(address)
    del held
