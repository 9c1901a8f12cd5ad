"""Decode attention over the paged cache: our plan beside FlashInfer, FA3 and vLLM's PagedAttention V1 and V2 in one run.

    python bench/kernels/paged_attention.py [--quick] [--json FILE] [--peers flashinfer,fa3,vllm_v1,vllm_v2] [--partitions]

Microseconds (median, L2 flushed before each run) with the share of the read ceiling measured in the same run; every result is compared
with the fp32 reference before it is timed. Ratios are a peer's time over ours: more than 1 means that ours is faster. bf16, blocks of 16
tokens in random order. FlashInfer compiles itself, a minute for each head size, so that it runs at head sizes 64 and 128 only.

--partitions prints instead the tables that `choose_launch` in kernels/paged_attention.py is fitted from: our time by number of
partitions and by what a thread block holds in flight.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peers import (
    WRONG,
    Measured,
    Run,
    device,
    flash_attention_3,
    flashinfer,
    geometric_mean,
    measure,
    microseconds,
    read_ceiling,
    vllm_ops,
)

from kernels import reference
from kernels.build import build, cache_folder, device_arch, find_prebuilt
from kernels.paged_attention import CLASSIC_PARTITION_SIZE, STAGE_TOKENS, Launch, PagedAttentionPlan, library

BLOCK_SIZE = 16
NUM_CHECKED = 2
FLASHINFER_HEAD_SIZES = (64, 128)
MAX_V1_CONTEXT = 16384
"""vLLM's V1 holds the logits of a sequence in shared memory."""


@dataclass(frozen=True)
class Shape:
    num_seqs: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    is_ragged: bool = False
    """Lengths are uniform in 1 .. context instead of all `context`."""
    cache_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        context = f"1..{self.context}" if self.is_ragged else str(self.context)
        fp8 = "" if self.cache_dtype.itemsize > 1 else " FP8"
        return f"{self.num_seqs} x {context}, {self.num_heads}/{self.num_kv_heads}, {self.head_dim}{fp8}"

    def lens(self) -> torch.Tensor:
        if not self.is_ragged:
            return torch.full((self.num_seqs,), self.context)
        return torch.randint(1, self.context + 1, (self.num_seqs,), generator=torch.Generator().manual_seed(0))


MAIN = (
    Shape(1, 1024),
    Shape(1, 8192),
    Shape(1, 32768),
    Shape(8, 8192),
    Shape(64, 1024),
    Shape(64, 8192),
    Shape(256, 1024),
    Shape(256, 4096),
    Shape(16, 32768),
    Shape(64, 4096, 32, 32),
    Shape(64, 4096, 64, 8),
    Shape(64, 2048, 9, 3, 64),
    Shape(4, 131072),
)
RAGGED = (Shape(64, 16384, is_ragged=True), Shape(16, 16384, is_ragged=True))
HEADS = (
    *(Shape(64, 4096, *heads) for heads in ((28, 4), (40, 8), (16, 16), (64, 8))),
    *(Shape(64, 4096, 32, 8, head_dim) for head_dim in (64, 96, 128, 256)),
)
FP8 = (Shape(64, 8192), Shape(64, 8192, cache_dtype=torch.float8_e4m3fn))
QUICK = (MAIN[0], MAIN[1], MAIN[5])


