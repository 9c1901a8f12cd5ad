"""RpcServer over a real socket: answers from any thread, nonsense dropped."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator

import pytest
import zmq

from shared.errors import ProtocolError
from shared.messages import (
    MAX_BATCH_BYTES,
    AbortRequest,
    Ping,
    RequestFailed,
    RequestOutput,
    RouterMessage,
    decode_batch,
    encode,
    encode_batch,
)
from shared.worker.rpc_server import RpcServer


@pytest.fixture
def received() -> queue.Queue[tuple[bytes, RouterMessage]]:
    return queue.Queue()


@pytest.fixture
def server(received: queue.Queue[tuple[bytes, RouterMessage]]) -> Iterator[RpcServer]:
    running = RpcServer("127.0.0.1", "127.0.0.1", lambda router, message: received.put((router, message)))
    running.start()
    yield running
    running.close()


@pytest.fixture
def router(server: RpcServer) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    socket.connect(server.endpoint)
    yield socket
    socket.close(0)
    context.term()


def test_messages_reach_the_handler_and_answers_the_router(server: RpcServer, router: zmq.Socket[bytes], received: queue.Queue) -> None:  # type: ignore[type-arg]
    router.send(encode(AbortRequest(request_id="a", reason="test")))
    identity, message = received.get(timeout=30)
    assert message == AbortRequest(request_id="a", reason="test")
    failure = RequestFailed(request_id="a", message="no", error_type="internal", retryable=False)
    for _ in range(100):
        server.send(identity, failure)
    assert [decode_batch(router.recv()) for _ in range(100)] == [[failure]] * 100


def test_nonsense_is_counted_and_the_next_message_served(server: RpcServer, router: zmq.Socket[bytes], received: queue.Queue) -> None:  # type: ignore[type-arg]
    for frame in (b"", b"{", b'{"kind":"prefill"}', b"\xff" * 1000):
        router.send(frame)
    router.send_multipart([b"two", b"frames"])
    router.send(encode(AbortRequest(request_id="after", reason="")))
    assert received.get(timeout=30)[1].request_id == "after"
    assert server.num_rejected == 5


def test_a_handler_that_raises_does_not_end_the_server() -> None:
    seen: queue.Queue[str] = queue.Queue()

    def handler(_router: bytes, message: RouterMessage) -> None:
        seen.put(message.request_id)
        raise RuntimeError("boom")

    server = RpcServer("127.0.0.1", "127.0.0.1", handler)
    server.start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    for name in ("a", "b"):
        socket.send(encode(AbortRequest(request_id=name, reason="")))
        assert seen.get(timeout=30) == name
    socket.close(0)
    context.term()
    server.close()


def test_a_router_that_is_gone_is_ignored(server: RpcServer) -> None:
    server.send(b"nobody", RequestFailed(request_id="a", message="no", error_type="internal", retryable=False))
    server.close()


def test_the_end_of_a_router_is_told_when_an_answer_cannot_reach_it() -> None:
    gone: queue.Queue[bytes] = queue.Queue()
    seen: queue.Queue[bytes] = queue.Queue()
    server = RpcServer("127.0.0.1", "127.0.0.1", lambda router, _message: seen.put(router), gone.put)
    server.start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    socket.send(encode(AbortRequest(request_id="a", reason="")))
    router = seen.get(timeout=30)
    socket.close(0)
    context.term()
    failure = RequestFailed(request_id="a", message="no", error_type="internal", retryable=False)
    for _ in range(100):
        server.send(router, failure)
        try:
            assert gone.get(timeout=0.05) == router
            break
        except queue.Empty:
            continue
    else:
        raise AssertionError("nobody was told")
    server.close()


def test_what_is_sent_in_a_batch_is_one_frame_for_each_router_in_order(
    server: RpcServer, router: zmq.Socket[bytes], received: queue.Queue
) -> None:  # type: ignore[type-arg]
    router.send(encode(AbortRequest(request_id="a", reason="test")))
    identity, _ = received.get(timeout=30)
    outputs = [RequestOutput(request_id="a", token_id=7, index=index) for index in range(3)]
    with server.batch():
        for output in outputs:
            server.send(identity, output)
        other = threading.Thread(target=server.send, args=(identity, Ping()))
        other.start()
        other.join()
        assert decode_batch(router.recv()) == [Ping()]
        assert router.poll(50) == 0
    assert decode_batch(router.recv()) == outputs


def test_a_batch_that_fails_has_sent_what_was_sent_before(server: RpcServer, router: zmq.Socket[bytes], received: queue.Queue) -> None:  # type: ignore[type-arg]
    router.send(encode(AbortRequest(request_id="a", reason="test")))
    identity, _ = received.get(timeout=30)
    with contextlib.suppress(RuntimeError), server.batch():
        server.send(identity, Ping())
        raise RuntimeError("boom")
    server.send(identity, Ping())
    assert [decode_batch(router.recv()) for _ in range(2)] == [[Ping()]] * 2


def test_a_large_batch_is_cut_into_frames_that_a_router_takes() -> None:
    texts = ["x" * size for size in (10, MAX_BATCH_BYTES // 2, MAX_BATCH_BYTES // 2, 2 * MAX_BATCH_BYTES, 10)]
    failures = [RequestFailed(request_id="a", message=text, error_type="internal", retryable=False) for text in texts]
    frames = encode_batch(failures)
    assert [message for frame in frames for message in decode_batch(frame)] == failures
    assert len(frames) == 4
    assert encode_batch([]) == []


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"[",
        b"{}",
        b"null",
        b'[{"kind":"ping","version":1}]',
        b'[{"kind":"ping","version":4,"x":1}]',
        b"[{}]",
        pytest.param(b'[{"x":' + b"[" * 100_000, id="nested"),
    ],
)
def test_a_frame_that_is_no_list_of_messages_of_this_version_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(frame)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_id": "7"},
        {"index": 0.5},
        {"index": None},
        {"finish_reason": "tired"},
        {"logprobs": {}},
        {"x": 1},
        {"version": 1},
        {"kind": "token"},
    ],
    ids=str,
)
def test_an_output_with_a_wrong_field_is_refused(wrong: dict[str, object]) -> None:
    right = {"kind": "output", "version": 4, "request_id": "a", "token_id": 7, "index": 0}
    assert decode_batch(json.dumps([right]).encode()) == [RequestOutput(request_id="a", token_id=7, index=0)]
    with pytest.raises(ProtocolError):
        decode_batch(json.dumps([right | wrong]).encode())
