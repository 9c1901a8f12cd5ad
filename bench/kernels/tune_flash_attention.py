"""Times tile sizes of the Triton prefill attention on this GPU and prints the lines of CONFIGURATIONS in
kernels/flash_attention_triton.py: 32 query heads over 8 KV heads, block size 16, shuffled blocks, the context behind a chunk.

    python bench/kernels/tune_flash_attention.py [--kinds 128,2,2 64,2,2] [--processes 14] [--verbose]

A kind is padded head dim, bytes of a query element, bytes of a cache element. Candidates are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing

import torch
from triton.testing import do_bench

from kernels.flash_attention_triton import CONFIGURATIONS, Configuration, flash_attention

Kind = tuple[int, int, int]
Shape = tuple[int, int, int]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
SHAPES: tuple[tuple[Shape, ...], ...] = (
    ((64, 4, 4096),),
    ((32, 8, 4096),),
    ((16, 16, 4096),),
    ((1, 2048, 2048), (1, 2048, 8192), (4, 512, 4096)),
)
"""(sequences, query tokens, context) of each column of the table."""
MAX_SHARED_BYTES = 227 << 10
MAX_ACCUMULATOR_REGISTERS = 128


def candidates(kind: Kind, column: int) -> list[Configuration]:
    """What may win: the sums of a row in registers, the keys in flight in shared memory."""
    rows = ((16,), (32,), (64,), (64, 128))[column]
    found = []
    for num_rows, keys, num_warps, num_stages in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 5)):
        one = Configuration(num_rows, keys, num_warps, num_stages)
        per_thread = num_rows * kind[0] // (num_warps * 32)
        fits = one.shared_bytes(*kind) <= MAX_SHARED_BYTES and per_thread <= MAX_ACCUMULATOR_REGISTERS
        if fits and (num_warps == 4 or num_rows >= 128):
            found.append(one)
    return found


class Batch:
    def __init__(self, kind: Kind, shape: Shape) -> None:
        head_dim, query_bytes, cache_bytes = kind
        num_seqs, num_queries, self.context = shape
        self.num_queries, self.scale = num_queries, head_dim**-0.5
        blocks = -(-self.context // BLOCK_SIZE)
        dtype = torch.bfloat16 if query_bytes == 2 else torch.float32
        cache_shape = (num_seqs * blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
        cache = torch.randn(cache_shape, dtype=dtype, device="cuda")
        cache = cache.to(torch.float8_e4m3fn if cache_bytes == 1 else dtype)
        self.key, self.value = cache[:, 0], cache[:, 1]
        self.table = torch.randperm(num_seqs * blocks, dtype=torch.int32, device="cuda").view(num_seqs, blocks)
        self.start = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * num_queries
        self.lens = torch.full((num_seqs,), self.context, dtype=torch.int32, device="cuda")
        self.query = torch.randn(num_seqs * num_queries, NUM_HEADS, head_dim, dtype=dtype, device="cuda")
        self.out = torch.empty_like(self.query)

    def run(self, chosen: Configuration) -> None:
        flash_attention(
            self.out, self.query, self.key, self.value, self.table, self.start, self.lens, self.num_queries, self.context, self.scale,
            None, None, None, 1.0, 1.0, chosen,
        )  # fmt: skip


def compiles(task: tuple[Kind, int, Configuration]) -> bool:
    kind, column, chosen = task
    try:
        Batch(kind, (1, SHAPES[column][0][1], SHAPES[column][0][1] + 64)).run(chosen)
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not fit is no candidate, whatever Triton calls that
        print(f"# {kind} {chosen}: {type(error).__name__} {str(error)[:100]}", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=[",".join(map(str, kind)) for kind in CONFIGURATIONS])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--verbose", action="store_true", help="print every candidate, not only the best")
    options = parser.parse_args()
    kinds: list[Kind] = [tuple(map(int, kind.split(","))) for kind in options.kinds]  # type: ignore[misc]
    tasks = [(kind, column, one) for kind in kinds for column in range(len(SHAPES)) for one in candidates(kind, column)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        usable = [task for task, fits in zip(tasks, pool.map(compiles, tasks, chunksize=1), strict=True) if fits]
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {len(usable)} candidates", flush=True)
    for kind in kinds:
        chosen = []
        for column, shapes in enumerate(SHAPES):
            batches = [Batch(kind, shape) for shape in shapes]
            best = (math.inf, CONFIGURATIONS[kind][column])
            for _, _, one in (task for task in usable if task[:2] == (kind, column)):
                times = [do_bench(lambda b=batch, c=one: b.run(c), warmup=5, rep=30, return_mode="median") * 1e3 for batch in batches]
                best = min(best, (math.prod(times) ** (1 / len(times)), one), key=lambda pair: pair[0])
                if options.verbose:
                    print(f"# {kind} {one}: {' '.join(f'{time:.0f}' for time in times)} us", flush=True)
            print(f"# {kind} column {column}: {best[0]:.0f} us (geometric mean of {len(shapes)})", flush=True)
            chosen.append(best[1])
        configurations = ", ".join(f"Configuration({c.rows}, {c.keys}, {c.num_warps}, {c.num_stages})" for c in chosen)
        print(f"    {kind}: ({configurations}),", flush=True)


if __name__ == "__main__":
    main()
