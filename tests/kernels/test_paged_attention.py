"""Decode attention without a GPU: what its ops mean on the CPU, what they refuse, and how a step is laid out."""

from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionBatch, AttentionCase, assert_close

from kernels import build, reference
from kernels.paged_attention import (
    HEAD_SIZES,
    MAX_PARTITIONS,
    STAGE_TOKENS,
    PagedAttentionPlan,
    choose_launch,
    library,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (0, 1, 15, 16, 17, 130)
CASES = [
    AttentionCase(tuple((1, length) for length in LENGTHS), 6, 2),
    AttentionCase(tuple((1, length) for length in LENGTHS), 6, 2, alibi=True, soft_cap=2.0, sliding_window=17),
    AttentionCase(tuple((1, length) for length in LENGTHS), 6, 2, 80, 8, torch.bfloat16, E4M3, 0.25, 0.5),
    AttentionCase(((1, 33), (1, 70)), 4, 2, cache_dtype=E5M2, k_scale=3.0, v_scale=0.125, num_shared_blocks=2),
]


def decode(batch: AttentionBatch, version: str, is_classic: bool = False, **changes: object) -> torch.Tensor:
    """By the entry point `version`; every buffer is poisoned before."""
    case = batch.case
    caches = (batch.key_cache, batch.value_cache)
    arguments: dict[str, object] = {
        "query": batch.query, "block_tables": batch.block_tables, "seq_lens": batch.tensor(batch.seq_lens),
        "max_seq_len": max(batch.seq_lens), "scale": batch.scale, "alibi_slopes": batch.alibi_slopes,
        "sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "k_scale": case.k_scale, "v_scale": case.v_scale,
    }  # fmt: skip
    arguments["key_cache"], arguments["value_cache"] = reference.to_classic_layout(*caches) if is_classic else caches
    arguments["out"] = batch.out.fill_(float("nan"))
    if version != "auto":
        kinds = {None: "auto", E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}
        arguments |= {
            "num_kv_heads": case.num_kv_heads,
            "block_size": case.block_size,
            "kv_cache_dtype": kinds[case.cache_dtype],
        }
    arguments |= changes
    if version == "v2":
        sums = torch.full((*batch.query.shape[:2], -(-int(str(arguments["max_seq_len"])) // 512)), float("nan"))
        arguments |= {
            "exp_sums": sums, "max_logits": sums.clone(),
            "tmp_out": torch.full((*sums.shape, case.head_dim), float("nan"), dtype=batch.query.dtype),
        }  # fmt: skip
    {"auto": paged_attention, "v1": paged_attention_v1, "v2": paged_attention_v2}[version](**arguments)  # type: ignore[operator]
    return batch.out


@pytest.mark.parametrize("is_classic", [False, True])
@pytest.mark.parametrize("version", ["auto", "v1", "v2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ops_on_the_cpu_equal_the_formula(case: AttentionCase, version: str, is_classic: bool) -> None:
    batch = AttentionBatch(case, "cpu")
    assert_close(decode(batch, version, is_classic), batch.expected(), case.dtype)


@pytest.mark.parametrize("version", ["auto", "v1", "v2"])
def test_scales_mean_nothing_for_a_cache_that_holds_the_keys_themselves(version: str) -> None:
    batch = AttentionBatch(CASES[0], "cpu")
    before = decode(batch, version).clone()
    assert torch.equal(decode(batch, version, k_scale=0.5, v_scale=2.0), before)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_batch_of_empty_sequences_gives_zeros(version: str) -> None:
    batch = AttentionBatch(AttentionCase(((1, 0), (1, 0))), "cpu")
    assert torch.equal(decode(batch, version), torch.zeros_like(batch.out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.zeros(9, 2, 16, 64, dtype=torch.float16, device="meta")}, "key_cache is on meta"),
        ({"seq_lens": torch.ones(12, dtype=torch.int32)[::2]}, "seq_lens must be contiguous"),
        ({"seq_lens": torch.ones(6)}, "seq_lens must be"),
        ({"alibi_slopes": torch.ones(12)[::2]}, "alibi_slopes must be contiguous"),
        ({"alibi_slopes": torch.ones(5)}, "alibi_slopes must be"),
        ({"block_tables": torch.ones(9, 6, dtype=torch.int32).T}, "block_tables must be contiguous along a row"),
        ({"sliding_window": 0}, "sliding_window must be positive"),
        ({"soft_cap": float("nan")}, "soft_cap must be positive"),
        ({"k_scale": torch.ones(2)}, "one number"),
        ({"out": torch.zeros(6, 6, 64)}, "out must be"),
        ({"query": torch.zeros(1, 6, 64, dtype=torch.float16).expand(65536, -1, -1)}, "65535 in one launch"),
        ({"out": torch.zeros(6, 6, 64, dtype=torch.float16, device="meta")}, "out .* on"),
    ],
)
@pytest.mark.parametrize("version", ["auto", "v1"])
def test_bad_arguments_are_named(version: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(AttentionBatch(CASES[0], "cpu"), version, **change)


def plan(batch: AttentionBatch, max_seq_len: int, partition_size: int | None) -> PagedAttentionPlan:
    return PagedAttentionPlan(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.tensor(batch.seq_lens), max_seq_len, batch.scale,
        partition_size=partition_size,
    )  # fmt: skip


@pytest.mark.parametrize("partition_size", [0, -64, 100])
def test_a_plan_refuses_partitions_that_would_cut_a_stage(partition_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        plan(AttentionBatch(CASES[0], "cpu"), 130, partition_size)


def test_a_plan_refuses_more_partitions_than_the_reduction_holds() -> None:
    with pytest.raises(ValueError, match="larger partition_size"):
        plan(AttentionBatch(CASES[0], "cpu"), 64 * MAX_PARTITIONS + 1, 64)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_ops_are_known_to_the_compiler_as_ones_that_write_their_outputs(version: str) -> None:
    batch = AttentionBatch(CASES[0], "cpu")
    caches = (batch.key_cache.nan_to_num(0.0), batch.value_cache.nan_to_num(0.0, 0.0, 0.0))
    tail = (
        batch.query, *caches, 2, 0.125, batch.block_tables, batch.tensor(batch.seq_lens), 16, max(LENGTHS), None, "auto", None, None,
    )  # fmt: skip
    outputs = [torch.zeros_like(batch.query, memory_format=torch.contiguous_format)]
    if version == "v2":
        outputs += [torch.zeros(6, 6, 1), torch.zeros(6, 6, 1), torch.zeros(6, 6, 1, 64)]
    op = getattr(torch.ops.pagewire, f"paged_attention_{version}").default
    torch.library.opcheck(op, (*outputs, *tail), test_utils=("test_schema", "test_faketensor"))


def test_every_layout_fits_the_reduction_and_the_stages() -> None:
    for num_seqs in (1, 2, 7, 64, 300):
        for num_kv_heads in (1, 3, 8, 32):
            for max_seq_len in (0, 1, 63, 64, 65, 4097, 131072, 1 << 20):
                for known in (None, num_seqs * max_seq_len // 3):
                    launch = choose_launch(num_seqs, num_kv_heads, max_seq_len, 256, 132, known)
                    assert launch.partition_size > 0 and launch.partition_size % STAGE_TOKENS == 0
                    assert launch.partition_size * MAX_PARTITIONS >= max_seq_len


def test_few_long_sequences_are_cut_and_many_are_not() -> None:
    assert choose_launch(1, 8, 32768, 256, 132).partition_size < 4096
    assert choose_launch(256, 8, 4096, 256, 132).partition_size >= 4096


# Where a stage is smallest or largest beside what the warps merge, and where lanes have no chunk.
LIMITS = [(256, torch.bfloat16, E4M3), (192, torch.float16, E5M2), (256, torch.float16, torch.float16), (120, torch.bfloat16, E4M3)]


@pytest.mark.nvcc
@pytest.mark.skipif(build.find_nvcc() is None or build.find_cxx() is None, reason="no nvcc or no C++ compiler for it")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("head_size", "dtype", "cache_dtype"), LIMITS, ids=str)
def test_kernels_at_the_limits_of_shared_memory_compile(head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, arch: str) -> None:
    assert head_size in HEAD_SIZES
    found = library(head_size, dtype, cache_dtype, is_classic=False)
    assert build.build(found, arch, build.cache_folder()).is_file()
