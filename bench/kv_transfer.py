"""GB/s of a KV transfer over each transport, beside raw ZeroMQ, raw TCP and plain copies of the same payloads; a process for each side.

    python bench/kv_transfer.py [--mib 512] [--chunk-kib 2048] [--lanes 2] [--repeat 3]

The raw figures send the same number of bytes from one buffer, one connection per lane, and touch nothing but the socket; the KV path
also checksums on both sides and copies into its block. "Checked" does just that, without a protocol: chunks from all over a memory, summed,
sent, and copied to their place with another sum. The plain copies are those that shared memory cannot do without: out of another
process's memory, chunk by chunk, by as many threads as there are lanes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import zmq

from kernels.checked_copy import compiled_copies
from shared.clock import SystemClock
from shared.config import Settings
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.transport.checked_copies import PlainCopies
from shared.transport.connector import CommitInfo
from shared.transport.host_blocks import HostBlocks
from shared.transport.protocol.frames import KVDtype
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.transport_name import BY_SPEED
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender
from shared.transport.wires.shared_segment import SegmentReader, SharedSegment
from shared.transport.wires.zmq_sockets import new_context, new_lane_socket


def filled_segment(size_bytes: int) -> SharedSegment:
    """Filled, so that no page is touched for the first time inside the measurement."""
    segment = SharedSegment(size_bytes)
    np.frombuffer(segment.view, np.uint8).fill(1)
    return segment


class SharedBlocks(HostBlocks):
    """Blocks that another process can read."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self._keep = filled_segment(num_blocks * layout.block_nbytes)
        super().__init__(layout, self._keep.view, self._keep.offer, compiled_copies())


class Events:
    def __init__(self) -> None:
        self.is_ended = threading.Event()
        self.info: CommitInfo | None = None

    def on_granted(self, transfer_id: str) -> None: ...

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool = False) -> None:
        sys.exit(f"transfer failed: {reason}")


class SenderEnd(Events):
    def on_committed(self, transfer_id: str) -> None:
        self.is_ended.set()


class ReceiverEnd(Events):
    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        self.info = info
        self.is_ended.set()


def serve_kv(pipe: Connection, layout: KVLayout, settings: Settings, num_blocks: int, repeat: int) -> None:
    events, incarnation = ReceiverEnd(), new_incarnation()
    receiver = KVReceiver(layout, SharedBlocks(layout, num_blocks), incarnation, events, SystemClock(), settings)
    pipe.send(
        KVPeer(
            worker_id="decode", ctrl_endpoint=receiver.ctrl_endpoint, incarnation=incarnation, server_key=receiver.server_key
        ).model_dump()
    )
    for number in range(repeat):
        receiver.expect(f"{number:032x}", 0, range(num_blocks), range(num_blocks), num_blocks * layout.block_size, 60.0)
        events.is_ended.wait(60)
        events.is_ended.clear()
        assert events.info is not None
        pipe.send(events.info.num_bytes / (events.info.committed_s - events.info.granted_s))
    pipe.recv()
    receiver.close()


