"""The op flash_attention on the CPU, and its Triton kernel in Triton's interpreter, against the plain formula."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from attention_cases import AttentionBatch, AttentionCase, assert_close

from kernels.flash_attention import flash_attention, prepare

# numpy has no bf16, so the interpreter's products of it are meaningless: bf16 is tested on a GPU.
INTERPRETED = [
    AttentionCase(((1, 17), (5, 37), (0, 9), (18, 35), (7, 7), (1, 1)), 6, 2),
    AttentionCase(((1, 0), (3, 0), (4, 4)), dtype=torch.float32),
    AttentionCase(((65, 130),), head_dim=32, dtype=torch.float32),
    AttentionCase(((33, 33),), 7, 1, 80, 8),
    AttentionCase(((5, 31), (16, 32), (17, 33)), 8, 1, 96, 32),
    AttentionCase(((2, 37),), 71, 1, 120, 64),
    AttentionCase(((2, 40),), 6, 2, 192, 16, torch.float32),
    AttentionCase(((2, 40),), 3, 3, 256, 256),
    AttentionCase(((33, 70), (20, 20)), alibi=True),
    AttentionCase(((17, 70), (5, 130)), sliding_window=1),
    AttentionCase(((17, 70), (5, 130)), sliding_window=15),
    AttentionCase(((17, 70), (40, 150)), sliding_window=97),
    AttentionCase(((33, 70),), soft_cap=1.5),
    AttentionCase(((33, 70), (1, 65)), alibi=True, sliding_window=40, soft_cap=3.0),
    AttentionCase(((33, 70), (1, 65)), cache_dtype=torch.float8_e4m3fn, k_scale=0.25, v_scale=0.5),
    AttentionCase(((33, 70), (1, 65)), cache_dtype=torch.float8_e5m2, k_scale=3.0, v_scale=0.125),
    AttentionCase(((9, 41), (9, 41), (1, 33)), num_shared_blocks=2),
]
Interpret = Callable[..., torch.Tensor]
CONTEXTS = (0, 1, 15, 16, 17, 63, 64, 65)


def call(batch: AttentionBatch) -> torch.Tensor:
    """The op on a batch, into its poisoned output."""
    case = batch.case
    return flash_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.tensor(batch.query_start_loc),
        batch.tensor(batch.seq_lens), max(q for q, _ in case.shapes), max(s for _, s in case.shapes), batch.scale,
        alibi_slopes=batch.alibi_slopes, sliding_window=case.sliding_window, soft_cap=case.soft_cap, k_scale=case.k_scale,
        v_scale=case.v_scale, out=batch.out,
    )  # fmt: skip


def interpret(case: AttentionCase, rows: int, keys: int, num_splits: int = 1) -> torch.Tensor:
    """Runs in the interpreter's own process."""
    from kernels import flash_attention_triton as triton_kernel

    batch = AttentionBatch(case, "cpu")
    triton_kernel.flash_attention(
        batch.out, batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.tensor(batch.query_start_loc),
        batch.tensor(batch.seq_lens), max(q for q, _ in case.shapes), max(s for _, s in case.shapes), batch.scale, batch.alibi_slopes,
        case.sliding_window, case.soft_cap, case.k_scale, case.v_scale, triton_kernel.Configuration(rows, keys, 4, 1), num_splits,
    )  # fmt: skip
    return batch.out


