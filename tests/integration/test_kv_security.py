"""Who gets into a KV transfer: CURVE keys, the allow-list, encrypted lanes. Over real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, ReceiverLog, SenderLog, random_memory
from lost_time import LostTime

from shared.clock import SystemClock
from shared.config import Settings
from shared.errors import ConfigurationError
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender
from shared.transport.simulated_network import BytesMemory
from shared.transport.wires.curve import CurveKeys, load_key_file, write_key_file

NUM_BLOCKS = 8
ALL = range(NUM_BLOCKS)


class Pair:
    def __init__(self, sending: Settings, receiving: Settings, server_key: str | None = None) -> None:
        self.source, self.target = random_memory(NUM_BLOCKS, 0), BytesMemory(NUM_BLOCKS, LAYOUT)
        self.sender_log, self.receiver_log = SenderLog(), ReceiverLog()
        incarnation, clock = new_incarnation(), SystemClock()
        self.receiver = KVReceiver(LAYOUT, self.target, incarnation, self.receiver_log, clock, receiving)
        endpoint, key = self.receiver.ctrl_endpoint, server_key if server_key is not None else self.receiver.server_key
        self.peer = KVPeer(worker_id="decode-0", ctrl_endpoint=endpoint, incarnation=incarnation, server_key=key)
        self.sender = KVSender(LAYOUT, self.source, new_incarnation(), self.sender_log, clock, sending, "prefill-0")

    def transfer(self) -> str | None:
        """How it ended at the sender: None, or why it failed."""
        num_tokens = NUM_BLOCKS * LAYOUT.block_size
        self.receiver.expect(TRANSFER, 0, ALL, ALL, num_tokens, 60.0)
        self.sender.offer(TRANSFER, 0, [self.peer], num_tokens, [], 60.0)
        self.sender.send_blocks(TRANSFER, [(index, index) for index in ALL])
        self.sender.commit(TRANSFER, b"hidden", 0)
        wait_until(lambda: self.sender_log.ended)
        return self.sender_log.ended[TRANSFER][0]


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def settings(**changes: object) -> Settings:
    return SETTINGS.model_copy(update=changes)


@contextmanager
def running(sending: Settings, receiving: Settings, server_key: str | None = None) -> Iterator[Pair]:
    pair = Pair(sending, receiving, server_key)
    try:
        yield pair
    finally:
        pair.sender.close()
        pair.receiver.close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    write_key_file(tmp_path / "kv.key")
    return str(tmp_path / "kv.key")


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("with_key_file", [False, True])
def test_encrypted_lanes_carry_the_same_bytes(key_file: str, transport: str, with_key_file: bool) -> None:
    both = settings(kv_lane_security="curve", kv_transport=transport, kv_key_file=key_file if with_key_file else None)
    with running(both, both) as pair:
        assert pair.transfer() is None
        assert all(pair.source.block(index) == pair.target.block(index) for index in ALL)


def test_only_holders_of_a_known_key_are_let_in(key_file: str, tmp_path: Path) -> None:
    write_key_file(tmp_path / "other.key")
    closed = settings(kv_key_file=key_file)
    for stranger in (settings(), settings(kv_key_file=str(tmp_path / "other.key"))):
        with running(stranger, closed) as pair, LostTime() as lost:
            start_s = time.monotonic()
            assert "refused our key" in str(pair.transfer())
            assert time.monotonic() - start_s < 2.0 + lost.so_far_s
            assert pair.receiver.counters()["bytes_received"] == 0
    with running(closed, closed) as pair:
        assert pair.transfer() is None


def test_keys_are_changed_without_a_gap(key_file: str, tmp_path: Path) -> None:
    old = tmp_path / "old.key"
    old.write_text(Path(key_file).read_text())
    old.chmod(0o600)
    write_key_file(Path(key_file))
    first, second = load_key_file(key_file)
    assert second == load_key_file(str(old))[0] != first
    for sending in (str(old), key_file):
        with running(settings(kv_key_file=sending), settings(kv_key_file=key_file)) as pair:
            assert pair.transfer() is None


def test_whoever_answers_in_decodes_place_is_not_spoken_to() -> None:
    with running(settings(), settings(), server_key=CurveKeys.new().public.decode()) as pair:
        assert pair.transfer() is not None
        assert pair.receiver.counters()["malformed_messages"] == 0


def test_without_encryption_control_is_not_heard() -> None:
    with running(settings(), settings()) as pair, zmq.Context() as context:
        for option in (zmq.DEALER, zmq.PUSH):
            sock = context.socket(option)
            sock.linger = 0
            sock.connect(pair.peer.ctrl_endpoint)
            sock.setsockopt(zmq.SNDTIMEO, 200)
            sock.setsockopt(zmq.IMMEDIATE, 1)
            with pytest.raises(zmq.Again):
                for _ in range(2000):
                    sock.send(os.urandom(64))
            sock.close(0)
        assert pair.receiver.counters()["malformed_messages"] == 0
        assert pair.transfer() is None


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [("", 0o600, "holds no key"), ("nonsense\n", 0o600, "line 1"), ("# only this\n", 0o600, "holds no key"), (None, 0o644, "chmod 600")],
)
def test_a_key_file_that_cannot_be_used_is_refused_without_being_shown(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    file = tmp_path / "kv.key"
    keys = write_key_file(file)
    if content is not None:
        file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_key_file(str(file))
    assert keys.secret.decode() not in caught.value.message
    assert keys.secret.decode() not in repr(keys)


def test_the_command_makes_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "kv.key"
    done = subprocess.run([sys.executable, "-m", "services.cli", "keys", str(file)], capture_output=True, text=True, check=True)
    (keys,) = load_key_file(str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert keys.public.decode() in done.stdout
    assert keys.secret.decode() not in done.stdout + done.stderr
    refused = subprocess.run([sys.executable, "-m", "services.cli", "keys", str(tmp_path / "no" / "x")], capture_output=True, text=True)
    assert refused.returncode == 2