def measure_kv(layout: KVLayout, settings: Settings, num_blocks: int, repeat: int) -> list[float]:
    """Bytes a second from GRANT to COMMITTED, as the receiver sees it."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=serve_kv, args=(theirs, layout, settings, num_blocks, repeat))
    child.start()
    peer, events = KVPeer(**ours.recv()), SenderEnd()
    memory, clock = SharedBlocks(layout, num_blocks), SystemClock()
    sender = KVSender(layout, memory, new_incarnation(), events, clock, settings, "prefill")
    rates = []
    for number in range(repeat):
        transfer_id = f"{number:032x}"
        sender.offer(transfer_id, 0, [peer], num_blocks * layout.block_size, [], 60.0)
        sender.send_blocks(transfer_id, [(index, index) for index in range(num_blocks)])
        sender.commit(transfer_id, bytes(8192), 0)
        events.is_ended.wait(60)
        events.is_ended.clear()
        rates.append(ours.recv())
    ours.send(None)
    sender.close()
    child.join()
    return rates


def serve_raw_zmq(pipe: Connection, num_chunks: int, chunk: int) -> None:
    pull = new_lane_socket(new_context(), zmq.PULL, chunk, 60_000)
    pipe.send(pull.bind_to_random_port("tcp://127.0.0.1"))
    pull.recv(copy=False)
    start = time.perf_counter()
    for _ in range(num_chunks):
        pull.recv(copy=False)
    pipe.send(num_chunks * chunk / (time.perf_counter() - start))


def send_raw_zmq(port: int, num_chunks: int, chunk: int) -> None:
    context = new_context()
    push = new_lane_socket(context, zmq.PUSH, chunk, 60_000)
    push.connect(f"tcp://127.0.0.1:{port}")
    payload = memoryview(np.full(chunk, 1, np.uint8))
    for _ in range(num_chunks + 1):
        push.send(payload, copy=False)
    push.close(60_000)
    context.term()


def serve_checked_zmq(pipe: Connection, num_chunks: int, chunk: int) -> None:
    pull = new_lane_socket(new_context(), zmq.PULL, chunk, 60_000)
    copies, target = compiled_copies() or PlainCopies(), np.full((num_chunks, chunk), 1, np.uint8)
    pipe.send(pull.bind_to_random_port("tcp://127.0.0.1"))
    pull.recv(copy=False)
    start = time.perf_counter()
    for number in range(num_chunks):
        copies.copy(target[number].data, pull.recv(copy=False).buffer)
    pipe.send(num_chunks * chunk / (time.perf_counter() - start))


def send_checked_zmq(port: int, num_chunks: int, chunk: int) -> None:
    context = new_context()
    push = new_lane_socket(context, zmq.PUSH, chunk, 60_000)
    copies, source = compiled_copies() or PlainCopies(), np.full((num_chunks, chunk), 1, np.uint8)
    push.connect(f"tcp://127.0.0.1:{port}")
    for number in range(-1, num_chunks):
        copies.checksum(source[number].data)
        push.send(source[number].data, copy=False)
    push.close(60_000)
    context.term()


def serve_raw_tcp(pipe: Connection, num_chunks: int, chunk: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        buffer = memoryview(bytearray(chunk))
        start, left = time.perf_counter(), num_chunks * chunk
        while left:
            left -= connection.recv_into(buffer, min(left, chunk))
        pipe.send(num_chunks * chunk / (time.perf_counter() - start))


def send_raw_tcp(port: int, num_chunks: int, chunk: int) -> None:
    payload = memoryview(np.full(chunk, 1, np.uint8))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(num_chunks):
            connection.sendall(payload)


def serve_copies(pipe: Connection, num_chunks: int, chunk: int, lanes: int, offer: SegmentOffer) -> None:
    reader, target = SegmentReader(offer), np.full((num_chunks, chunk), 1, np.uint8)

    def copy(lane: int) -> None:
        for number in range(lane, num_chunks, lanes):
            np.copyto(target[number], np.frombuffer(reader.read(number * chunk, chunk), np.uint8))

    copy(0)  # maps the pages
    start = time.perf_counter()
    threads = [threading.Thread(target=copy, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(num_chunks * chunk / (time.perf_counter() - start))


def measure_copies(num_chunks: int, chunk: int, lanes: int) -> float:
    segment = filled_segment(num_chunks * chunk)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=serve_copies, args=(theirs, num_chunks, chunk, lanes, segment.offer))
    child.start()
    rate = float(ours.recv())
    child.join()
    return rate


def measure_raw(
    serve: Callable[[Connection, int, int], None], send: Callable[[int, int, int], None], num_chunks: int, chunk: int, lanes: int
) -> float:
    """Bytes a second of all lanes together."""
    pipes, children, threads = [], [], []
    for _ in range(lanes):
        ours, theirs = multiprocessing.Pipe()
        children.append(multiprocessing.Process(target=serve, args=(theirs, num_chunks // lanes, chunk)))
        children[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        threads.append(threading.Thread(target=send, args=(pipe.recv(), num_chunks // lanes, chunk)))
    for thread in threads:
        thread.start()
    total = sum(float(pipe.recv()) for pipe in pipes)
    for waiting in (*threads, *children):
        waiting.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    chunk = options.chunk_kib << 10
    # The Llama-3.1-8B shape in bf16 has blocks of 2 MiB; other chunk sizes scale the number of layers.
    layout = KVLayout(
        model_fingerprint="bench", dtype=KVDtype.BFLOAT16, block_size=16, num_layers=max(1, chunk >> 16), num_kv_heads=8, head_dim=128
    )
    num_blocks = (options.mib << 20) // layout.block_nbytes
    print(f"{options.mib} MiB in chunks of {layout.block_nbytes >> 10} KiB, {options.lanes} lanes, median of {options.repeat}, GB/s:")
    raw = {
        "ZeroMQ, checked at either end": (serve_checked_zmq, send_checked_zmq),
        "raw ZeroMQ PUSH/PULL": (serve_raw_zmq, send_raw_zmq),
        "raw TCP": (serve_raw_tcp, send_raw_tcp),
    }
    for transport in BY_SPEED[1:]:
        settings = Settings(kv_lanes=options.lanes, kv_max_chunk_bytes=layout.block_nbytes, kv_transport=transport)
        report(f"KVX/1 over {transport}", measure_kv(layout, settings, num_blocks, options.repeat))
    report("plain copies", [measure_copies(num_blocks, chunk, options.lanes) for _ in range(options.repeat)])
    for name, (serve, send) in raw.items():
        report(name, [measure_raw(serve, send, num_blocks, chunk, options.lanes) for _ in range(options.repeat)])


def report(name: str, rates: list[float]) -> None:
    print(f"  {name:40} {statistics.median(rates) / 1e9:5.2f}")


if __name__ == "__main__":
    main()