def interpret_too_long(case: AttentionCase) -> torch.Tensor:
    """The same in the interpreter's process with seq_lens beyond what a row of the block table holds; the next row is another's."""
    from kernels import flash_attention_triton as triton_kernel

    batch = AttentionBatch(case, "cpu")
    num_blocks = -(-case.shapes[0][1] // case.block_size)
    held = num_blocks * case.block_size
    triton_kernel.flash_attention(
        batch.out, batch.query, batch.key_cache, batch.value_cache, batch.block_tables[:, :num_blocks],
        batch.tensor(batch.query_start_loc), batch.tensor([held + 100] * len(case.shapes)), max(q for q, _ in case.shapes), held,
        batch.scale, None, None, None, 1.0, 1.0, triton_kernel.Configuration(16, 16, 4, 1), 1,
    )  # fmt: skip
    return batch.out


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpret]:
    """Triton reads TRITON_INTERPRET when it is imported: a process of its own has it set, and nothing else does."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        patch.setenv("TRITON_INTERPRET", "1")
        assert process.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
        patch.undo()
        yield lambda *arguments, run=interpret: process.submit(run, *arguments).result()


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_op_on_the_cpu_equals_the_formula(case: AttentionCase) -> None:
    batch = AttentionBatch(case, "cpu")
    assert_close(call(batch), batch.expected(), case.dtype)


def test_preparing_leaves_the_cache_as_it_was() -> None:
    batch = AttentionBatch(AttentionCase(((5, 37),), dtype=torch.float32), "cpu")
    before = batch.key_cache.clone()
    prepare(batch.query[:1], batch.key_cache, batch.value_cache)
    assert torch.equal(batch.key_cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (128, 64)])
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_kernel_in_the_interpreter_equals_the_formula(interpreter: Interpret, case: AttentionCase, rows: int, keys: int) -> None:
    assert_close(interpreter(case, rows, keys), AttentionBatch(case, "cpu").expected(), case.dtype)


@pytest.mark.parametrize("num_queries", [1, 7, 16, 65])
def test_kernel_in_the_interpreter_attends_to_all_that_came_before_a_chunk(interpreter: Interpret, num_queries: int) -> None:
    case = AttentionCase(tuple((num_queries, context + num_queries) for context in CONTEXTS), 3, 1, 32, dtype=torch.float32)
    assert_close(interpreter(case, 32, 32), AttentionBatch(case, "cpu").expected(), case.dtype)


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(((1, 17), (5, 37), (0, 9), (3, 0), (20, 70), (1, 1)), 3, 1),
        AttentionCase(((20, 150),), 2, 1, sliding_window=97, alibi=True),
    ],
    ids=str,
)
def test_keys_cut_into_parts_give_the_same_in_the_interpreter(interpreter: Interpret, case: AttentionCase, num_splits: int) -> None:
    assert_close(interpreter(case, 64, 16, num_splits), AttentionBatch(case, "cpu").expected(), case.dtype)


def test_scales_mean_nothing_for_a_cache_that_holds_the_keys_themselves() -> None:
    before = call(AttentionBatch(AttentionCase(((33, 70), (1, 65))), "cpu"))
    assert torch.equal(call(AttentionBatch(AttentionCase(((33, 70), (1, 65)), k_scale=0.5, v_scale=2.0), "cpu")), before)


def test_rows_of_other_requests_do_not_matter() -> None:
    batch = AttentionBatch(AttentionCase(((5, 37), (9, 12))), "cpu")
    before = call(batch).clone()
    batch.query[:5] = 7.0
    assert torch.equal(call(batch)[5:], before[5:])
    assert not torch.equal(batch.out[:5], before[:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4, 48, dtype=torch.float16)}, "head_dim 48"),
        ({"query": torch.zeros(5, 4, 64, dtype=torch.float64)}, "query is torch.float64"),
        ({"query": torch.zeros(5, 4, 64).to(torch.bfloat16)}, "key_cache is torch.float16"),
        ({"query": torch.zeros(5, 64, 4, dtype=torch.float16).transpose(1, 2)}, "head_dim contiguous"),
        ({"query": torch.zeros(5, 3, 64, dtype=torch.float16)}, "3 heads and key_cache 2"),
        ({"value_cache": torch.zeros(5, 2, 8, 64, dtype=torch.float16)}, "value_cache differs"),
        ({"seq_lens": torch.tensor([37])}, "seq_lens is torch.int64"),
        ({"query_start_loc": torch.tensor([0, 5, 6], dtype=torch.int32)}, "query_start_loc is torch.int32"),
        ({"max_seq_len": 10**6}, "max_seq_len 1000000 does not fit"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"soft_cap": 0.0}, "soft_cap 0.0"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"k_scale": float("nan")}, "k_scale nan"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes is torch.float32"),
        ({"out": torch.zeros(5, 4, 32, dtype=torch.float16)}, "out is torch.float16"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    batch = AttentionBatch(AttentionCase(((5, 37),)), "cpu")
    arguments: dict[str, object] = {
        "query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache, "block_tables": batch.block_tables,
        "query_start_loc": batch.tensor([0, 5]), "seq_lens": batch.tensor([37]), "max_query_len": 5, "max_seq_len": 37, "scale": 0.125,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        flash_attention(**(arguments | change))  # type: ignore[arg-type]


def test_op_is_known_to_the_compiler_as_one_that_writes_its_output() -> None:
    batch = AttentionBatch(AttentionCase(((5, 37),)), "cpu")
    torch.library.opcheck(
        torch.ops.pagewire.flash_attention.default,
        (torch.zeros_like(batch.query), batch.query, batch.key_cache.nan_to_num(0.0), batch.value_cache.nan_to_num(0.0, 0.0),
         batch.block_tables, batch.tensor([0, 5]), batch.tensor([37]), 5, 37, 0.125, None, None, None, 1.0, 1.0),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_configuration_shrinks_to_the_shared_memory_of_a_small_device() -> None:
    pytest.importorskip("triton")
    from kernels.flash_attention_triton import CONFIGURATIONS, configuration

    for padded_dim, query_bytes, cache_bytes in CONFIGURATIONS:
        for num_rows in (1, 17, 33, 1000):
            chosen = configuration(padded_dim, query_bytes, cache_bytes, num_rows, 99 << 10)
            assert chosen.shared_bytes(padded_dim, query_bytes, cache_bytes) <= 99 << 10
            assert chosen.rows >= 16 and chosen.keys >= 16 and chosen.num_stages >= 1


def test_keys_are_cut_only_where_few_programs_meet_a_long_context() -> None:
    pytest.importorskip("triton")
    from kernels.flash_attention_triton import MAX_SPLITS, choose_num_splits

    assert choose_num_splits(num_programs=8, num_key_tiles=128, num_multiprocessors=132) == 16
    assert choose_num_splits(num_programs=1, num_key_tiles=10_000, num_multiprocessors=132) == MAX_SPLITS
    assert choose_num_splits(num_programs=8, num_key_tiles=9, num_multiprocessors=132) == 2
    assert choose_num_splits(num_programs=132, num_key_tiles=10_000, num_multiprocessors=132) == 1
    assert choose_num_splits(num_programs=8, num_key_tiles=3, num_multiprocessors=132) == 1


def test_kernel_in_the_interpreter_cuts_a_sequence_to_what_its_block_table_holds(interpreter: Interpret) -> None:
    case = AttentionCase(((5, 48), (3, 48)), dtype=torch.float32)
    assert_close(interpreter(case, run=interpret_too_long), AttentionBatch(case, "cpu").expected(), case.dtype)
