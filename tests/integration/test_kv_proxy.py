"""KV transfer through the fault proxy: ports that are given and advertised, and what befalls single frames on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, ReceiverLog, SenderLog, random_memory
from lost_time import LostTime

from services.chaos.fault_proxy import Fault, FaultProxy
from services.local.ports import free_ports
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.transport.protocol.frames import HEADER_NBYTES
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender
from shared.transport.simulated_network import BytesMemory

NUM_BLOCKS = 16
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size


def _is_chunk(frames) -> bool:
    """Of this transfer: not a probe, not a fence."""
    return len(frames) == 2 and len(frames[0]) == HEADER_NBYTES and len(frames[1]) > 0 and any(frames[0][10:26])


class ProxiedPair:
    """A sender and a receiver with a fault proxy between them."""

    def __init__(self, lane_security: str = "plain-trusted", **changes: int) -> None:
        num_ports = 1 + SETTINGS.kv_lanes
        port, shown = free_ports(num_ports), free_ports(num_ports)
        self.settings = SETTINGS.model_copy(
            update={"kv_port": port, "kv_advertise_port": shown, "kv_transport": "tcp", "kv_lane_security": lane_security} | changes
        )
        self.proxy = FaultProxy([(shown + index, port + index) for index in range(num_ports)])
        self.control, *self.lanes = self.proxy.links
        self.source, self.target = random_memory(NUM_BLOCKS, 0), BytesMemory(NUM_BLOCKS, LAYOUT)
        self.sender_log, self.receiver_log = SenderLog(), ReceiverLog()
        incarnation = new_incarnation()
        self.receiver = KVReceiver(LAYOUT, self.target, incarnation, self.receiver_log, SystemClock(), self.settings)
        self.endpoint = self.receiver.ctrl_endpoint
        self.peer = KVPeer(worker_id="decode-0", ctrl_endpoint=self.endpoint, incarnation=incarnation, server_key=self.receiver.server_key)
        self.sender = KVSender(LAYOUT, self.source, new_incarnation(), self.sender_log, SystemClock(), self.settings, "prefill-0")
        self.proxy.start()

    def run(self, timeout_s: float = 60.0, transfer_id: str = TRANSFER) -> float:
        """One transfer of all blocks; seconds until both sides have ended, without those in which nothing here could run."""
        with LostTime() as lost:
            return self._run(timeout_s, transfer_id) - lost.so_far_s

    def _run(self, timeout_s: float, transfer_id: str) -> float:
        start = time.monotonic()
        self.sender.offer(transfer_id, 0, [self.peer], NUM_TOKENS, [], 60.0)
        self.receiver.expect(transfer_id, 0, range(NUM_BLOCKS), range(NUM_BLOCKS), NUM_TOKENS, 60.0)
        self.sender.send_blocks(transfer_id, [(index, index) for index in range(NUM_BLOCKS)])
        self.sender.commit(transfer_id, b"hidden", 0)
        while not (self.sender_log.ended and self.receiver_log.ended):
            assert time.monotonic() - start < timeout_s, "did not end in time"
            time.sleep(0.005)
        return time.monotonic() - start

    def in_the_middle(self, act: Callable[[], object]) -> threading.Thread:
        """`act` in a thread of its own, once chunks of the transfer that is about to run have arrived."""
        before = self.receiver.counters()["chunks_received"]

        def wait_and_act() -> None:
            give_up_s = time.monotonic() + 30
            while self.receiver.counters()["chunks_received"] < before + 2 and time.monotonic() < give_up_s:
                time.sleep(0.005)
            act()

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        return thread

    @property
    def is_exact(self) -> bool:
        is_committed = self.receiver_log.ended == {TRANSFER: [None]} == self.sender_log.ended
        return is_committed and all(self.source.block(index) == self.target.block(index) for index in range(NUM_BLOCKS))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.proxy.close()


def wait_until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_s, "did not happen in time"
        time.sleep(0.005)


@contextmanager
def proxied_pair(**options) -> Iterator[ProxiedPair]:
    pair = ProxiedPair(**options)
    try:
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("lane_security", ["plain-trusted", "curve"])
def test_transfer_finds_its_way_through_the_advertised_ports(lane_security):
    with proxied_pair(lane_security=lane_security) as pair:
        assert pair.endpoint == f"tcp://127.0.0.1:{pair.settings.kv_advertise_port}"
        pair.run()
        assert pair.is_exact
        moved = sum(link.forward.num_bytes for link in pair.lanes)
        assert moved > NUM_BLOCKS * LAYOUT.block_nbytes and pair.control.back.num_bytes > 0


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.LATE, Fault.FLIP])
def test_what_befalls_one_frame_fails_no_transfer(fault):
    with proxied_pair() as pair:
        strikes = [link.forward.strike(fault, 0.3, _is_chunk) for link in pair.lanes]
        took_s = pair.run()
        assert pair.is_exact and all(strike.is_struck for strike in strikes)
        assert took_s < 2.0


def test_late_frame_of_an_ended_transfer_is_refused():
    with proxied_pair() as pair:
        pair.lanes[0].forward.strike(Fault.LATE, 2.0, _is_chunk)
        pair.run()
        assert pair.is_exact
        before = [bytes(pair.target.block(index)) for index in range(NUM_BLOCKS)]
        wait_until(lambda: pair.receiver.counters()["stale_frames"])
        assert pair.receiver.counters()["stale_frames"] == 1
        assert before == [bytes(pair.target.block(index)) for index in range(NUM_BLOCKS)]


def test_throttled_lane_is_waited_for():
    with proxied_pair() as pair:
        for link in pair.lanes:
            link.forward.bytes_per_s = 40_000
        assert pair._run(60, TRANSFER) > 0.5
        assert pair.is_exact


@pytest.mark.parametrize("is_abrupt", [True, False])
def test_cut_lane_is_opened_again_and_what_it_lost_is_sent_again(is_abrupt):
    with proxied_pair() as pair:
        for link in pair.lanes:
            link.forward.bytes_per_s = 100_000
        cutting = pair.in_the_middle(lambda: pair.proxy.cut(pair.lanes[0], abruptly=is_abrupt))
        pair.run()
        cutting.join()
        assert pair.is_exact


@pytest.mark.parametrize("is_abrupt", [True, False])
def test_cut_control_comes_back_and_the_transfer_goes_on_where_it_was(is_abrupt):
    with proxied_pair() as pair:
        for link in pair.lanes:
            link.forward.bytes_per_s = 100_000
        cutting = pair.in_the_middle(lambda: pair.proxy.cut(pair.control, abruptly=is_abrupt))
        pair.run()
        cutting.join()
        assert pair.is_exact
        assert pair.sender.counters()["resumes"] >= 1  # HELLO is said again where the answer is late
        assert pair.sender.counters()["chunks_resent"] == 0, "what has arrived does not travel again"


def test_lane_that_does_not_come_back_leaves_its_chunks_to_the_others():
    def break_for_good() -> None:
        pair.lanes[0].forward.is_frozen = pair.lanes[0].back.is_frozen = True
        pair.proxy.cut(pair.lanes[0], abruptly=True)

    with proxied_pair() as pair:
        for link in pair.lanes:
            link.forward.bytes_per_s = 100_000
        breaking = pair.in_the_middle(break_for_good)
        assert pair.run() < 4.0
        breaking.join()
        assert pair.is_exact
        assert pair.sender.counters()["lanes_given_up"] == 1


def test_lane_given_up_lets_go_of_all_it_was_to_send():
    """Many credits make its queue long: a chunk that it was still to read would keep the COMMIT, and the blocks, until it is back."""
    with proxied_pair(kv_credits=32) as pair:
        pair.run()
        pair.sender_log.ended.clear()
        pair.receiver_log.ended.clear()
        pair.lanes[0].forward.is_frozen = pair.lanes[0].back.is_frozen = True
        pair.proxy.cut(pair.lanes[0], abruptly=True)
        assert pair.run(transfer_id="cd" * 16) < 4.0
        assert pair.receiver_log.ended == {"cd" * 16: [None]} == pair.sender_log.ended
        assert pair.sender.counters()["lanes_given_up"] == 1


def test_lane_that_was_never_reached_is_done_without():
    """A firewall that knows of two ports and not of the third."""
    with proxied_pair(kv_credits=32) as pair:
        pair.lanes[0].forward.is_frozen = pair.lanes[0].back.is_frozen = True
        assert pair.run() < 2.0
        assert pair.is_exact


def test_peer_without_a_lane_that_can_be_reached_is_known_for_it():
    with proxied_pair() as pair:
        for lane in pair.lanes:
            lane.forward.is_frozen = lane.back.is_frozen = True
        pair.run()
        (reason,) = pair.sender_log.ended[TRANSFER]
        assert "could be reached" in reason and str(pair.settings.kv_advertise_port + 2) in reason


def test_aborted_transfer_gives_its_blocks_back_also_while_its_lanes_are_broken():
    with proxied_pair(kv_credits=32) as pair:
        pair.run()
        for lane in pair.lanes:
            lane.forward.is_frozen = lane.back.is_frozen = True
            pair.proxy.cut(lane, abruptly=True)
        other = "cd" * 16
        pair.sender.offer(other, 0, [pair.peer], NUM_TOKENS, [], 60.0)
        pair.receiver.expect(other, 0, range(NUM_BLOCKS), range(NUM_BLOCKS), NUM_TOKENS, 60.0)
        pair.sender.send_blocks(other, [(index, index) for index in range(NUM_BLOCKS)])
        wait_until(lambda: pair.sender.counters()["chunks_sent"] > 40)  # they wait on the lanes
        with LostTime() as lost:
            start = time.monotonic()
            pair.sender.abort(other, "client left")
            wait_until(lambda: other in pair.sender_log.ended)
            assert time.monotonic() - start < 0.5 + lost.so_far_s, "its blocks are kept"


def test_damaged_byte_of_encrypted_control_fails_nothing_silently():
    with proxied_pair() as pair:
        pair.control.forward.strike(Fault.FLIP_BYTE)
        pair.run()
        assert pair.is_exact or all(ends[0] is not None for log in (pair.sender_log, pair.receiver_log) for ends in log.ended.values())


def test_frozen_control_is_noticed_within_two_seconds_on_both_sides():
    with proxied_pair() as pair:
        pair.sender.offer(TRANSFER, 0, [pair.peer], NUM_TOKENS, [], 60.0)
        pair.receiver.expect(TRANSFER, 0, range(NUM_BLOCKS), range(NUM_BLOCKS), NUM_TOKENS, 60.0)
        wait_until(lambda: pair.sender_log.granted)
        with LostTime() as lost:
            frozen_s = time.monotonic()
            pair.control.forward.is_frozen = pair.control.back.is_frozen = True
            wait_until(lambda: pair.sender_log.ended and pair.receiver_log.ended)
            assert time.monotonic() - frozen_s < 2.0 + lost.so_far_s


def test_given_port_that_is_taken_is_refused_with_its_name():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = SETTINGS.model_copy(update={"kv_port": other.getsockname()[1]})
        with pytest.raises(ConfigurationError, match="kv_port"):
            KVReceiver(LAYOUT, random_memory(1, 0), 1, ReceiverLog(), SystemClock(), settings)


def test_advertised_port_alone_is_refused():
    settings = SETTINGS.model_copy(update={"kv_advertise_port": 9999})
    with pytest.raises(ConfigurationError, match="set kv_port too"):
        KVReceiver(LAYOUT, random_memory(1, 0), 1, ReceiverLog(), SystemClock(), settings)
