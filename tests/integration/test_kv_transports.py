"""The same transfer over TCP, Unix sockets and shared memory: what is chosen, what it measures, and what each does when it is lied to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, ReceiverLog, SenderLog, random_memory

from shared.clock import SystemClock
from shared.config import Settings
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.transport.connector import DataMessage, StoredBytes
from shared.transport.host_blocks import HostBlocks
from shared.transport.protocol.frames import DataHeader, Flags
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender
from shared.transport.simulated_network import BytesMemory
from shared.transport.wires.shared_segment import SharedSegment

NUM_BLOCKS = 12
ALL = range(NUM_BLOCKS)


class SegmentMemory(HostBlocks):
    """BlockMemory that other processes can read, if they are told where."""

    def __init__(self, num_blocks: int, offer: SegmentOffer | str | None) -> None:
        self.shared = SharedSegment(num_blocks * LAYOUT.block_nbytes)
        super().__init__(LAYOUT, self.shared.view, self.shared.offer if offer == "own" else offer)
        contents = random_memory(num_blocks, 0)
        for block_id in range(num_blocks):
            self.block(block_id)[:] = contents.block(block_id)

    def block(self, block_id: int) -> memoryview:
        return self.shared.view[block_id * LAYOUT.block_nbytes : (block_id + 1) * LAYOUT.block_nbytes]


class Pair:
    def __init__(self, sending: Settings, receiving: Settings, segment: SegmentOffer | str | None = "own", tap: object = None) -> None:
        self.source, self.target = SegmentMemory(NUM_BLOCKS, segment), BytesMemory(NUM_BLOCKS, LAYOUT)
        self.sender_log, self.receiver_log = SenderLog(), ReceiverLog()
        incarnation = new_incarnation()
        self.receiver = KVReceiver(LAYOUT, self.target, incarnation, self.receiver_log, SystemClock(), receiving)
        self.peer = KVPeer(
            worker_id="decode-0", ctrl_endpoint=self.receiver.ctrl_endpoint, incarnation=incarnation, server_key=self.receiver.server_key
        )
        clock = SystemClock()
        self.sender = KVSender(LAYOUT, self.source, new_incarnation(), self.sender_log, clock, sending, "prefill-0", tap)

    def transfer(self, timeout_s: float = 30.0) -> str | None:
        """How it ended at the receiver: None, or why it failed."""
        num_tokens = NUM_BLOCKS * LAYOUT.block_size
        self.receiver.expect(TRANSFER, 0, ALL, ALL, num_tokens, 60.0)
        self.sender.offer(TRANSFER, 0, [self.peer], num_tokens, [], 60.0)
        self.sender.send_blocks(TRANSFER, [(index, index) for index in ALL])
        self.sender.commit(TRANSFER, b"hidden", 0)
        wait_until(lambda: self.receiver_log.ended and self.sender_log.ended, timeout_s)
        return self.receiver_log.ended[TRANSFER][0]

    @property
    def is_copied(self) -> bool:
        return all(self.source.block(index) == self.target.block(index) for index in ALL)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def settings(transport: str) -> Settings:
    return SETTINGS.model_copy(update={"kv_transport": transport})


@contextmanager
def running(sending: str = "auto", receiving: str = "auto", **options: object) -> Iterator[Pair]:
    pair = Pair(settings(sending), settings(receiving), **options)
    try:
        yield pair
    finally:
        pair.sender.close()
        pair.receiver.close()


@pytest.mark.parametrize("transport", ["tcp", "ipc", "shm"])
def test_a_transfer_is_exact_over_what_was_forced(transport: str) -> None:
    with running(transport) as pair:
        assert pair.transfer() is None
        assert pair.is_copied
        info = pair.receiver_log.infos[TRANSFER]
        assert (info.transport, info.num_bytes) == (transport, NUM_BLOCKS * LAYOUT.block_nbytes)


def assert_said(caplog: pytest.LogCaptureFixture, text: str, sending: Settings, receiving: Settings) -> None:
    """By one of a few pairs: a lane that a busy machine is slow to open is done without, and what it carries is not known."""
    for _ in range(4):
        pair = Pair(sending, receiving)
        try:
            assert pair.transfer() is None
            give_up_s = time.monotonic() + 10
            while text not in caplog.text and time.monotonic() < give_up_s:
                time.sleep(0.005)
        finally:
            pair.sender.close()
            pair.receiver.close()
        if text in caplog.text:
            return
    raise AssertionError(caplog.text)


@pytest.mark.parametrize("transport", ["tcp", "ipc", "shm"])
def test_what_a_wire_carries_is_said(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert_said(caplog, f"KV wire from prefill-0: {transport}, ", settings(transport), settings("auto"))


def test_the_best_that_both_ends_can_use_is_chosen() -> None:
    for sending, receiving, segment, expected in [
        ("auto", "auto", "own", "shm"),
        ("auto", "auto", None, "ipc"),
        ("auto", "tcp", "own", "tcp"),
        ("ipc", "auto", "own", "ipc"),
    ]:
        with running(sending, receiving, segment=segment) as pair:
            assert pair.transfer() is None
            assert pair.receiver_log.infos[TRANSFER].transport == expected


def test_a_segment_that_cannot_be_read_is_no_failure() -> None:
    elsewhere = SharedSegment(4096).offer.model_copy(update={"pid": 2**22 - 1})
    with running(segment=elsewhere) as pair:
        assert pair.transfer() is None
        assert pair.receiver_log.infos[TRANSFER].transport == "ipc"
        assert pair.is_copied


def test_ends_without_a_transport_in_common_are_refused_and_the_field_named() -> None:
    with running("shm", "tcp") as pair:
        pair.sender.offer(TRANSFER, 0, [pair.peer], 4, [], 60.0)
        wait_until(lambda: pair.sender_log.ended)
        reason = pair.sender_log.ended[TRANSFER][0]
        assert reason is not None
        assert "no transport in common" in reason


def test_memory_that_changes_while_it_is_read_is_noticed_and_never_committed() -> None:
    """As if prefill gave the blocks to another request too early: the notice's checksum is of what stood there before."""
    changed = False

    def spoil(header: DataHeader, payload: memoryview) -> memoryview:
        nonlocal changed
        units = range(header.block_index, header.block_index + header.block_count)
        if Flags.SHARED_MEMORY in header.flags and 5 in units and header.layer_start == 0 and not changed:
            changed = True
            pair.source.block(5)[0] ^= 1
        return payload

    with running("shm", tap=spoil) as pair:
        reason = pair.transfer()
        assert changed
        assert reason is not None
        assert "damaged" in reason
        assert pair.receiver.counters()["bad_checksums"] == 2


