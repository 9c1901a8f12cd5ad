"""KV between GPUs, or between two processes of one GPU: the copies, the transfer, and what of it a prompt has to wait for.

    python bench/kv_transfer_gpu.py [--parts copies,staged,kvx,ipc,control,exposed] [--mib 1024] [--devices 0,0] [--repeat 3]
        [--transport shm]
        [--sums gpu|cores] [--connections 32] [--switch-ms 0.5]

copies: the copy engines by size of piece, the kernel that takes small ones, checksums on the GPU and on cores. staged: GPU ->
pinned shared memory -> GPU between two processes, checksums included, by 1, 2 and 4 threads, without the protocol. kvx: the same through
KVX/1. ipc:
from GPU memory to GPU memory of another process, beside a plain copy. control: how long OFFER -> GRANT takes while bulk goes on.
exposed: 8192 tokens of a Llama-3.1-8B shape (random weights) in chunks of 2048; what passes between the last layer and COMMITTED,
by groups of layers.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from kernels import cache_ops
from kernels.piece_transfer import PieceTransfer
from shared.clock import SystemClock
from shared.config import Settings
from shared.engine.device_blocks import DeviceBlocks
from shared.engine.engine_core import EngineCore
from shared.engine.peer_device_memory import PeerDeviceMemory, offer_of
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.model_files.model_config import Llama3RopeScaling, ModelConfig
from shared.model_files.model_source import ModelSource
from shared.request import Request
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import KVDtype, checksum, chunk_checksum
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender
from shared.transport.wires.shared_segment import SegmentReader

LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 32, 8, 16, 128
LLAMA_8B = ModelConfig(
    architecture="llama", num_layers=LAYERS, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=HEADS, head_dim=HEAD_DIM,
    vocab_size=128256, tokenizer_vocab_size=128256, max_model_len=131072, rope_theta=500000.0, rms_norm_eps=1e-5,
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192), eos_token_ids=(128001,), bos_token_id=128000,
)  # fmt: skip
LAYOUT = KVLayout(
    model_fingerprint="bench", dtype=KVDtype.BFLOAT16, block_size=BLOCK_SIZE, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM
)
CHUNK, LARGE_CHUNK = 4 << 20, 16 << 20
WHOLE = (0, LAYERS, 0, HEADS, 0, BLOCK_SIZE)
TIMEOUT_S = 60


def random_cache(num_blocks: int, device: int) -> torch.Tensor:
    shape = (num_blocks, LAYERS, 2, HEADS, BLOCK_SIZE, HEAD_DIM)
    torch.cuda.set_device(device)
    generator = torch.Generator(f"cuda:{device}").manual_seed(1)
    nbytes = num_blocks * LAYOUT.block_nbytes
    return (
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=f"cuda:{device}", generator=generator).view(torch.bfloat16).view(shape)
    )


def blocks_over(cache: torch.Tensor) -> DeviceBlocks:
    return DeviceBlocks(
        cache, staging_nbytes=512 << 20, max_chunk_nbytes=LARGE_CHUNK, sums_on_gpu=os.environ.get("SUMS_ON_GPU", "1") == "1"
    )


def best_s(action: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def report(name: str, value: float, unit: str = "GB/s") -> None:
    print(f"  {name:74} {value:8.2f} {unit}", flush=True)


class Child:
    """A process that runs `target(pipe, *arguments)`."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()

    def receive(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), "the other process says nothing"
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self._process.join(TIMEOUT_S)


