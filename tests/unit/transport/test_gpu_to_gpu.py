"""Copies from GPU to GPU as the protocol sees them, with ordinary memory in a GPU's place. The real thing: test_kv_gpu_processes."""

import random
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, MemoryPair, tokens_of

from shared.errors import ConfigurationError, TransferError
from shared.transport.connector import LocatedBytes
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import DataHeader, Flags, join_checksums
from shared.transport.protocol.frames import checksum as xxh3
from shared.transport.simulated_network import BytesMemory

NUM_BLOCKS = 16


class StandIn(BytesMemory):
    """GpuMemory whose handle leads to this object."""

    known: ClassVar[dict[str, "StandIn"]] = {}

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(NUM_BLOCKS, LAYOUT)
        if seed is not None:
            for block_id in range(NUM_BLOCKS):
                self.block(block_id)[:] = random.Random(seed + block_id).randbytes(LAYOUT.block_nbytes)
        self.offer = DeviceMemoryOffer(handle=f"{id(self):0128x}", offset=0, size_bytes=NUM_BLOCKS * LAYOUT.block_nbytes)
        self.known[self.offer.handle] = self
        self.gpu = self
        self.num_copied = 0

    def open(self, offer):
        if offer.handle not in self.known:
            raise TransferError("the peer's GPU memory cannot be reached from here")
        return self.known[offer.handle], 1e11

    def locate(self, regions):
        parts = [self.read([region]).view for region in regions]
        starts = [region.block_id * LAYOUT.block_nbytes + region.layer_start * LAYOUT.layer_nbytes for region in regions]
        return LocatedBytes(tuple(starts), join_checksums([xxh3(part) for part in parts]))

    def write_from(self, peer, offsets, regions):
        sums = []
        for offset, region in zip(offsets, regions, strict=True):
            nbytes = region.layer_count * LAYOUT.layer_nbytes
            if offset + nbytes > len(peer._memory):
                raise TransferError("outside GPU memory")
            self.write([region], peer._memory[offset : offset + nbytes])
            self.num_copied += 1
            sums.append(xxh3(self.read([region]).view))
        return join_checksums(sums)


def pair_of(source=None, target=None, **settings) -> MemoryPair:
    return MemoryPair(source=source or StandIn(1), target=target or StandIn(), settings=SETTINGS.model_copy(update=settings))


def carry(pair: MemoryPair, num_tokens: int = 64) -> str | None:
    pair.offer(num_tokens)
    pair.expect(num_tokens, list(range(LAYOUT.num_blocks(num_tokens))))
    pair.network.run(0.5)
    pair.send_all(num_tokens)
    pair.run()
    return pair.receiver_log.ended[TRANSFER][0]


def test_where_both_have_gpus_of_one_host_only_notices_travel():
    pair = pair_of()
    sizes = []
    post = pair.network.post_data
    pair.network.post_data = lambda sender, endpoint, lane, header, payload: (
        sizes.append(payload.nbytes), post(sender, endpoint, lane, header, payload)
    )  # fmt: skip
    assert carry(pair) is None
    assert pair.is_copied(list(range(16)))
    assert pair.receiver_log.infos[TRANSFER].transport == "cuda"
    assert pair.target.num_copied == 16 * 2  # layers go in two parts
    assert max(sizes) <= 8 * 16


def test_the_last_block_which_is_not_full_travels_as_a_message():
    pair = pair_of()
    assert carry(pair, 62) is None
    assert pair.is_copied_up_to(62, list(range(16)))
    assert set(tokens_of(pair.target.block(0), -2)) == {0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_transport_can_be_asked_for(transport):
    pair = pair_of(kv_transport="tcp") if transport == "tcp" else pair_of(target=BytesMemory(NUM_BLOCKS, LAYOUT))
    assert carry(pair) is None
    assert pair.receiver_log.infos[TRANSFER].transport == "tcp"


def test_memory_that_cannot_be_opened_is_no_obstacle():
    source = StandIn(1)
    del StandIn.known[source.offer.handle]
    pair = pair_of(source)
    assert carry(pair) is None
    assert pair.receiver_log.infos[TRANSFER].transport == "tcp"
    assert pair.is_copied(list(range(16)))


def test_blocks_that_change_while_they_are_copied_are_noticed_and_never_committed():
    pair = pair_of()
    pair.source.block(5)[0] = 0
    locate = pair.source.locate

    def spoil(regions):
        located = locate(regions)
        pair.source.block(5)[0] |= 1
        return located

    pair.source.locate = spoil
    assert "damaged" in str(carry(pair))


def test_places_outside_the_memory_fail_the_transfer():
    pair = pair_of()
    locate = pair.source.locate
    pair.source.locate = lambda regions: LocatedBytes((2**64 - 1,) * len(regions), locate(regions).checksum)
    assert "outside GPU memory" in str(carry(pair))


def test_places_that_are_damaged_on_their_way_are_sent_again():
    pair, damaged = pair_of(), []
    post = pair.network.post_data

    def flip(sender, endpoint, lane, header: DataHeader, payload):
        if Flags.DEVICE_MEMORY in header.flags and not damaged:
            damaged.append(header.chunk_seq)
            payload = memoryview(bytes([*payload[:-1], payload[-1] ^ 0x80]))
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = flip
    assert carry(pair) is None
    assert damaged
    assert pair.is_copied(list(range(16)))


def test_a_notice_without_memory_that_was_shown_fails_the_transfer():
    pair = pair_of(kv_transport="tcp")
    post = pair.network.post_data

    def lie(sender, endpoint, lane, header: DataHeader, payload):
        if header.payload_nbytes:
            payload = memoryview(np.zeros(header.block_count, np.int64)).cast("B")
            header = replace(header, flags=Flags.DEVICE_MEMORY, segment_offset=xxh3(payload))
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = lie
    assert "has shown no GPU memory" in str(carry(pair))


def test_a_worker_without_a_gpu_refuses_to_be_told_to_use_one():
    with pytest.raises(ConfigurationError, match="kv_transport 'cuda'"):
        MemoryPair(settings=SETTINGS.model_copy(update={"kv_transport": "cuda"}))