class Batch:
    """Random queries, keys and values of a shape. `key` and `value` are one layer of our cache, strided over blocks; peers' layouts are
    made of the same numbers when a peer asks for them."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        lens = shape.lens()
        blocks = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        self.shape, self.scale = shape, shape.head_dim**-0.5
        self.num_tokens, self.max_len, self.host_lens = int(lens.sum()), int(lens.max()), lens.tolist()
        self.lens, self.num_blocks = lens.int().cuda(), blocks.int().cuda()
        self.block_starts = torch.cat([torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int()]).cuda()
        total = int(blocks.sum())
        self.order = torch.randperm(total, generator=generator, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(shape.num_seqs, int(blocks.max()), dtype=torch.int32, device="cuda")
        self.table[torch.arange(self.table.shape[1], device="cuda") < self.num_blocks[:, None]] = self.order
        size = (total, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        cache = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16).to(shape.cache_dtype)
        self.key, self.value = cache[:, 0], cache[:, 1]
        size_of_query = (shape.num_seqs, shape.num_heads, shape.head_dim)
        self.query = torch.randn(size_of_query, generator=generator, device="cuda", dtype=torch.bfloat16)
        longest_first = sorted(range(shape.num_seqs), key=lambda i: -self.host_lens[i])
        self.checked = sorted({0, shape.num_seqs - 1, *longest_first[:NUM_CHECKED], *longest_first[-NUM_CHECKED:]})
        self.expected = self._expected()

    @property
    def kv_nbytes(self) -> int:
        return 2 * self.num_tokens * self.shape.num_kv_heads * self.shape.head_dim * self.key.element_size()

    def _expected(self) -> torch.Tensor:
        rows = self.checked
        starts, lens = list(range(len(rows) + 1)), [self.host_lens[i] for i in rows]
        tables = [self.table[i, : self.num_blocks[i]].tolist() for i in rows]
        return reference.paged_attention(self.query[rows].float(), self.key, self.value, tables, starts, lens, self.scale)

    def error(self, out: torch.Tensor) -> float:
        """The worst sequence's, relative."""
        difference = (out[self.checked].float() - self.expected).flatten(1).norm(dim=1)
        return float((difference / self.expected.flatten(1).norm(dim=1)).max())

    def poisoned_out(self) -> torch.Tensor:
        return torch.full_like(self.query, torch.nan)

    def tokens_before_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_blocks, block_size, num_kv_heads, head_dim], as FA3 and FlashInfer have it."""
        return self.key.transpose(1, 2).contiguous(), self.value.transpose(1, 2).contiguous()

    def classic(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K [num_blocks, num_kv_heads, head_dim / 8, block_size, 8], V [num_blocks, num_kv_heads, head_dim, block_size]."""
        key = self.key.reshape(*self.key.shape[:3], -1, 8)
        return key.transpose(2, 3).contiguous(), self.value.transpose(2, 3).contiguous()


def plan_of(batch: Batch, partition_size: int | None = None) -> PagedAttentionPlan:
    return PagedAttentionPlan(
        batch.query, batch.key, batch.value, batch.table, batch.lens, batch.max_len, batch.scale,
        num_kv_tokens=batch.num_tokens, partition_size=partition_size,
    )  # fmt: skip


def ours(batch: Batch) -> Run:
    plan, out = plan_of(batch), batch.poisoned_out()
    return lambda: plan.run(batch.query, batch.key, batch.value, out)


def flashinfer_decode(batch: Batch) -> Run:
    shape = batch.shape
    if shape.head_dim not in FLASHINFER_HEAD_SIZES:
        raise NotImplementedError("not compiled for this head size")
    caches = batch.tokens_before_heads()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    has_tensor_cores = shape.num_heads >= 4 * shape.num_kv_heads
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=has_tensor_cores)
    wrapper.plan(
        batch.block_starts, batch.order, (batch.lens - 1) % BLOCK_SIZE + 1, shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE,
        q_data_type=batch.query.dtype, kv_data_type=batch.key.dtype,
    )  # fmt: skip
    out = batch.poisoned_out()
    return lambda: wrapper.run(batch.query, caches, out=out)


def fa3(batch: Batch) -> Run:
    attend, (key, value) = flash_attention_3(), batch.tokens_before_heads()
    starts = torch.arange(len(batch.lens) + 1, dtype=torch.int32, device="cuda")
    return lambda: attend(
        batch.query, key, value, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=batch.max_len, seqused_k=batch.lens,
        softmax_scale=batch.scale, causal=True, block_table=batch.table,
    )  # fmt: skip


