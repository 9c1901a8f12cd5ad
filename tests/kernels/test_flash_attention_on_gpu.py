"""Chunked-prefill attention on a GPU against the plain formula in fp64; the names D01 .. D16 are those of the field reports."""

from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionBatch, AttentionCase, assert_close

from kernels.flash_attention import BLOCK_SIZES, HEAD_DIMS, flash_attention, prepare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONTEXTS = (0, 1, 15, 16, 17, 63, 64, 65)
MIXED = ((1, 50), (1, 7), (5, 37), (0, 20), (7, 7), (3, 0), (65, 130), (1, 1), (130, 515))


def call(batch: AttentionBatch, k_scale: float | None = None, v_scale: float | None = None) -> torch.Tensor:
    case = batch.case
    return flash_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.tensor(batch.query_start_loc),
        batch.tensor(batch.seq_lens), max(q for q, _ in case.shapes), max(s for _, s in case.shapes), batch.scale,
        alibi_slopes=batch.alibi_slopes, sliding_window=case.sliding_window, soft_cap=case.soft_cap,
        k_scale=case.k_scale if k_scale is None else k_scale, v_scale=case.v_scale if v_scale is None else v_scale, out=batch.out,
    )  # fmt: skip


def call_triton(batch: AttentionBatch) -> torch.Tensor:
    from kernels import flash_attention_triton

    case = batch.case
    flash_attention_triton.flash_attention(
        batch.out.fill_(float("nan")), batch.query, batch.key_cache, batch.value_cache, batch.block_tables,
        batch.tensor(batch.query_start_loc), batch.tensor(batch.seq_lens), max(q for q, _ in case.shapes),
        max(s for _, s in case.shapes), batch.scale, batch.alibi_slopes, case.sliding_window, case.soft_cap, case.k_scale, case.v_scale,
    )  # fmt: skip
    return batch.out


def check(case: AttentionCase) -> None:
    """The op, whichever kernel it takes, and the Triton kernel, which must be able to do all of it."""
    batch = AttentionBatch(case, "cuda")
    expected = batch.expected()
    assert_close(call(batch), expected, case.dtype)
    assert_close(call_triton(batch), expected, case.dtype)


@pytest.mark.parametrize("num_queries", [1, 7, 16, 65])
def test_d03_a_chunk_attends_to_all_that_came_before(num_queries: int) -> None:
    for context in CONTEXTS:
        check(AttentionCase(((num_queries, context + num_queries),)))
    check(AttentionCase(tuple((num_queries, context + num_queries) for context in CONTEXTS)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_d08_every_head_size(head_dim: int) -> None:
    check(AttentionCase(((1, 33), (33, 33), (65, 33 + 65)), head_dim=head_dim))


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, BF16), (64, BF16), (128, BF16), (256, BF16), (64, FP32), (128, FP32), (256, FP32)])
def test_every_dtype(head_dim: int, dtype: torch.dtype) -> None:
    check(AttentionCase(MIXED, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 15, 127, 128, 129, 4095, 4096, 4097])
def test_d13_neighbouring_lengths(length: int, head_dim: int) -> None:
    check(AttentionCase(((length, length),), head_dim=head_dim))


@pytest.mark.parametrize("num_seqs", [1, 64])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_d14_every_block_size_at_its_edges(block_size: int, num_seqs: int) -> None:
    for seq_len in (block_size - 1, block_size, block_size + 1):
        check(AttentionCase(((min(seq_len, 7), seq_len),) * num_seqs, block_size=block_size))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_d14_every_block_size_in_chunks_long_enough_for_hopper(block_size: int, head_dim: int) -> None:
    edges = tuple((seq_len, seq_len) for seq_len in (block_size - 1, block_size, block_size + 1))
    check(AttentionCase((*edges, (200, 1027), (130, 130), (65, 400), (70, 0), (1, 300)), 8, 2, head_dim, block_size, BF16))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2), (28, 4), (16, 2), (16, 1), (71, 1), (130, 1)])
def test_every_ratio_of_query_to_key_heads(num_heads: int, num_kv_heads: int) -> None:
    check(AttentionCase(MIXED, num_heads, num_kv_heads))


def test_d16_shuffled_blocks_and_shared_prefixes() -> None:
    check(AttentionCase(((16, 48), (3, 35), (9, 70), (33, 65), (1, 33)), num_shared_blocks=2))


