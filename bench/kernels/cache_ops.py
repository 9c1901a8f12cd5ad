"""Moving KV blocks between the cache of a GPU and pinned memory, and writing K and V into it.

    python bench/kernels/cache_ops.py

GB/s of a gather (or scatter) of `blocks` random blocks together with the copy between device and pinned memory, beside one plain pinned
copy of as many bytes (the limit) and a copy per block; then microseconds of the cache writes beside plain indexing and, where it can be
imported, vLLM's op.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kernels.cache_ops import copy_blocks, gather_blocks, reshape_and_cache, scatter_blocks

Run = Callable[[], object]


def microseconds(run: Run, repeat: int = 50) -> float:
    """Median between two events around one run."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def move_blocks(num_moved: int, block_nbytes: int) -> None:
    cache = torch.randint(0, 255, (max(2048, 2 * num_moved), block_nbytes), dtype=torch.uint8, device="cuda")
    ids = torch.randperm(len(cache), device="cuda")[:num_moved]
    staging = torch.empty(num_moved, block_nbytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(num_moved, block_nbytes, dtype=torch.uint8, pin_memory=True)
    on_host = ids.tolist()

    def out() -> None:
        pinned.copy_(staging, non_blocking=True)

    def into() -> None:
        staging.copy_(pinned, non_blocking=True)

    def gather(target: torch.Tensor = staging) -> None:
        gather_blocks(cache, ids, target)

    def scatter(source: torch.Tensor = staging) -> None:
        scatter_blocks(source, ids, cache)

    def each_out() -> None:
        for row, block in enumerate(on_host):
            pinned[row].copy_(cache[block], non_blocking=True)

    def each_in() -> None:
        for row, block in enumerate(on_host):
            cache[block].copy_(pinned[row], non_blocking=True)

    for name, runs in (
        ("D2H", (out, lambda: (gather(), out()), lambda: gather(pinned), each_out, gather)),
        ("H2D", (into, lambda: (into(), scatter()), lambda: scatter(pinned), each_in, scatter)),
    ):
        limit, both, direct, single, device = (pinned.nbytes / microseconds(run) / 1e3 for run in runs)
        print(
            f"| {num_moved} x {block_nbytes >> 10} | {name} | {limit:.1f} | {both:.1f} | {both / limit:.0%} | {direct:.1f} | "
            f"{direct / limit:.0%} | {single:.1f} | {device:.0f} |",
            flush=True,
        )
    assert torch.equal(cache[ids].cpu(), pinned)


def write_tokens(num_tokens: int, kv_cache_dtype: str) -> None:
    key, value = torch.randn(2, num_tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    stored = torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(2048, 2, 8, 16, 128, device="cuda", dtype=stored)
    key_cache, value_cache = cache[:, 0], cache[:, 1]
    slots = torch.randperm(2048 * 16, device="cuda")[:num_tokens]
    blocks, offsets = slots // 16, slots % 16

    def index() -> None:
        key_cache[blocks, :, offsets] = key
        value_cache[blocks, :, offsets] = value

    ours = microseconds(lambda: reshape_and_cache(key, value, key_cache, value_cache, slots, kv_cache_dtype))
    nbytes = key.nbytes * 2 + key.numel() * 2 * stored.itemsize
    plain = f"{microseconds(index):.1f}" if kv_cache_dtype == "auto" else ""
    print(
        f"| {num_tokens}, 8, 128, {kv_cache_dtype} | {ours:.1f} | {nbytes / ours / 1e3:.0f} | {plain} | {vllm(key, value, slots)} |",
        flush=True,
    )


def copy_on_write() -> None:
    cache = torch.zeros(4096, 64 << 10, dtype=torch.uint8, device="cuda")
    pairs = torch.randperm(4096, device="cuda")[:1024].view(512, 2)
    print(f"\ncopy-on-write of 512 blocks of 64 KiB: {microseconds(lambda: copy_blocks(cache, pairs)):.1f} us")


def vllm(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> str:
    try:
        peer = importlib.import_module("vllm._custom_ops")
        caches = [torch.zeros(2048, 16, 8, 128, device="cuda", dtype=key.dtype) for _ in "kv"]
        one = torch.ones((), device="cuda")
        return f"{microseconds(lambda: peer.reshape_and_cache_flash(key, value, *caches, slots, 'auto', one, one)):.1f}"
    except Exception as error:  # not there, or does not run here
        return f"{type(error).__name__}"


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: medians\n")
    print("| blocks x KiB | direction | limit GB/s | staging + copy | share | straight to pinned | share | copy per block | alone in HBM |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_moved, block_nbytes in ((256, 64 << 10), (64, 64 << 10), (1024, 64 << 10), (128, 512 << 10), (32, 2 << 20)):
        move_blocks(num_moved, block_nbytes)
    print("\n| tokens, KV heads, d, cache | ours us | GB/s | plain indexing us | vLLM us |\n|---|---|---|---|---|")
    for num_tokens in (1, 64, 256, 8192):
        for kv_cache_dtype in ("auto", "fp8"):
            write_tokens(num_tokens, kv_cache_dtype)
    copy_on_write()