def vllm_v1(batch: Batch) -> Run:
    if batch.max_len > MAX_V1_CONTEXT:
        raise NotImplementedError("not for contexts this long")
    attend, (key, value) = vllm_ops().paged_attention_v1, batch.classic()
    out, one = batch.poisoned_out(), torch.ones(1, device="cuda")

    def run() -> torch.Tensor:
        attend(
            out, batch.query, key, value, batch.shape.num_kv_heads, batch.scale, batch.table, batch.lens, BLOCK_SIZE, batch.max_len, None,
            "auto", one, one,
        )  # fmt: skip
        return out

    return run


def vllm_v2(batch: Batch) -> Run:
    attend, (key, value) = vllm_ops().paged_attention_v2, batch.classic()
    out, one = batch.poisoned_out(), torch.ones(1, device="cuda")
    partitions = (*batch.query.shape[:2], -(-batch.max_len // CLASSIC_PARTITION_SIZE))
    exp_sums, max_logits = torch.empty(2, *partitions, device="cuda").unbind()
    tmp_out = torch.empty(*partitions, batch.shape.head_dim, dtype=batch.query.dtype, device="cuda")

    def run() -> torch.Tensor:
        attend(
            out, exp_sums, max_logits, tmp_out, batch.query, key, value, batch.shape.num_kv_heads, batch.scale, batch.table, batch.lens,
            BLOCK_SIZE, batch.max_len, None, "auto", one, one,
        )  # fmt: skip
        return out

    return run


PEERS: dict[str, Callable[[Batch], Run]] = {"flashinfer": flashinfer_decode, "fa3": fa3, "vllm_v1": vllm_v1, "vllm_v2": vllm_v2}


def compile_variants(shapes: tuple[Shape, ...], has_flashinfer: bool) -> None:
    """All of ours, and of FlashInfer's, side by side, so that no timing waits for a compiler. Who fails is named when it runs."""
    kinds = {(shape.head_dim, shape.cache_dtype) for shape in shapes}
    runs: list[Callable[[], object]] = [functools.partial(build_ours, head_dim, cache_dtype) for head_dim, cache_dtype in kinds]
    if has_flashinfer:
        groups = {(shape.head_dim, 4 if shape.num_heads >= 4 * shape.num_kv_heads else 1) for shape in shapes}
        tiny = [Batch(Shape(1, BLOCK_SIZE, group, 1, head_dim)) for head_dim, group in groups if head_dim in FLASHINFER_HEAD_SIZES]
        runs += [functools.partial(flashinfer_decode, batch) for batch in tiny]
    with ThreadPoolExecutor(len(runs)) as pool:
        for future in [pool.submit(run) for run in runs]:
            if error := future.exception():
                print(f"# {type(error).__name__}: {str(error)[-300:]}", flush=True)


def build_ours(head_dim: int, cache_dtype: torch.dtype) -> None:
    target, found = device_arch(), library(head_dim, torch.bfloat16, cache_dtype, is_classic=False)
    if find_prebuilt(found, target) is None:
        build(found, target, cache_folder())


@dataclass(frozen=True)
class Row:
    shape: Shape
    kv_nbytes: int
    results: dict[str, Measured | str]

    def us(self, name: str) -> float | None:
        result = self.results.get(name)
        return result.microseconds if isinstance(result, Measured) else None

    def ratio(self, *names: str) -> float | None:
        """The fastest of the peers' times over ours."""
        mine, theirs = self.us("ours"), [time for name in names if (time := self.us(name)) is not None]
        return min(theirs) / mine if mine and theirs else None

    def share(self, ceiling: float, name: str = "ours") -> float | None:
        time = self.us(name)
        return self.kv_nbytes / time * 1e6 / ceiling if time else None


def cell(row: Row, name: str, ceiling: float) -> str:
    time, share = row.us(name), row.share(ceiling, name)
    return "-" if time is None or share is None else f"{time:.1f} ({share:.0%})"


def measure_shape(shape: Shape, peers: list[str]) -> Row:
    batch = Batch(shape)
    results: dict[str, Measured | str] = {}
    for name, provider in (("ours", ours), *((name, PEERS[name]) for name in peers)):
        results[name] = measure(functools.partial(provider, batch), batch.error, repeat_ms=100)
        torch.cuda.empty_cache()
    return Row(shape, batch.kv_nbytes, results)


def measure_rows(title: str, shapes: tuple[Shape, ...], peers: list[str], ceiling: float, failures: dict[str, str]) -> list[Row]:
    """Prints a table as it goes."""
    ratios = {"flashinfer": ("flashinfer",), "fa3": ("fa3",), "vLLM": ("vllm_v1", "vllm_v2")}
    ratios = {name: wanted for name, wanted in ratios.items() if set(wanted) & set(peers)}
    print(f"\n{title}\n")
    columns = ["sequences x context, heads, head size", "ours", *peers, *(f"{name} / ours" for name in ratios)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows = []
    for shape in shapes:
        row = measure_shape(shape, peers)
        for name, result in row.results.items():
            if isinstance(result, str) and "NotImplementedError" not in result:
                failures.setdefault(name, f"{shape}: {result}")
        cells = [cell(row, name, ceiling) for name in ("ours", *peers)]
        cells += ["-" if (ratio := row.ratio(*wanted)) is None else f"{ratio:.2f}" for wanted in ratios.values()]
        print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def summarize(main: list[Row], others: list[Row], fp8: list[Row], ceiling: float) -> None:
    """One line per claim."""
    against = [ratio for row in main if (ratio := row.ratio("flashinfer")) is not None]
    if against:
        print(f"FlashInfer / ours over {len(against)} shapes: geometric mean {geometric_mean(against):.3f}, least {min(against):.3f}")
    against = [ratio for row in main if (ratio := row.ratio("fa3")) is not None]
    if against:
        print(f"FA3 / ours over {len(against)} shapes: geometric mean {geometric_mean(against):.3f}, least {min(against):.3f}")
    for name, has_group in (("grouped queries", True), ("one query head per KV head", False)):
        rows = [row for row in main if (row.shape.num_heads > row.shape.num_kv_heads) == has_group]
        against = [ratio for row in rows if (ratio := row.ratio("vllm_v1", "vllm_v2")) is not None]
        if against:
            print(f"vLLM's faster / ours, {name}: geometric mean {geometric_mean(against):.2f}, least {min(against):.2f}")
    largest = sorted(main, key=lambda row: -row.kv_nbytes)[:6]
    shares = [share for row in largest if (share := row.share(ceiling)) is not None]
    if shares:
        print(
            f"share of the read ceiling on the {len(shares)} largest shapes: least {min(shares):.1%}, mean {sum(shares) / len(shares):.1%}"
        )
        rest = {str(row.shape): share for row in others if (share := row.share(ceiling)) is not None}
        if rest:
            worst = min(rest, key=lambda name: rest[name])
            print(f"ragged batches and other heads: least share {rest[worst]:.1%} ({worst})")
    times = [row.us("ours") for row in fp8]
    if len(times) == 2 and times[0] and times[1]:
        print(f"FP8 at {fp8[0].shape}: {times[0] / times[1]:.2f} times as fast as our own bf16")


COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LAYOUTS = ((False, 4), (False, 3), (False, 2), (True, 2), (True, 1))
"""Whether twice the copies are in flight, and thread blocks per multiprocessor at most."""
MAX_THREAD_BLOCKS = 9000


def print_partitions(shapes: tuple[Shape, ...]) -> list[dict[str, object]]:
    """Time by number of partitions (columns) and layout (rows)."""
    print("\nMicroseconds by number of partitions, the best of all in bold; `chosen` is what the rule takes.\n")
    print(f"| shape | in flight | {' | '.join(map(str, COUNTS))} | best | chosen | chosen / best |")
    print("|---|---|" + "---|" * (len(COUNTS) + 3))
    records: list[dict[str, object]] = []
    for shape in shapes:
        records += measure_partitions(shape)
        torch.cuda.empty_cache()
    return records


def measure_partitions(shape: Shape) -> list[dict[str, object]]:
    batch = Batch(shape)
    out = batch.poisoned_out()

    def run(plan: PagedAttentionPlan) -> Run:
        return lambda: plan.run(batch.query, batch.key, batch.value, out)

    chosen = plan_of(batch)
    if not (error := batch.error(run(chosen)())) < WRONG:
        sys.exit(f"{shape}: relative error {error:.1e}")
    rule = microseconds(run(chosen), warmup_ms=10, repeat_ms=40)
    times: dict[tuple[bool, int, int], float] = {}
    for count in COUNTS:
        size = -(-batch.max_len // count // STAGE_TOKENS) * STAGE_TOKENS
        if count > 1 and (size < 2 * STAGE_TOKENS or shape.num_seqs * shape.num_kv_heads * count > MAX_THREAD_BLOCKS):
            continue
        plan = plan_of(batch, size)
        for is_deep, per_multiprocessor in LAYOUTS:
            plan.launch = plan.launch._replace(is_deep=is_deep, blocks_per_multiprocessor=per_multiprocessor)
            times[is_deep, per_multiprocessor, count] = microseconds(run(plan), warmup_ms=5, repeat_ms=20)
    best = min(times, key=lambda key: times[key])
    for layout in LAYOUTS:
        cells = [f"{'deep' if layout[0] else 'shallow'}, {layout[1]} a multiprocessor"]
        for count in COUNTS:
            text = f"{times[*layout, count]:.1f}" if (*layout, count) in times else ""
            cells.append(f"**{text}**" if (*layout, count) == best else text)
        if layout == LAYOUTS[0]:
            cells = [str(shape), *cells, f"{times[best]:.1f}", f"{rule:.1f}, {describe(chosen.launch, batch)}", f"{rule / times[best]:.3f}"]
        else:
            cells = ["", *cells, "", "", ""]
        print(f"| {' | '.join(cells)} |", flush=True)
    names = ("is_deep", "blocks_per_multiprocessor", "partitions")
    return [{"shape": str(shape), "us": time} | dict(zip(names, key, strict=True)) for key, time in times.items()]


def describe(launch: Launch, batch: Batch) -> str:
    count = max(1, -(-batch.max_len // launch.partition_size))
    depth, hint = "deep" if launch.is_deep else "shallow", ", evict first" if launch.evict_first else ""
    return f"{depth} {launch.blocks_per_multiprocessor} x {count}{hint}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes")
    parser.add_argument("--partitions", action="store_true", help="the tables that the choice rule is fitted from")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, comma-separated; empty for none (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    ceiling = read_ceiling()
    print(f"{device()}, bf16, block size {BLOCK_SIZE}, read ceiling {ceiling / 1e12:.2f} TB/s", flush=True)
    if options.partitions:
        tried = QUICK if options.quick else (*MAIN, *RAGGED, *FP8[1:])
        compile_variants(tried, has_flashinfer=False)
        found: object = print_partitions(tried)
    else:
        sections = {"Even batches": MAIN, "Ragged batches": RAGGED, "Other heads": HEADS} if not options.quick else {"Quick": QUICK}
        compile_variants(tuple(shape for shapes in (*sections.values(), FP8) for shape in shapes), "flashinfer" in peers)
        failures: dict[str, str] = {}
        rows = {title: measure_rows(title, shapes, peers, ceiling, failures) for title, shapes in sections.items()}
        fp8 = [] if options.quick else measure_rows("FP8 E4M3 keys and values", FP8, [], ceiling, failures)
        print()
        first, *others = rows.values()
        summarize(first, [row for section in others for row in section], fp8, ceiling)
        for name, reason in failures.items():
            print(f"{name} did not run everywhere: {reason}")
        everything = [*(row for section in rows.values() for row in section), *fp8]
        found = [
            {"shape": str(row.shape), "kv_nbytes": row.kv_nbytes, "ceiling": ceiling}
            | {name: vars(result) if isinstance(result, Measured) else result for name, result in row.results.items()}
            for row in everything
        ]
        if "ours" in failures:
            sys.exit(1)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
