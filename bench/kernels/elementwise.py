"""RMS norm, gated activation and rotary embedding: ours beside torch and, where they can be imported, vLLM and FlashInfer.

    python bench/kernels/elementwise.py

Microseconds on the GPU alone (CUDA graph of several calls, so that launches do not count), and the share of the time that a plain device
copy of as many bytes takes. bf16; the 8B shape: hidden 4096, 32/8 heads of 128, feed-forward 14336.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rotary_embedding import rotary_embedding, rotary_embedding_and_cache
from kernels.silu_and_mul import silu_and_mul

CALLS = 20
Run = Callable[[], object]


def microseconds(run: Run) -> float:
    """Of one call, in a graph of CALLS."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def peer(run: Run) -> str:
    try:
        return f"{microseconds(run):.1f}"
    except Exception as error:  # not there, or does not run here
        torch.cuda.synchronize()
        return type(error).__name__


def copy_time(nbytes: int) -> float:
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source))


def module(name: str) -> Any:
    return importlib.import_module(name)


def measure(num_tokens: int) -> None:
    torch.manual_seed(0)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual, weight = torch.randn(num_tokens, 4096, **new), torch.randn(num_tokens, 4096, **new), torch.ones(4096, **new)
    out = torch.empty_like(x)
    gate_up = torch.randn(num_tokens, 28672, **new)
    down = torch.empty(num_tokens, 14336, **new)
    fused = torch.randn(num_tokens, 48 * 128, **new)
    query, key, value = (part.view(num_tokens, -1, 128) for part in fused.split([4096, 1024, 1024], 1))
    cache = torch.zeros(-(-num_tokens // 16) + 8, 2, 8, 16, 128, **new)
    positions = torch.randint(0, 8192, (num_tokens,), device="cuda")
    slots = torch.randperm(len(cache) * 16, device="cuda")[:num_tokens]
    angles = torch.outer(torch.arange(8192.0), 5e5 ** -(torch.arange(0, 128, 2) / 128)).cuda()
    cos, sin = angles.cos(), angles.sin()
    wide_table = torch.cat((cos, sin), -1)
    table = wide_table.to(torch.bfloat16)

    def eager_rotary() -> None:
        c, s = cos[positions], sin[positions]
        query.copy_(reference.rotary_embedding(query, c, s))
        key.copy_(reference.rotary_embedding(key, c, s))

    def eager_write() -> None:
        eager_rotary()
        cache[:, 0][slots // 16, :, slots % 16] = key
        cache[:, 1][slots // 16, :, slots % 16] = value

    def vllm_rotary() -> None:
        module("vllm._custom_ops").rotary_embedding(positions, query.flatten(1), key.flatten(1), 128, table, True)

    def flashinfer_rotary() -> None:
        module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace(
            positions, query.flatten(1), key.flatten(1), 128, table.float(), True
        )

    moved = query.nbytes + key.nbytes
    rows: list[tuple[str, Run, int, Run, Run | None, Run | None]] = [
        ("rms_norm", lambda: rms_norm(x, weight, 1e-5), 2 * x.nbytes, lambda: F.rms_norm(x, (4096,), weight, 1e-5),
         lambda: module("vllm._custom_ops").rms_norm(out, x, weight, 1e-5),
         lambda: module("flashinfer.norm").rmsnorm(x, weight, 1e-5, out=out)),
        ("fused_add_rms_norm", lambda: fused_add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes,
         lambda: F.rms_norm(residual.add_(x), (4096,), weight, 1e-5),
         lambda: module("vllm._custom_ops").fused_add_rms_norm(x, residual, weight, 1e-5),
         lambda: module("flashinfer.norm").fused_add_rmsnorm(x, residual, weight, 1e-5)),
        ("silu_and_mul", lambda: silu_and_mul(gate_up), 3 * down.nbytes, lambda: reference.silu_and_mul(gate_up),
         lambda: torch.ops._C.silu_and_mul(down, gate_up), lambda: module("flashinfer.activation").silu_and_mul(gate_up, out=down)),
        ("rotary_embedding", lambda: rotary_embedding(query, key, positions, cos, sin), 2 * moved,
         eager_rotary, vllm_rotary, flashinfer_rotary),
        ("rotary + cache write",
         lambda: rotary_embedding_and_cache(query, key, value, positions, cos, sin, cache[:, 0], cache[:, 1], slots),
         2 * moved + key.nbytes + 2 * value.nbytes, eager_write, None, None),
    ]  # fmt: skip
    for name, ours, nbytes, torch_run, vllm_run, flashinfer_run in rows:
        time = microseconds(ours)
        floor = copy_time(nbytes)
        cells = [
            f"{time:.1f}",
            f"{floor:.1f}",
            f"{floor / time:.0%}",
            *("" if run is None else peer(run) for run in (torch_run, vllm_run, flashinfer_run)),
        ]
        print(f"| {name}, {num_tokens} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16: us\n")
    print("| op, rows | ours | time of a copy of its bytes | share | torch | vLLM | FlashInfer |\n|---|---|---|---|---|---|---|")
    for num_tokens in (1, 64, 256, 2048, 8192, 32768):
        measure(num_tokens)


if __name__ == "__main__":
    main()
