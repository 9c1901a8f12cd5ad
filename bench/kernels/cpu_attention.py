"""Attention on the CPU: ours over the paged cache beside torch's scaled_dot_product_attention on the same data laid out contiguously.

    python bench/kernels/cpu_attention.py [--dtype float32] [--repeat 41] [--cpu-time]

Milliseconds, best and median; ratio = best of torch / best of ours, so higher is better. Runs of all alternate, so that other load meets
all; where it is heavy, --cpu-time counts the processor time of one thread.
Torch gets grouped queries folded into rows where that is allowed (decode), a causal mask where it is not (chunks).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from kernels import cpu_attention, reference
from kernels.cpu_attention import CPUPagedAttention
from kernels.sdpa_attention import SDPAPagedAttention

BLOCK_SIZE = 16
CASES = [  # sequences, query tokens each, context with them, query heads, KV heads, head size
    (16, 1, 1024, 9, 3, 64),
    (1, 1, 1024, 9, 3, 64),
    (1, 1, 8192, 9, 3, 64),
    (64, 1, 512, 9, 3, 64),
    (8, 1, 1024, 32, 8, 128),
    (1, 64, 1024, 9, 3, 64),
    (1, 512, 512, 9, 3, 64),
    (1, 512, 4096, 9, 3, 64),
    (1, 256, 2048, 32, 8, 128),
]


def alternate(runs: dict[str, Callable[[], torch.Tensor]], repeat: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for attempt in range(repeat + 3):
        for name, run in runs.items():
            start = clock()
            run()
            if attempt >= 3:
                times[name].append((clock() - start) * 1e3)
    return times


def measure(
    num_seqs: int,
    num_query: int,
    context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    repeat: int,
    clock: Callable[[], float],
) -> None:
    torch.manual_seed(0)
    num_blocks = -(-context // BLOCK_SIZE)
    # The engine's cache: one layer is a strided view.
    cache = torch.randn(num_seqs * num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    key_cache, value_cache = cache[:, 1, 0], cache[:, 1, 1]
    tables = torch.randperm(len(cache)).view(num_seqs, num_blocks).tolist()
    step = (tables, list(range(0, num_seqs * num_query + 1, num_query)), [context] * num_seqs)
    query = torch.randn(num_seqs * num_query, num_heads, head_dim).to(dtype)
    ours = CPUPagedAttention(*step, BLOCK_SIZE, num_heads, num_kv_heads)
    gathering = SDPAPagedAttention(*step, BLOCK_SIZE, num_heads, num_kv_heads)
    scale = head_dim**-0.5

    key, value = (
        torch.stack([layer[torch.tensor(table)].transpose(0, 1).flatten(1, 2)[:, :context] for table in tables]).contiguous()
        for layer in (key_cache, value_cache)
    )
    group = num_heads // num_kv_heads
    rows = (
        query.view(num_seqs, num_query, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, head_dim)
    )
    mask = None
    if num_query > 1:
        mask = torch.ones(num_query, context, dtype=torch.bool).tril(context - num_query).repeat(group, 1)
    runs = {
        "ours": lambda: ours(query, key_cache, value_cache, scale),
        "sdpa": lambda: F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale),
        "gathering": lambda: gathering(query, key_cache, value_cache, scale),
    }
    wanted = reference.paged_attention(query[:num_query], key_cache, value_cache, tables[:1], [0, num_query], [context], scale)
    torch.testing.assert_close(runs["ours"]()[:num_query], wanted, atol=1e-2 if dtype.itemsize == 2 else 1e-5, rtol=1e-2)
    times = alternate(runs, repeat, clock)
    best, median = ({name: function(values) for name, values in times.items()} for function in (min, statistics.median))
    cells = [f"{best[name]:.2f} ({median[name]:.2f})" for name in runs]
    cells.insert(2, f"{best['sdpa'] / best['ours']:.2f}")
    print(f"| {num_seqs} x {num_query} @ {context}, {num_heads}/{num_kv_heads}, {head_dim} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeat", type=int, default=41)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.cpu_time:
        torch.set_num_threads(1)
    if not cpu_attention.prepare(dtype, 64):
        sys.exit("no C++ compiler: there is nothing to measure")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.dtype}: ms best (median)\n")
    print(
        "| sequences x query @ context, heads, d | ours | SDPA, contiguous | ratio | without a compiler (gathers) |\n|---|---|---|---|---|"
    )
    for case in CASES:
        measure(*case, dtype, options.repeat, time.process_time if options.cpu_time else time.perf_counter)


if __name__ == "__main__":
    main()