@pytest.mark.parametrize("num_rows_of_queries", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_size_of_tile(head_dim: int, num_rows_of_queries: int) -> None:
    check(AttentionCase(((num_rows_of_queries // 4, 700), (1, 513), (2, 129)), 8, 2, head_dim, dtype=BF16))


@pytest.mark.parametrize("window", [1, 15, 64, 97, 1000])
def test_sliding_window(window: int) -> None:
    check(AttentionCase((*MIXED, (100, 3000)), sliding_window=window))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(MIXED, 9, 3, alibi=True),
        AttentionCase(MIXED, soft_cap=2.0),
        AttentionCase(MIXED, 9, 3, 128, alibi=True, soft_cap=5.0, sliding_window=100, dtype=BF16),
        AttentionCase(MIXED, 6, 2, 80, 32, alibi=True, sliding_window=33, cache_dtype=E4M3, k_scale=0.5, v_scale=2.0),
    ],
    ids=str,
)
def test_options(case: AttentionCase) -> None:
    check(case)


@pytest.mark.parametrize("query_len", [3, 200])
def test_scales_mean_nothing_for_a_cache_that_holds_the_keys_themselves(query_len: int) -> None:
    """Whichever kernel serves: short chunks are Triton's."""
    batch = AttentionBatch(AttentionCase(((query_len, 300),), 8, 2, 128, dtype=BF16, k_scale=0.5, v_scale=2.0), "cuda")
    assert_close(call(batch), batch.expected(), BF16)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("cache_dtype", "head_dim"), [(E4M3, 64), (E4M3, 128), (E5M2, 128), (E4M3, 120)])
def test_d10_fp8_cache_and_its_scales(cache_dtype: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    case = AttentionCase(MIXED, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype, k_scale=0.25, v_scale=0.5)
    check(case)
    batch = AttentionBatch(case, "cuda")
    before = call(batch).clone()
    assert not torch.allclose(call(batch, k_scale=1.0), before, atol=1e-2)
    # Not bit for bit: the smallest fp16 numbers lose bits when they are halved.
    torch.testing.assert_close(call(batch, v_scale=1.0), before * 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_heads", [16, 64])
def test_d05_blocks_past_2_31_elements_equal_the_same_data_in_low_blocks(num_heads: int) -> None:
    """By Triton's kernel and, with rows enough, by the Hopper one."""
    num_blocks, num_kv_heads, block_size, head_dim = 70_000, 16, 16, 128
    assert num_blocks * num_kv_heads * block_size * head_dim > 2**31
    caches = [torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=FP16, device="cuda") for _ in range(2)]
    low, high = [1, 2, 3, 4], [0, 65_535, 65_536, num_blocks - 1]
    generator = torch.Generator("cuda").manual_seed(5)
    query = torch.randn(20, num_heads, head_dim, generator=generator, device="cuda", dtype=FP16)
    for cache in caches:
        data = torch.randn(4, *cache.shape[1:], generator=generator, device="cuda", dtype=FP16)
        cache[low] = data
        cache[high] = data
    results = []
    for blocks in (low, high):
        table = torch.tensor([blocks], dtype=torch.int32, device="cuda")
        start, lens = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, 20], [61]))
        out = torch.full_like(query, float("nan"))
        results.append(flash_attention(query, *caches, table, start, lens, 20, 61, 0.09, out=out))
    assert bool(results[0].isfinite().all())
    assert torch.equal(*results)


def test_long_context_and_a_crowd_of_decode_rows_in_one_batch() -> None:
    shapes = tuple((1, 1 + 37 * i) for i in range(60))
    check(AttentionCase((*shapes, (300, 8193), (1, 32768), (16, 16)), 8, 2, 128, dtype=BF16))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (9, 3, 64), (4, 1, 80), (4, 4, 256)])
def test_a_few_queries_of_a_long_context(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    for num_queries in (1, 5, 17):
        check(AttentionCase(((num_queries, 8193),), num_heads, num_kv_heads, head_dim, dtype=BF16))
    check(AttentionCase(((3, 3000), (5, 8193), (2, 2), (4, 0)), num_heads, num_kv_heads, head_dim, sliding_window=4500))


@pytest.mark.parametrize("num_heads", [4, 16])
def test_a_captured_graph_follows_new_lengths(num_heads: int) -> None:
    """Triton's kernel, and the Hopper one."""
    batch = AttentionBatch(AttentionCase(((1, 600), (5, 600), (16, 600)), num_heads), "cuda")
    lens, start = batch.tensor([1, 5, 16]), batch.tensor(batch.query_start_loc)

    def launch() -> None:
        flash_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.block_tables, start, lens, 16, 600, batch.scale, out=batch.out
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seq_lens in ([600, 600, 600], [17, 0, 64], [1, 5, 16]):
        batch.seq_lens = seq_lens
        lens.copy_(batch.tensor(seq_lens))
        batch.out.fill_(float("nan"))
        graph.replay()
        assert_close(batch.out, batch.expected(), FP16)


def test_what_was_prepared_is_not_compiled_at_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    first = AttentionBatch(AttentionCase(((1, 1),), 10, 2, 96, dtype=BF16, soft_cap=3.0), "cuda")
    prepare(first.query, first.key_cache, first.value_cache, soft_cap=3.0)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(str(about["repr"])))
    for shapes in (((1, 1),), ((3, 700),), ((5, 9000),), ((9, 16), (30, 4000)), ((200, 300),) * 16, ((1, 77),) * 17):
        call(AttentionBatch(AttentionCase(shapes, 10, 2, 96, dtype=BF16, soft_cap=3.0), "cuda"))
    assert compiled == []


def test_what_was_prepared_beside_the_hopper_kernel_is_not_compiled_at_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    first = AttentionBatch(AttentionCase(((1, 1),), 8, 2, 128, 32, BF16), "cuda")
    prepare(first.query, first.key_cache, first.value_cache)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(str(about["repr"])))
    for shapes in (((12, 16),), ((12, 9000),), ((200, 300),), ((200, 9000),), ((17, 3000),) * 40):
        call(AttentionBatch(AttentionCase(shapes, 8, 2, 128, 32, BF16), "cuda"))
    assert compiled == []
