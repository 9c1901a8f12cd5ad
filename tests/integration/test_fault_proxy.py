"""The fault proxy between two plain sockets and between two ZeroMQ sockets: what it is told to do, and nothing else."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from services.chaos import fault_proxy
from services.chaos.fault_proxy import Fault, FaultProxy
from services.chaos.zmtp_stream import ZmtpStream, encode_message
from services.local.ports import free_port


class _EchoServer(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionResetError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)


@pytest.fixture
def echo() -> Iterator[tuple[FaultProxy, socket.socket]]:
    server = _EchoServer()
    proxy = FaultProxy([(free_port(), server.port)])
    proxy.start()
    client = socket.create_connection(("127.0.0.1", proxy.links[0].port), 30)
    client.settimeout(30)
    yield proxy, client
    client.close()
    proxy.close()
    server.listener.close()


def _exchange(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += client.recv(1 << 16)
    return answer


def test_without_faults_bytes_pass_unchanged(echo):
    _, client = echo
    data = bytes(range(256)) * 4000
    assert _exchange(client, data) == data


def test_delay_and_rate_take_time_and_lose_nothing(echo):
    proxy, client = echo
    link = proxy.links[0]
    link.back.delay_s = 0.2
    start = time.monotonic()
    assert _exchange(client, b"x") == b"x" and 0.2 <= time.monotonic() - start < 10
    link.reset()
    link.forward.bytes_per_s = 100_000
    start = time.monotonic()
    assert _exchange(client, bytes(50_000)) == bytes(50_000)
    assert 0.45 <= time.monotonic() - start < 10


def test_frozen_link_is_silent_and_goes_on_where_it_was(echo):
    proxy, client = echo
    assert _exchange(client, b"a") == b"a"
    proxy.links[0].forward.is_frozen = True
    client.sendall(b"b")
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.links[0].reset()
    client.settimeout(30)
    assert client.recv(1) == b"b"


@pytest.mark.parametrize("is_abrupt", [True, False])
def test_cut_ends_connections_and_lets_new_ones_in(echo, is_abrupt):
    proxy, client = echo
    assert _exchange(client, b"a") == b"a"
    assert proxy.cut(proxy.links[0], abruptly=is_abrupt) == 1
    if is_abrupt:
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    else:
        assert client.recv(1) == b""
    with socket.create_connection(("127.0.0.1", proxy.links[0].port), 30) as again:
        again.settimeout(30)
        assert _exchange(again, b"c") == b"c"


def test_flipped_and_dropped_bytes_befall_one_piece_each(echo):
    proxy, client = echo
    proxy.links[0].forward.strike(Fault.FLIP_BYTE)
    answer = _exchange(client, bytes(100))
    assert sum(byte.bit_count() for byte in answer) == 1
    assert _exchange(client, bytes(100)) == bytes(100)
    strike = proxy.links[0].back.strike(Fault.DROP_BYTE)
    client.sendall(b"abcdef")
    answer = b""
    while len(answer) < 5:
        answer += client.recv(100)
    assert len(answer) == 5 and strike.is_struck
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_nobody_behind_the_proxy_is_a_refused_connection():
    proxy = FaultProxy([(free_port(), free_port())])
    proxy.start()
    # The reset may be here before the client's connect returns.
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.links[0].port), 30) as client:
        client.recv(1)
    proxy.close()


class _Lane:
    """PUSH -> proxy -> PULL."""

    def __init__(self, is_encrypted: bool = False) -> None:
        self.context = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        if is_encrypted:
            public, secret = zmq.curve_keypair()
            for sock, own in ((self.pull, (public, secret)), (self.push, zmq.curve_keypair())):
                sock.setsockopt(zmq.CURVE_PUBLICKEY, own[0])
                sock.setsockopt(zmq.CURVE_SECRETKEY, own[1])
            self.pull.setsockopt(zmq.CURVE_SERVER, 1)
            self.push.setsockopt(zmq.CURVE_SERVERKEY, public)
        self.pull.setsockopt(zmq.RCVTIMEO, 30_000)
        port = self.pull.bind_to_random_port("tcp://127.0.0.1")
        self.proxy = FaultProxy([(free_port(), port)])
        self.proxy.start()
        self.push.connect(f"tcp://127.0.0.1:{self.proxy.links[0].port}")
        self.flow = self.proxy.links[0].forward

    def send(self, number: int) -> None:
        self.push.send_multipart([bytes([number]), bytes([number]) * 100_000])

    def received(self, num_messages: int) -> list[int]:
        """The numbers of so many messages, which are whole, and of what comes within a moment after them."""
        numbers = []
        while len(numbers) < num_messages or self.pull.poll(200):
            head, body = self.pull.recv_multipart()
            assert len(body) == 100_000
            numbers.append(head[0])
        return numbers

    def __enter__(self) -> "_Lane":
        return self

    def __exit__(self, *_: object) -> None:
        self.push.close(0)
        self.pull.close(0)
        self.context.term()
        self.proxy.close()


@pytest.mark.parametrize(
    "fault, expected",
    [
        (None, [0, 1, 2, 3]),
        (Fault.DROP, [0, 2, 3]),
        (Fault.DUPLICATE, [0, 1, 1, 2, 3]),
        (Fault.REORDER, [0, 2, 1, 3]),
        (Fault.LATE, [0, 2, 3, 1]),
    ],
)
def test_whole_messages_of_a_lane_are_dropped_doubled_overtaken_and_late(fault, expected, monkeypatch):
    monkeypatch.setattr(fault_proxy, "_OVERTAKE_WAIT_S", 30)
    with _Lane() as lane:
        if fault is not None:
            lane.flow.strike(fault, 1.0, is_meant=lambda frames: frames[0] == b"\x01")
        for number in range(4):
            lane.send(number)
        assert lane.received(len(expected)) == expected
        assert lane.flow.num_messages == 4 and lane.flow.struck.total() == (fault is not None)


def test_message_that_nothing_overtakes_arrives_all_the_same():
    with _Lane() as lane:
        lane.flow.strike(Fault.REORDER)
        lane.send(7)
        assert lane.received(1) == [7]


def test_flipped_message_differs_in_one_bit_and_the_lane_goes_on():
    with _Lane() as lane:
        lane.flow.strike(Fault.FLIP)
        lane.send(0)
        head, body = lane.pull.recv_multipart()
        assert sum(byte.bit_count() for byte in head + body) == 1
        lane.send(1)
        assert lane.received(1) == [1]


def test_encrypted_lane_passes_and_its_messages_are_beyond_reach():
    with _Lane(is_encrypted=True) as lane:
        strike = lane.flow.strike(Fault.DROP)
        for number in range(3):
            lane.send(number)
        assert lane.received(3) == [0, 1, 2]
        assert not strike.is_struck and lane.flow.num_messages == 0


def test_stream_is_cut_into_the_same_pieces_however_it_comes_in():
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x05READY"[:2] + b"READY"
    messages = [encode_message([b"a", b"b" * 300]), encode_message([b""]), encode_message([b"c" * 255, b"", b"d" * 256])]
    wire = greeting + ready + b"".join(messages)
    for size in (1, 7, 64, 1000):
        stream = ZmtpStream()
        pieces = list(itertools.chain.from_iterable(stream.feed(wire[start : start + size]) for start in range(0, len(wire), size)))
        assert b"".join(piece.data for piece in pieces) == wire
        assert [piece.data for piece in pieces if piece.frames is not None] == messages