# ---- copies ---------------------------------------------------------------------------------------------------------------
def measure_copies(options: argparse.Namespace) -> None:
    nbytes = options.mib << 20
    cache = random_cache(nbytes // LAYOUT.block_nbytes, options.devices[0]).view(torch.uint8).view(-1)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    transfer = PieceTransfer(cache.device, 4096)
    rng = np.random.default_rng(1)
    for kib in (4096, 2048, 1024, 512, 256, 128, 64):
        size = kib << 10
        near = host.data_ptr() + np.arange(nbytes // size, dtype=np.int64) * size
        far = cache.data_ptr() + rng.permutation(nbytes // size).astype(np.int64) * size
        for name, to, source in (("GPU -> pinned", near, far), ("pinned -> GPU", far, near)):
            seconds = best_s(partial(transfer.run, to, source, size), options.repeat)
            report(f"{name}, copy engine, pieces of {kib} KiB", nbytes / seconds / 1e9)
    for kib in (512, 64, 4):
        rows = cache.view(-1, kib << 10)
        ids = torch.from_numpy(rng.permutation(len(rows))).cuda()
        out = host.view(rows.shape)
        seconds = best_s(lambda rows=rows, ids=ids, out=out: cache_ops.gather_blocks(rows, ids, out), options.repeat)
        report(f"GPU -> pinned, kernel, pieces of {kib} KiB", nbytes / seconds / 1e9)
    for mib, num in ((2, 1), (2, 8), (2, nbytes // (2 << 20)), (4, 1)):
        pieces = cache.data_ptr() + np.arange(num * mib // 2, dtype=np.int64) * (2 << 20)
        seconds = best_s(partial(transfer.run, summed=pieces, summed_nbytes=2 << 20, pieces_per_payload=mib // 2), options.repeat)
        report(f"checksums on the GPU, {num} payloads of {mib} MiB at once", num * mib * (1 << 20) / seconds / 1e9)
    blocks = blocks_over(random_cache(64, options.devices[0]))
    for layers in (32, 8, 4):
        regions = [Region(block, 0, layers, *WHOLE[2:]) for block in range(64 // layers)]
        kept = blocks.read(regions).view
        for name, action in (("read", partial(blocks.read, regions)), ("write", partial(blocks.write, regions, kept))):
            seconds = best_s(partial(in_threads, 1, 50, lambda _, action=action: action()), options.repeat)
            report(f"DeviceBlocks.{name}, one thread, 4 MiB in {64 // layers} pieces, checksum included", 50 * CHUNK / seconds / 1e9)
    view = memoryview(host.numpy())
    for num_threads in (1, 2, 4):
        seconds = best_s(lambda n=num_threads: in_threads(n, nbytes // CHUNK, lambda i: hash_chunk(view, i)), 1)
        report(f"checksums on {num_threads} cores", nbytes / seconds / 1e9)


def hash_chunk(view: memoryview, index: int) -> None:
    checksum(view[index * CHUNK : (index + 1) * CHUNK])


def in_threads(num_threads: int, count: int, action: Callable[[int], None]) -> None:
    def run(first: int) -> None:
        for index in range(first, count, num_threads):
            action(index)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- from memory to memory, without the protocol --------------------------------------------------------------------------
def regions_of(block_ids: list[int]) -> list[Region]:
    return [Region(block, *WHOLE) for block in block_ids]


def receive_staged(pipe: Connection, offer: SegmentOffer, num_blocks: int, device: int, ends: list[Connection]) -> None:
    """One thread for each of `ends`: (block ids, offset, bytes, checksum) in, an answer when it has landed."""
    cache = torch.zeros_like(random_cache(num_blocks, device))
    blocks, reader = blocks_over(cache), SegmentReader(offer)
    blocks.adopt(reader.read(0, reader.size_bytes))

    def serve(end: Connection) -> None:
        while (notice := end.recv()) is not None:
            ids, offset, nbytes, digest = notice
            data = reader.read(offset, nbytes)
            landed = blocks.write(regions_of(ids), data)
            end.send((chunk_checksum(data, len(ids)) if landed is None else landed) == digest)

    run_all(pipe, ends, serve)


def receive_from_gpu(pipe: Connection, offer: DeviceMemoryOffer, num_blocks: int, device: int, ends: list[Connection]) -> None:
    cache = torch.zeros_like(random_cache(num_blocks, device))
    blocks, peer = blocks_over(cache), PeerDeviceMemory(offer, cache.device)

    def serve(end: Connection) -> None:
        while (notice := end.recv()) is not None:
            ids, offsets, digest = notice
            end.send(blocks.write_from(peer, offsets, regions_of(ids)) == digest)

    run_all(pipe, ends, serve)


def run_all(pipe: Connection, ends: list[Connection], serve: Callable[[Connection], None]) -> None:
    threads = [threading.Thread(target=serve, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    pipe.recv()
    for thread in threads:
        thread.join(TIMEOUT_S)


def pump(
    pairs: list[Connection], num_blocks: int, per_chunk: int, notice_of: Callable[[list[int]], tuple[object, object]], window: int
) -> float:
    """Seconds until all blocks have landed; `notice_of` returns what is sent and what is kept until then."""
    failures: list[str] = []

    def run(number: int, end: Connection) -> None:
        held: queue.SimpleQueue[object] = queue.SimpleQueue()
        num_waiting = 0
        for start in range(number * per_chunk, num_blocks, len(pairs) * per_chunk):
            notice, kept = notice_of(list(range(start, min(start + per_chunk, num_blocks))))
            held.put(kept)
            end.send(notice)
            num_waiting += 1
            while num_waiting and (num_waiting >= window or end.poll(0)):
                take(end, held)
                num_waiting -= 1
        for _ in range(num_waiting):
            take(end, held)

    def take(end: Connection, held: queue.SimpleQueue[object]) -> None:
        if not end.recv():
            failures.append("a checksum differs")
        held.get()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(pairs)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures, failures[0]
    return time.perf_counter() - start_s


def measure_staged_here(options: argparse.Namespace, blocks: DeviceBlocks, num_blocks: int) -> None:
    """Both ends in one process, which on one GPU do not take turns as two processes do: each thread reads, then writes what it read."""
    target = blocks_over(torch.zeros_like(random_cache(num_blocks, options.devices[1])))
    assert blocks.segment is not None
    mapped = SegmentReader(blocks.segment)
    target.adopt(mapped.read(0, mapped.size_bytes))

    def carry(index: int) -> None:
        regions = regions_of([2 * index, 2 * index + 1])
        stored = blocks.read(regions)
        assert stored.segment_offset is not None
        data = mapped.read(stored.segment_offset, stored.view.nbytes)
        landed = target.write(regions, data)
        digest = chunk_checksum(stored.view, len(regions)) if stored.checksum is None else stored.checksum
        assert digest == (chunk_checksum(data, len(regions)) if landed is None else landed)

    for num_threads in (1, 2, 4, 8):
        seconds = best_s(partial(in_threads, num_threads, num_blocks // 2, carry), options.repeat)
        report(
            f"GPU -> pinned shared memory -> GPU in one process, {num_threads} threads that read and write in turn",
            num_blocks * LAYOUT.block_nbytes / seconds / 1e9,
        )


def measure_staged(options: argparse.Namespace) -> None:
    source, target = options.devices
    num_blocks = (options.mib << 20) // LAYOUT.block_nbytes
    cache = random_cache(num_blocks, source)
    measure_staged_here(options, blocks_over(cache), num_blocks)
    for num_threads, chunk in itertools.product((1, 2, 4), (CHUNK, LARGE_CHUNK)):
        blocks = blocks_over(cache)
        pairs = [multiprocessing.Pipe() for _ in range(num_threads)]
        child = Child(receive_staged, blocks.segment, num_blocks, target, [theirs for _, theirs in pairs])
        child.receive()

        def notice(ids: list[int], blocks: DeviceBlocks = blocks) -> tuple[object, object]:
            stored = blocks.read(regions_of(ids))
            digest = chunk_checksum(stored.view, len(ids)) if stored.checksum is None else stored.checksum
            return (ids, stored.segment_offset, stored.view.nbytes, digest), stored

        ends = [ours for ours, _ in pairs]
        seconds = min(pump(ends, num_blocks, chunk // LAYOUT.block_nbytes, notice, window=6) for _ in range(options.repeat))
        report(f"GPU -> pinned -> GPU, {num_threads} threads, chunks of {chunk >> 20} MiB, checksums", cache.nbytes / seconds / 1e9)
        for end in ends:
            end.send(None)
        child.close()


def copy_all(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
    torch.cuda.synchronize(target.device)


def measure_ipc(options: argparse.Namespace) -> None:
    source, target = options.devices
    num_blocks = (options.mib << 20) // LAYOUT.block_nbytes
    cache = random_cache(num_blocks, source)
    plain = torch.empty(cache.shape, dtype=cache.dtype, device=f"cuda:{target}")
    seconds = best_s(partial(copy_all, plain, cache), options.repeat + 2)
    report("one plain copy of everything", cache.nbytes / seconds / 1e9)
    del plain
    blocks = blocks_over(cache)
    for num_threads, per_chunk in ((1, 2), (2, 8), (4, 8), (2, 32), (4, 32)):
        pairs = [multiprocessing.Pipe() for _ in range(num_threads)]
        child = Child(receive_from_gpu, offer_of(cache), num_blocks, target, [theirs for _, theirs in pairs])
        child.receive()

        def notice(ids: list[int]) -> tuple[object, object]:
            located = blocks.locate(regions_of(ids))
            return (ids, located.offsets, located.checksum), None

        ends = [ours for ours, _ in pairs]
        seconds = min(pump(ends, num_blocks, per_chunk, notice, window=4) for _ in range(options.repeat))
        name = f"CUDA IPC, {num_threads} threads, {2 * per_chunk} MiB a notice, checksums at both ends"
        report(name, cache.nbytes / seconds / 1e9)
        for end in ends:
            end.send(None)
        child.close()


# ---- through KVX/1 --------------------------------------------------------------------------------------------------------
class Ends:
    """Events of either side: when each transfer was granted and ended."""

    def __init__(self) -> None:
        self.granted: dict[str, threading.Event] = {}
        self.ended: queue.SimpleQueue[tuple[str, float, Any]] = queue.SimpleQueue()

    def on_granted(self, transfer_id: str) -> None:
        if transfer_id in self.granted:
            self.granted[transfer_id].set()

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool = False) -> None:
        print(f"transfer {transfer_id} failed: {reason}", file=sys.stderr, flush=True)
        self.ended.put((transfer_id, time.monotonic(), reason))

    def on_committed(self, transfer_id: str, hidden_state: bytes = b"", info: Any = None) -> None:
        self.ended.put((transfer_id, time.monotonic(), info))

    def wait(self) -> tuple[str, float, Any]:
        ended = self.ended.get(timeout=TIMEOUT_S)
        assert not isinstance(ended[2], str), f"the transfer failed: {ended[2]}"
        return ended


def serve_kvx(pipe: Connection, num_blocks: int, device: int, settings: Settings) -> None:
    """Expects (transfer id, number of blocks, first block) as it is told; says for each transfer when it was committed, and its facts."""
    sys.setswitchinterval(float(os.environ["SWITCH_S"]))
    events, incarnation = Ends(), new_incarnation()
    cache = torch.zeros_like(random_cache(num_blocks, device))
    receiver = KVReceiver(LAYOUT, blocks_over(cache), incarnation, events, SystemClock(), settings)
    peer = KVPeer(worker_id="decode", ctrl_endpoint=receiver.ctrl_endpoint, incarnation=incarnation, server_key=receiver.server_key)
    pipe.send(peer.model_dump())

    def tell() -> None:
        while True:
            transfer_id, at_s, info = events.ended.get()
            pipe.send(
                (transfer_id, at_s, info if info is None or isinstance(info, str) else (info.num_bytes, info.granted_s, info.transport))
            )

    threading.Thread(target=tell, daemon=True).start()
    while (command := pipe.recv()) is not None:
        transfer_id, count, first = command
        receiver.expect(transfer_id, 0, range(first, first + count), range(count), count * BLOCK_SIZE, TIMEOUT_S)
    receiver.close()


class KvxPair:
    """A sender here, a receiver in a process of its own."""

    def __init__(self, options: argparse.Namespace, cache: torch.Tensor, num_blocks: int, **settings: Any) -> None:
        self.settings = Settings(
            kv_transport=options.transport, **{"kv_lanes": 2, "kv_max_chunk_bytes": CHUNK, "kv_credits": 16, **settings}
        )
        self.child = Child(serve_kvx, num_blocks, options.devices[1], self.settings)
        self.peer = KVPeer(**self.child.receive())
        self.events = Ends()
        self.sender = KVSender(LAYOUT, blocks_over(cache), new_incarnation(), self.events, SystemClock(), self.settings, "prefill")
        self._num_offered = 0

    def offer(self, count: int, first: int = 0) -> str:
        """Returns when it was granted."""
        self._num_offered += 1
        transfer_id = f"{self._num_offered:032x}"
        self.events.granted[transfer_id] = threading.Event()
        self.child.pipe.send((transfer_id, count, first))
        self.sender.offer(transfer_id, 0, [self.peer], count * BLOCK_SIZE, [], TIMEOUT_S)
        assert self.events.granted[transfer_id].wait(TIMEOUT_S)
        return transfer_id

    def carry(self, count: int) -> float:
        """Bytes a second from GRANT to COMMITTED."""
        transfer_id = self.offer(count)
        self.sender.send_blocks(transfer_id, [(index, index) for index in range(count)])
        self.sender.commit(transfer_id, bytes(8192), 0)
        _, committed_s, (num_bytes, granted_s, _) = self.child.receive()
        self.events.wait()
        return float(num_bytes / (committed_s - granted_s))

    def close(self) -> None:
        self.sender.close()
        self.child.close()


def measure_kvx(options: argparse.Namespace) -> None:
    num_blocks = (options.mib << 20) // LAYOUT.block_nbytes
    cache = random_cache(num_blocks, options.devices[0])
    if options.transport == "cuda":
        plain = torch.empty(cache.shape, dtype=cache.dtype, device=f"cuda:{options.devices[1]}")
        report("one plain copy of everything", cache.nbytes / best_s(partial(copy_all, plain, cache), options.repeat + 2) / 1e9)
        del plain
    for lanes, credits in ((1, 16), (2, 16), (4, 16), (4, 32)):
        pair = KvxPair(options, cache, num_blocks, kv_lanes=lanes, kv_credits=credits)
        rate = max(pair.carry(num_blocks) for _ in range(options.repeat))
        report(f"KVX/1 by {options.transport}, {lanes} lanes, {credits} credits", rate / 1e9)
        pair.close()


def measure_control(options: argparse.Namespace) -> None:
    num_blocks = (options.mib << 20) // LAYOUT.block_nbytes
    cache = random_cache(num_blocks, options.devices[0])
    pair = KvxPair(options, cache, num_blocks + 1)
    pair.carry(num_blocks)
    for name, is_loaded in (("idle", False), ("beside bulk", True)):
        is_done = threading.Event()

        def load(is_done: threading.Event = is_done) -> None:
            transfer_id = pair.offer(num_blocks)
            pair.sender.send_blocks(transfer_id, [(index, index) for index in range(num_blocks)])
            pair.sender.commit(transfer_id, bytes(8192), 0)
            is_done.set()

        delays: list[float] = []
        for _ in range(1 if not is_loaded else 12):
            if is_loaded:
                load()
            for _ in range(20):
                start_s = time.perf_counter()
                transfer_id = pair.offer(1, first=num_blocks)
                delays.append(1000 * (time.perf_counter() - start_s))
                pair.sender.abort(transfer_id, "measured")
                time.sleep(0.0005)
            while not pair.events.ended.empty():
                pair.events.ended.get()
            time.sleep(0.2)
        delays.sort()
        report(f"OFFER -> GRANT {name}, median of {len(delays)}", statistics.median(delays), "ms")
        report(f"OFFER -> GRANT {name}, 99th percentile", delays[int(0.99 * len(delays))], "ms")
    pair.close()


# ---- what a prompt waits for ----------------------------------------------------------------------------------------------
def no_tokenizer() -> Any:
    raise NotImplementedError("token ids only")


def send_layers(sender: KVSender, transfer_id: str, blocks: list[tuple[int, int]], first: int, count: int) -> None:
    sender.send_blocks(transfer_id, blocks, (first, count))


def measure_exposed(options: argparse.Namespace) -> None:
    """The prompt is computed without a transfer, then with one, by groups of layers."""
    num_tokens, step = 8192, 2048
    num_blocks = num_tokens // BLOCK_SIZE
    torch.cuda.set_device(options.devices[0])
    source = ModelSource(
        name="llama-8b", format="dummy", files=(), config=LLAMA_8B, chat_template=None, fingerprint="bench", load_tokenizer=no_tokenizer,
        tensors={},
    )  # fmt: skip
    settings = Settings(
        device="cuda", dtype="bfloat16", num_blocks=3 * num_blocks, max_model_len=num_tokens + 1, max_num_batched_tokens=step,
        max_step_ms=1e6, enable_prefix_caching=False,
    )  # fmt: skip
    engine = EngineCore(source, settings, lambda *_: None, lambda *_: None)
    pair = KvxPair(options, engine.cache.tensor, num_blocks)
    rng = np.random.default_rng(1)
    for groups in (None, 1, 2, 4, 8):
        engine.runner._num_layer_groups = groups or 1
        prefills, exposed, waits = [], [], []
        for _ in range(options.repeat + 1):
            request = Request(f"{time.monotonic_ns()}", rng.integers(0, 128000, num_tokens).tolist(), arrival_s=0.0, deadline_at_s=1e9)
            transfer_id = pair.offer(num_blocks) if groups is not None else ""
            engine.scheduler.add(request)
            start_s = time.monotonic()
            block_ids: list[int] = []
            while request.num_computed_tokens < num_tokens:
                output = engine.schedule()
                assert output is not None
                block_ids = block_ids or engine.manager.block_ids(request.request_id)
                row = output.scheduled[0]
                sent = [(index, block_ids[index]) for index in range(row.start // BLOCK_SIZE, row.end // BLOCK_SIZE)]
                send = partial(send_layers, pair.sender, transfer_id, sent) if groups else None
                result = engine.run(output, send)
            computed_s = time.monotonic()
            prefills.append(computed_s - start_s)
            if groups is not None:
                pair.sender.commit(transfer_id, result.hidden[0].cpu().view(torch.uint8).numpy().tobytes(), 0)
                _, committed_s, _ = pair.child.receive()
                exposed.append(committed_s - computed_s)
                waits.append(pair.events.wait()[1] - computed_s)
            engine.scheduler.remove(request.request_id)
        prefill_ms = 1000 * statistics.median(prefills[1:])
        if groups is None:
            report(f"prefill of {num_tokens} tokens without a transfer", prefill_ms, "ms")
            continue
        exposed_ms = 1000 * statistics.median(exposed[1:])
        report(f"prefill with it, {groups} groups of layers", prefill_ms, "ms")
        report("    exposed: last layer computed -> COMMITTED at decode", exposed_ms, "ms")
        report("    exposed, of prefill's time", 100 * exposed_ms / prefill_ms, "%")
        report("    known at prefill", 1000 * statistics.median(waits[1:]), "ms")
    pair.close()


PARTS = {
    "copies": measure_copies, "staged": measure_staged, "kvx": measure_kvx, "ipc": measure_ipc, "control": measure_control,
    "exposed": measure_exposed,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--transport", choices=("cuda", "shm", "ipc", "tcp"), default="shm", help="of kvx, control and exposed")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--devices", default="0,0", help="of the sender and of the receiver")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS of both processes; 0: as it is")
    parser.add_argument("--switch-ms", type=float, default=5.0, help="the interpreter's switch interval in both processes")
    parser.add_argument("--sums", choices=("gpu", "cores"), default="gpu", help="where checksums are formed")
    options = parser.parse_args()
    options.devices = [int(part) for part in options.devices.split(",")]
    multiprocessing.set_start_method("spawn")
    if options.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
    os.environ["SWITCH_S"] = str(options.switch_ms / 1000)
    sys.setswitchinterval(options.switch_ms / 1000)
    os.environ["SUMS_ON_GPU"] = str(int(options.sums == "gpu"))  # the other process has it from here
    for name in options.parts.split(","):
        print(f"{name}: {torch.cuda.get_device_name(options.devices[0])}, GPU {options.devices[0]} -> GPU {options.devices[1]}", flush=True)
        PARTS[name](options)


if __name__ == "__main__":
    main()