@pytest.mark.parametrize("bit", [0, 40])
def test_a_notice_that_is_damaged_on_its_way_is_sent_again(bit: int) -> None:
    """Another place within the segment, or one far outside: nobody lied, so it must not fail the transfer."""
    num_damaged = 0

    def flip(header: DataHeader, payload: memoryview) -> memoryview:
        nonlocal num_damaged
        if Flags.SCATTERED not in header.flags or num_damaged:
            return payload
        num_damaged += 1
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        return memoryview(damaged)

    with running("shm", tap=flip) as pair:
        assert pair.transfer() is None
        assert num_damaged == 1
        assert pair.is_copied
        assert pair.receiver.counters()["bad_checksums"] == 1


@pytest.mark.parametrize("offset", [NUM_BLOCKS * LAYOUT.block_nbytes, 2**64 - 1])
def test_a_notice_of_memory_outside_the_segment_fails_the_transfer(offset: int) -> None:
    class Liar(SegmentMemory):
        def read(self, regions: Sequence[Region]) -> StoredBytes:
            return replace(super().read(regions), segment_offset=offset)

    with running("shm") as pair:
        pair.sender.close()
        liar = Liar(NUM_BLOCKS, "own")
        pair.sender = KVSender(LAYOUT, liar, new_incarnation(), pair.sender_log, SystemClock(), settings("shm"), "liar")
        reason = pair.transfer()
        assert reason is not None
        assert "outside a segment" in reason


def test_a_notice_without_a_segment_fails_the_transfer() -> None:
    class Liar(KVSender):
        def send_data(self, peer: str, lane: int, message: DataMessage) -> None:
            super().send_data(peer, lane, replace(message, transport="shm"))

    with running("tcp") as pair:
        pair.sender.close()
        pair.sender = Liar(LAYOUT, pair.source, new_incarnation(), pair.sender_log, SystemClock(), settings("tcp"), "liar")
        assert "no segment" in str(pair.transfer())


def test_a_wire_below_its_floor_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    floor = settings("tcp").model_copy(update={"kv_min_gb_per_s": 1e6})
    assert_said(caplog, "is slow: tcp carries", settings("tcp"), floor)
