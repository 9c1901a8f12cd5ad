"""Chunked prefill over the paged cache: our op, its Triton kernel alone, FA3 (vLLM's) and FlashInfer, side by side in one run.

    python bench/kernels/flash_attention.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--block-size 16] [--json FILE]

Microseconds (median, L2 flushed before each run), TFLOP/s, and the error against the plain formula in fp32 on the last 16 rows.
Peers that cannot be imported are named and skipped; a share of more than 1 against a peer means that ours is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peers import Run, device, flash_attention_3, geometric_mean, measure
from peers import flashinfer as flashinfer_module

from kernels import flash_attention_triton, reference
from kernels.flash_attention import flash_attention

SHAPES = ((1, 2048, 2048), (1, 2048, 8192), (1, 2048, 32768), (1, 8192, 8192), (4, 512, 4096), (1, 17, 8192), (8, 64, 2048))
"""(sequences, query tokens, context)."""
NUM_CHECKED = 16


class Batch:
    """Random queries, keys and values; `key`, `value` in our layout, `key_nhd`, `value_nhd` with tokens before heads, as peers have it."""

    def __init__(self, num_seqs: int, num_queries: int, context: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int):
        generator = torch.Generator("cuda").manual_seed(0)
        blocks = -(-context // block_size)
        shape = (num_seqs * blocks, block_size, num_kv_heads, head_dim)
        self.num_queries, self.context, self.block_size, self.scale = num_queries, context, block_size, head_dim**-0.5
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.key_nhd, self.value_nhd = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cache = torch.stack([self.key_nhd.transpose(1, 2), self.value_nhd.transpose(1, 2)], dim=1)
        self.key, self.value = cache[:, 0], cache[:, 1]
        self.table = torch.randperm(num_seqs * blocks, generator=generator, dtype=torch.int32, device="cuda").view(num_seqs, blocks)
        self.lens = torch.full((num_seqs,), context, dtype=torch.int32, device="cuda")
        self.start = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * num_queries
        self.query = torch.randn(num_seqs * num_queries, num_heads, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)

    @property
    def flops(self) -> float:
        seen = self.num_queries * (self.context - self.num_queries) + self.num_queries * (self.num_queries + 1) / 2
        return 4.0 * len(self.lens) * self.num_heads * self.head_dim * seen

    def poisoned_out(self) -> torch.Tensor:
        return torch.full_like(self.query, torch.nan)

    def error(self, out: torch.Tensor) -> float:
        """Relative, of the last rows of the first sequence."""
        rows = slice(max(0, self.num_queries - NUM_CHECKED), self.num_queries)
        query = self.query[rows].float()
        tables = self.table[:1].tolist()
        expected = reference.paged_attention(query, self.key, self.value, tables, [0, len(query)], [self.context], self.scale)
        return float((out[rows].float() - expected).norm() / expected.norm())


def ours(batch: Batch) -> Run:
    out = batch.poisoned_out()
    return lambda: flash_attention(
        batch.query, batch.key, batch.value, batch.table, batch.start, batch.lens, batch.num_queries, batch.context, batch.scale, out=out
    )


def ours_triton(batch: Batch) -> Run:
    out = batch.poisoned_out()

    def run() -> torch.Tensor:
        flash_attention_triton.flash_attention(
            out, batch.query, batch.key, batch.value, batch.table, batch.start, batch.lens, batch.num_queries, batch.context, batch.scale,
            None, None, None, 1.0, 1.0,
        )  # fmt: skip
        return out

    return run


def fa3(batch: Batch) -> Run:
    attend = flash_attention_3()
    return lambda: attend(
        batch.query, batch.key_nhd, batch.value_nhd, max_seqlen_q=batch.num_queries, cu_seqlens_q=batch.start,
        max_seqlen_k=batch.context, seqused_k=batch.lens, softmax_scale=batch.scale, causal=True, block_table=batch.table,
    )  # fmt: skip


def flashinfer(batch: Batch) -> Run:
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer_module().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    num_seqs, blocks = batch.table.shape
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((num_seqs,), (batch.context - 1) % batch.block_size + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        batch.start, starts, batch.table.flatten(), last, batch.num_heads, batch.num_kv_heads, batch.head_dim, batch.block_size,
        causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(batch.query, (batch.key_nhd, batch.value_nhd))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"# {device()}, {options.heads}/{options.kv_heads} heads of {options.head_dim}, "
          f"block size {options.block_size}, bf16")  # fmt: skip
    rows, ratios = [], []
    for shape in SHAPES:
        batch = Batch(*shape, options.heads, options.kv_heads, options.head_dim, options.block_size)
        times: dict[str, float] = {}
        line = f"{shape[0]} x {shape[1]} @ {shape[2]}:"
        for make in (ours, ours_triton, fa3, flashinfer):
            result = measure(functools.partial(make, batch), batch.error)
            if isinstance(result, str):
                line += f" {make.__name__} does not run ({result});"
                continue
            times[make.__name__] = result.microseconds
            tflops = batch.flops / times[make.__name__] / 1e6
            line += f" {make.__name__} {times[make.__name__]:.1f} us {tflops:.0f} TFLOP/s error {result.error:.1e};"
            rows.append({"shape": shape, "provider": make.__name__, "us": times[make.__name__], "tflops": tflops, "error": result.error})
        for peer in ("fa3", "flashinfer"):
            if peer in times and "ours" in times:
                line += f" {peer} / ours {times[peer] / times['ours']:.2f};"
                if peer == "flashinfer":
                    ratios.append(times[peer] / times["ours"])
        print(line, flush=True)
    if ratios:
        print(f"# FlashInfer's time over ours: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
