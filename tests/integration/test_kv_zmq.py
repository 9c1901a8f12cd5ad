"""KV transfer over real ZeroMQ on the loopback: threads for what must be exact, processes for what must be survived."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from kv_transfer_pairs import LAYOUT, SETTINGS, TRACEPARENT, TRANSFER, ReceiverLog, SenderLog, fill, random_memory, tokens_of
from kv_transfer_process import NUM_BLOCKS, NUM_TOKENS
from lost_time import LostTime

from shared.clock import SystemClock
from shared.errors import ConfigurationError, TransferError
from shared.ids import new_incarnation, new_transfer_id
from shared.messages import KVPeer
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending import kv_sender
from shared.transport.sending.kv_sender import KVSender
from shared.transport.simulated_network import BytesMemory
from shared.transport.wires.curve import CurveKeys, connect_with

PROCESS = Path(__file__).parents[1] / "support" / "kv_transfer_process.py"
ALL = list(range(NUM_BLOCKS))


def wait_until(condition) -> float:
    """Seconds waited, without those in which nothing here could run; fails when the condition does not come true."""
    start = time.monotonic()
    with LostTime() as lost:
        while not condition():
            assert time.monotonic() - start < 30, "did not happen in time"
            time.sleep(0.005)
        return time.monotonic() - start - lost.so_far_s


class ZmqPair:
    """A sender and a receiver in this process, joined by TCP."""

    def __init__(self, *, layout=LAYOUT, settings=SETTINGS, num_blocks=NUM_BLOCKS, tap=None, target=None, sender=True):
        self.source, self.target = random_memory(num_blocks, 0, layout), target or BytesMemory(num_blocks, layout)
        self.sender_log, self.receiver_log = SenderLog(), ReceiverLog()
        self.incarnation = new_incarnation()
        self.receiver = KVReceiver(layout, self.target, self.incarnation, self.receiver_log, SystemClock(), settings)
        self.peer = KVPeer(
            worker_id="decode-0",
            ctrl_endpoint=self.receiver.ctrl_endpoint,
            incarnation=self.incarnation,
            server_key=self.receiver.server_key,
        )
        self.sender = (
            KVSender(layout, self.source, new_incarnation(), self.sender_log, SystemClock(), settings, "prefill-0", tap) if sender else None
        )

    def offer(self, transfer_id=TRANSFER, num_tokens=NUM_TOKENS, peer=None):
        self.sender.offer(transfer_id, 0, [peer or self.peer], num_tokens, [], 60.0, TRACEPARENT)

    def expect(self, transfer_id=TRANSFER, missing=ALL, num_tokens=NUM_TOKENS):
        self.receiver.expect(transfer_id, 0, ALL, missing, num_tokens, 60.0, TRACEPARENT)

    def send_all(self, transfer_id=TRANSFER):
        self.sender.send_blocks(transfer_id, [(index, index) for index in ALL])
        self.sender.commit(transfer_id, b"hidden", 0)

    def is_copied(self):
        return all(self.source.block(index) == self.target.block(index) for index in ALL)

    def wait_ends(self):
        return wait_until(lambda: self.sender_log.ended and self.receiver_log.ended)

    def close(self):
        if self.sender:
            self.sender.close()
        self.receiver.close()


@contextmanager
def zmq_pair(**options):
    pair = ZmqPair(**options)
    try:
        yield pair
    finally:
        pair.close()


@contextmanager
def process(*arguments: str):
    child = subprocess.Popen([sys.executable, str(PROCESS), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_transfer_is_exact():
    with zmq_pair() as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        pair.wait_ends()
        assert pair.receiver_log.ended == {TRANSFER: [None]} == pair.sender_log.ended
        assert pair.is_copied() and pair.receiver_log.hidden[TRANSFER] == b"hidden"


def test_sixteen_transfers_at_once_do_not_mix():
    layout = KVLayout(model_fingerprint="m", dtype=KVDtype.BFLOAT16, block_size=16, num_layers=4, num_kv_heads=3, head_dim=64)
    with zmq_pair(layout=layout, settings=SETTINGS.model_copy(update={"kv_max_chunk_bytes": 1 << 20}), num_blocks=256) as pair:
        transfers = [new_transfer_id() for _ in range(16)]
        for number, transfer_id in enumerate(transfers):
            ids = list(range(number * 16, number * 16 + 16))
            pair.receiver.expect(transfer_id, 0, ids[::-1], range(16), 256 - number, 60.0)
            pair.sender.offer(transfer_id, 0, [pair.peer], 256 - number, [], 60.0)
            pair.sender.send_blocks(transfer_id, list(enumerate(ids)))
            pair.sender.commit(transfer_id, transfer_id.encode(), 0)
        wait_until(lambda: len(pair.receiver_log.ended) == len(pair.sender_log.ended) == 16)
        assert all(ends == [None] for ends in pair.receiver_log.ended.values())
        for number in range(16):
            for index in range(16):
                valid = min(16, 256 - number - 16 * index)
                source, target = pair.source.block(number * 16 + index), pair.target.block(number * 16 + 15 - index)
                assert tokens_of(source, valid, layout) == tokens_of(target, valid, layout)
        assert pair.receiver_log.hidden == {transfer_id: transfer_id.encode() for transfer_id in transfers}


def test_flipped_byte_is_detected_and_repaired():
    flipped = []

    def flip_once(header, payload):
        if header.chunk_seq == 3 and header.payload_nbytes and not flipped:
            flipped.append(header)
            return memoryview(bytes(payload[:-1]) + bytes([payload[-1] ^ 1]))
        return payload

    with zmq_pair(tap=flip_once) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        pair.wait_ends()
        assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied()
        assert pair.receiver.counters()["bad_checksums"] == 1 and pair.sender.counters()["chunks_resent"] == 1


def test_dropped_chunk_is_found_and_sent_again():
    dropped = []

    def drop_once(header, payload):
        if header.chunk_seq == 31 and header.payload_nbytes and not dropped:
            dropped.append(header)
            return None
        return payload

    with zmq_pair(tap=drop_once) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        pair.wait_ends()
        assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied()
        assert pair.sender.counters()["chunks_resent"] == 1


def test_all_chunks_lost_never_commits_and_fails_both_sides():
    with zmq_pair(tap=lambda header, payload: payload if not header.payload_nbytes else None) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        pair.wait_ends()
        assert "lost" in pair.receiver_log.ended[TRANSFER][0] and "lost" in pair.sender_log.ended[TRANSFER][0]


def test_sender_that_cannot_send_one_chunk_fails_both_sides_within_a_second():
    def refuse(header, payload):
        if header.chunk_seq == 7:
            raise OSError("no such layer")
        return payload

    with zmq_pair(tap=refuse) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        assert pair.wait_ends() < 1.0
        assert "no such layer" in pair.receiver_log.ended[TRANSFER][0] and "no such layer" in pair.sender_log.ended[TRANSFER][0]


def test_frames_that_come_after_an_abort_write_nothing():
    is_held, is_aborted = threading.Event(), threading.Event()

    def hold_back(header, payload):
        is_held.set()
        is_aborted.wait(60)
        return payload

    with zmq_pair(tap=hold_back) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        assert is_held.wait(30)
        assert pair.receiver.abort(TRANSFER, "client left")
        for index in ALL:
            fill(pair.target, index, 7)
        is_aborted.set()
        wait_until(lambda: pair.sender_log.ended)
        wait_until(lambda: pair.receiver.counters()["stale_frames"] > 0)
        assert "client left" in pair.sender_log.ended[TRANSFER][0]
        assert all(set(pair.target.block(index)) == {7} for index in ALL)
        assert pair.receiver_log.ended == {}


def test_receiver_that_is_slow_but_alive_is_not_cut():
    class SlowMemory(BytesMemory):
        def write(self, regions, data):
            time.sleep(0.15)
            return super().write(regions, data)

    settings = SETTINGS.model_copy(update={"kv_progress_timeout_s": 1.5})
    with zmq_pair(target=SlowMemory(NUM_BLOCKS, LAYOUT), settings=settings) as pair:
        pair.offer()
        pair.expect()
        pair.send_all()
        assert pair.wait_ends() > 1.5
        assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied()


def test_wrong_incarnation_at_the_right_address_fails_quickly():
    with zmq_pair() as pair:
        pair.offer(peer=pair.peer.model_copy(update={"incarnation": 5}))
        assert wait_until(lambda: pair.sender_log.ended) < 1.0
        assert "restarted" in pair.sender_log.ended[TRANSFER][0]
        other = new_transfer_id()
        pair.offer(other)
        pair.expect(other)
        pair.send_all(other)
        pair.wait_ends()
        assert pair.receiver_log.ended == {other: [None]}


def test_nobody_at_the_address_fails_within_the_hello_deadline():
    with zmq_pair() as pair:
        pair.offer(peer=pair.peer.model_copy(update={"ctrl_endpoint": "tcp://127.0.0.1:9"}))
        assert wait_until(lambda: pair.sender_log.ended) < 3.0
        assert "HELLO" in pair.sender_log.ended[TRANSFER][0]


def test_endpoint_that_is_none_fails():
    with zmq_pair() as pair:
        pair.offer(peer=pair.peer.model_copy(update={"ctrl_endpoint": "nonsense"}))
        wait_until(lambda: pair.sender_log.ended)
        assert "cannot connect" in pair.sender_log.ended[TRANSFER][0]


def test_killed_prefill_is_noticed_within_two_seconds():
    with zmq_pair(sender=False) as pair, process("prefill", pair.peer.model_dump_json()) as child:
        wait_until(lambda: pair.receiver.state.num_transfers == 1)
        pair.expect()
        assert child.stdout.readline() == "half\n"
        child.kill()
        assert wait_until(lambda: pair.receiver_log.ended) < 2.0
        [reason] = pair.receiver_log.ended[TRANSFER]
        # A connection that broke may come back for a second; held up meanwhile, the receiver finds the silence first.
        assert reason in ("the connection to the prefill worker broke", "the prefill worker has been silent for 1.5 s")


def test_frozen_prefill_is_cut_and_told_when_it_thaws():
    with zmq_pair(sender=False) as pair, process("prefill", pair.peer.model_dump_json()) as child:
        wait_until(lambda: pair.receiver.state.num_transfers == 1)
        pair.expect()
        assert child.stdout.readline() == "half\n"
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_until(lambda: pair.receiver_log.ended) < 2.0
        for index in ALL:
            fill(pair.target, index, 7)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline().startswith("ended: ")
        assert all(set(pair.target.block(index)) == {7} for index in ALL)


def test_killed_decode_is_noticed_within_two_seconds_and_its_successor_is_another():
    log = SenderLog()
    sender = KVSender(LAYOUT, random_memory(NUM_BLOCKS, 0), new_incarnation(), log, SystemClock(), SETTINGS, "prefill-0")
    try:
        with process("decode") as child:
            peer = KVPeer.model_validate_json(child.stdout.readline())
            sender.offer(TRANSFER, 0, [peer], NUM_TOKENS, [], 60.0)
            sender.send_blocks(TRANSFER, [(index, index) for index in ALL[:-1]])
            wait_until(lambda: log.granted)
            child.kill()
            assert wait_until(lambda: log.ended) < 2.0
        with process("decode") as child:
            peer = KVPeer.model_validate_json(child.stdout.readline())
            log.ended.clear()
            sender.offer(TRANSFER, 0, [peer], NUM_TOKENS, [], 60.0)
            sender.send_blocks(TRANSFER, [(index, index) for index in ALL])
            sender.commit(TRANSFER, b"hidden", 0)
            assert child.stdout.readline() == "ended: None\n"
    finally:
        sender.close()


def test_noise_on_every_socket_is_counted_and_harms_nobody():
    with zmq_pair() as pair, zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        connect_with(dealer, CurveKeys.new(), pair.peer.server_key.encode())
        dealer.connect(pair.peer.ctrl_endpoint)
        pushes = []
        for endpoint in pair.receiver.state._peers._lanes.tcp:
            pushes.append(context.socket(zmq.PUSH))
            pushes[-1].connect(endpoint)
        for size in (0, 1, 192, 1000):
            dealer.send(os.urandom(size))
            dealer.send_multipart([os.urandom(size)] * 4)
            for push in pushes:
                push.send(os.urandom(size))
                push.send_multipart([os.urandom(192), os.urandom(size)])
        wait_until(lambda: pair.receiver.counters()["malformed_messages"] >= 16 and pair.receiver.counters()["bad_headers"] >= 8)
        pair.offer()
        pair.expect()
        pair.send_all()
        pair.wait_ends()
        assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied()
        for sock in (dealer, *pushes):
            sock.close(0)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_closing_one_side_fails_the_other_at_once_and_leaves_no_thread(side):
    before = set(threading.enumerate())
    pair = ZmqPair()
    pair.offer()
    pair.expect()
    wait_until(lambda: pair.sender_log.granted)
    (pair.sender if side == "sender" else pair.receiver).close()
    assert pair.wait_ends() < 1.0
    pair.close()
    wait_until(lambda: not {thread.name for thread in set(threading.enumerate()) - before} - {LostTime.THREAD_NAME})
    assert "shutting down" in pair.sender_log.ended[TRANSFER][0] and "shutting down" in pair.receiver_log.ended[TRANSFER][0]


def test_bad_arguments_say_what_to_do():
    with zmq_pair() as pair:
        with pytest.raises(TransferError, match="new_transfer_id"):
            pair.offer("not hex")
        with pytest.raises(TransferError, match="hidden state"):
            pair.sender.commit(TRANSFER, bytes(2 << 20), 0)
    with pytest.raises(ConfigurationError, match="advertise_host"):
        KVReceiver(LAYOUT, pair.target, 1, pair.receiver_log, SystemClock(), SETTINGS, "0.0.0.0")


def test_large_transfer_moves_at_memory_like_speed():
    layout = KVLayout(model_fingerprint="m", dtype=KVDtype.FLOAT32, block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
    settings = SETTINGS.model_copy(update={"kv_max_chunk_bytes": 4 << 20, "kv_credits": 16})
    speeds = []
    with zmq_pair(layout=layout, settings=settings, num_blocks=128) as pair:
        for _ in range(3):
            transfer_id = new_transfer_id()
            pair.receiver.expect(transfer_id, 0, range(128), range(128), 128 * 16, 60.0)
            pair.sender.offer(transfer_id, 0, [pair.peer], 128 * 16, [], 60.0)
            pair.sender.send_blocks(transfer_id, [(index, index) for index in range(128)])
            pair.sender.commit(transfer_id, b"h", 0)
            wait_until(lambda transfer_id=transfer_id: transfer_id in pair.sender_log.ended and transfer_id in pair.receiver_log.ended)
            info = pair.receiver_log.infos[transfer_id]
            speeds.append(info.num_bytes / info.wire_s)
    assert max(speeds) > 100e6, "far below what any machine does; see bench/kv_transfer.py for a real figure"


@pytest.mark.parametrize("what", ["new_control_socket", "SenderLane"])
def test_worker_out_of_descriptors_fails_the_transfer_and_lives_on(what, monkeypatch):
    def refuse(*args):
        raise zmq.ZMQError(errno.EMFILE)

    pair = ZmqPair()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(kv_sender, what, refuse)
            pair.offer()
            wait_until(lambda: TRANSFER in pair.sender_log.ended)
            assert "open files" in pair.sender_log.ended[TRANSFER][0]
        other = new_transfer_id()
        pair.offer(other)
        pair.expect(other)
        pair.send_all(other)
        wait_until(lambda: other in pair.sender_log.ended)
        assert pair.sender_log.ended[other] == [None]
    finally:
        pair.close()


def test_a_lane_ends_though_its_peer_leaves_at_the_same_time() -> None:
    """In a process of its own: libzmq, waiting for somebody to read an event, once held up every thread of it."""
    script = """
import threading, time, zmq
from shared.transport.sending.sender_lane import SenderLane
for _ in range(100):
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    lane = SenderLane(f"tcp://127.0.0.1:{port}", 1 << 20, None, lambda *_: None, None, lambda _: None)
    give_up_s = time.monotonic() + 30
    while not lane.connection_changes():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    leaving = threading.Thread(target=pull.close, args=(0,))
    leaving.start()
    lane.close()
    lane.join(30)
    assert not lane.is_alive
    leaving.join()
    context.term()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
