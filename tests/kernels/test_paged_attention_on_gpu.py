"""Decode attention (PagedAttention V1, V2 and the choice between them) on a GPU against the plain formula in fp64.

The names D01 .. D16 are those of the field reports."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import AttentionBatch, AttentionCase, assert_close

from kernels import reference
from kernels.build import KernelError, build, cache_folder, device_arch
from kernels.paged_attention import PagedAttentionPlan, library, paged_attention, paged_attention_v1, paged_attention_v2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

FP16, BF16 = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PARTITION = 512
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
AWKWARD = (0, 1, 15, 16, 17, 511, 512, 513, 8191, 8193)
SHORT = (0, 1, 15, 16, 17, 33, 130, 600)
KV_CACHE_DTYPE = {None: "auto", E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}
ROUTES = ("v1 classic", "v1 engine", "v2 classic", "v2 engine", "auto classic", "auto engine")
ENGINE_ROUTES = ("v1 engine", "v2 engine", "auto engine")
DTYPES = [*((d, FP16) for d in HEAD_DIMS), (64, BF16), (128, BF16)]
FP8_DTYPES = [
    (E4M3, 64, FP16),
    (E4M3, 64, BF16),
    (E4M3, 80, BF16),
    (E4M3, 128, FP16),
    (E4M3, 128, BF16),
    (E4M3, 256, BF16),
    (E5M2, 64, FP16),
    (E5M2, 128, BF16),
]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Compiled side by side, since nvcc takes long over each one of them."""
    kinds = [(d, dtype, dtype) for d, dtype in DTYPES] + [(d, dtype, cache_dtype) for cache_dtype, d, dtype in FP8_DTYPES]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        wanted = [library(*kind, is_classic=is_classic) for kind in kinds for is_classic in (False, True)]
        list(threads.map(lambda one: build(one, device_arch(), cache_folder()), wanted))


def decode(lengths: tuple[int, ...], *arguments: object, **options: object) -> AttentionCase:
    """One query row for each sequence."""
    return AttentionCase(tuple((1, length) for length in lengths), *arguments, **options)  # type: ignore[arg-type]


def call(batch: AttentionBatch, route: str, *, lens: torch.Tensor | None = None, k_scale: object = None, v_scale: object = None,
         as_bytes: bool = False) -> torch.Tensor:  # fmt: skip
    """By the entry point and cache layout that `route` names; every buffer is poisoned before."""
    case = batch.case
    seq_lens = batch.tensor(batch.seq_lens) if lens is None else lens
    max_seq_len = max(seq_len for _, seq_len in case.shapes)
    k_scale = case.k_scale if k_scale is None else k_scale
    v_scale = case.v_scale if v_scale is None else v_scale
    options = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap}
    batch.out.fill_(float("nan"))
    version, layout = route.split()
    caches = (batch.key_cache, batch.value_cache)
    if layout == "classic":
        caches = reference.to_classic_layout(*caches)
    if version == "auto":
        return paged_attention(
            batch.query, *caches, batch.block_tables, seq_lens, max_seq_len, batch.scale,
            alibi_slopes=batch.alibi_slopes, k_scale=k_scale, v_scale=v_scale, out=batch.out, **options,
        )  # fmt: skip
    if as_bytes:
        caches = (caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    tail = (
        batch.query, *caches, case.num_kv_heads, batch.scale, batch.block_tables, seq_lens, case.block_size, max_seq_len,
        batch.alibi_slopes, KV_CACHE_DTYPE[case.cache_dtype], k_scale, v_scale,
    )  # fmt: skip
    if version == "v1":
        paged_attention_v1(batch.out, *tail, **options)
    else:
        num_partitions = max(1, math.ceil(max_seq_len / PARTITION))
        sums = torch.full((len(seq_lens), case.num_heads, num_partitions), float("nan"), device="cuda")
        partial = torch.full((*sums.shape, case.head_dim), float("nan"), dtype=batch.query.dtype, device="cuda")
        paged_attention_v2(batch.out, sums, sums.clone(), partial, *tail, **options)
    return batch.out


def check(case: AttentionCase, routes: tuple[str, ...] = ROUTES) -> None:
    batch = AttentionBatch(case, "cuda")
    expected = batch.expected()
    for route in routes:
        try:
            assert_close(call(batch, route), expected, case.dtype)
        except AssertionError as error:
            raise AssertionError(f"{route}: {error}") from None


@pytest.mark.parametrize("route", ROUTES)
def test_d01_poisoned_tails_do_not_reach_the_result(route: str) -> None:
    check(decode((17, 33), 9, 3), (route,))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_awkward_lengths(head_dim: int, dtype: torch.dtype) -> None:
    check(decode(AWKWARD, 8, 2, head_dim, dtype=dtype))


@pytest.mark.parametrize("length", AWKWARD[1:])
def test_awkward_lengths_alone(length: int) -> None:
    check(decode((length,), 32, 8, 128, dtype=BF16), ENGINE_ROUTES)


@pytest.mark.parametrize(("head_dim", "dtype"), DTYPES)
def test_d08_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    check(decode(SHORT, 6, 2, head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2), (28, 4), (16, 2), (16, 1), (40, 8), (71, 1), (142, 2), (20, 4), (12, 2)]
)
def test_every_ratio_of_query_to_key_heads(num_heads: int, num_kv_heads: int) -> None:
    check(decode(SHORT, num_heads, num_kv_heads, 128, dtype=BF16))
    check(decode((1, 513, 1025), num_heads, num_kv_heads, 64))


@pytest.mark.parametrize("num_seqs", [1, 64])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_d14_every_block_size_at_its_edges(block_size: int, num_seqs: int) -> None:
    routes = ROUTES if block_size <= 64 else ENGINE_ROUTES
    for seq_len in (block_size - 1, block_size, block_size + 1):
        check(decode((seq_len,) * num_seqs, 8, 2, 128, block_size), routes)
    check(decode((5 * block_size + 3, 700), 8, 2, 64, block_size, BF16), routes)


@pytest.mark.parametrize(("cache_dtype", "head_dim", "dtype"), FP8_DTYPES)
def test_d10_fp8_cache_and_its_scales(cache_dtype: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    case = decode(SHORT, 8, 2, head_dim, dtype=dtype, cache_dtype=cache_dtype, k_scale=0.25, v_scale=0.5)
    check(case)
    batch = AttentionBatch(case, "cuda")
    for route in ROUTES:
        before = call(batch, route).clone()
        assert not torch.allclose(call(batch, route, k_scale=1.0), before, atol=1e-2), route
        assert not torch.allclose(call(batch, route, v_scale=1.0), before, atol=1e-2), route
        on_gpu = [torch.tensor([value], device="cuda") for value in (0.25, 0.5)]
        assert torch.equal(call(batch, route, k_scale=on_gpu[0], v_scale=on_gpu[1]), before), route
        if not route.startswith("auto"):
            assert torch.equal(call(batch, route, as_bytes=True), before), route


def test_fp8_means_e4m3() -> None:
    batch = AttentionBatch(decode(SHORT, 8, 2, cache_dtype=E4M3), "cuda")
    named = call(batch, "v1 engine").clone()
    paged_attention_v1(
        batch.out.fill_(float("nan")), batch.query, batch.key_cache.view(torch.uint8), batch.value_cache.view(torch.uint8), 2,
        batch.scale, batch.block_tables, batch.tensor(batch.seq_lens), 16, max(SHORT), None, "fp8", 1.0, 1.0,
    )  # fmt: skip
    assert torch.equal(batch.out, named)


@pytest.mark.parametrize(
    "case",
    [
        decode(AWKWARD, 9, 3, alibi=True),
        decode(AWKWARD, 8, 2, 128, dtype=BF16, soft_cap=2.0),
        *(decode(AWKWARD, 8, 2, sliding_window=window) for window in (1, 15, 16, 513, 4096)),
        decode(AWKWARD, 14, 2, 128, dtype=BF16, alibi=True, soft_cap=5.0, sliding_window=700),
        decode(AWKWARD, 14, 2, 128, cache_dtype=E4M3, k_scale=0.5, v_scale=2.0, alibi=True, soft_cap=5.0, sliding_window=700),
    ],
    ids=str,
)
def test_options(case: AttentionCase) -> None:
    check(case)


def test_d16_shuffled_blocks_and_shared_prefixes() -> None:
    check(decode((48, 35, 70, 65, 33), 9, 3, num_shared_blocks=2))


def test_many_sequences_of_all_lengths() -> None:
    generator = torch.Generator().manual_seed(9)
    lengths = tuple(torch.randint(0, 3000, (64,), generator=generator).tolist())
    check(decode(lengths, 32, 8, 128, dtype=BF16))
    check(decode(lengths * 4, 9, 3, 64, dtype=BF16), ENGINE_ROUTES)


@pytest.mark.parametrize("length", [8192, 8193, 16384, 65536, 131072])
def test_d06_a_long_context_works_or_is_refused_in_words(length: int) -> None:
    batch = AttentionBatch(decode((length, 5), 8, 2, 128, dtype=BF16), "cuda")
    expected = batch.expected()
    for route in ("v2 classic", "v2 engine", "auto engine"):
        assert_close(call(batch, route), expected, BF16)
    for route in ("v1 classic", "v1 engine"):
        try:
            out = call(batch, route)
        except (KernelError, ValueError) as error:
            assert len(str(error)) > 20
        else:
            assert_close(out, expected, BF16)
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ["classic", "engine"])
def test_d05_blocks_past_2_31_elements_equal_the_same_data_in_low_blocks(layout: str) -> None:
    num_blocks, num_kv_heads, block_size, head_dim = 70_000, 16, 16, 128
    assert num_blocks * num_kv_heads * block_size * head_dim > 2**31
    shapes = [(num_blocks, num_kv_heads, block_size, head_dim)] * 2
    if layout == "classic":
        shapes = [(num_blocks, num_kv_heads, head_dim // 8, block_size, 8), (num_blocks, num_kv_heads, head_dim, block_size)]  # type: ignore[list-item]
    caches = [torch.empty(shape, dtype=FP16, device="cuda") for shape in shapes]
    low, high = [1, 2, 3, 4], [0, 65_535, 65_536, num_blocks - 1]
    generator = torch.Generator("cuda").manual_seed(5)
    query = torch.randn(1, 32, head_dim, generator=generator, device="cuda", dtype=FP16)
    for cache in caches:
        data = torch.randn(4, *cache.shape[1:], generator=generator, device="cuda", dtype=FP16)
        cache[low] = data
        cache[high] = data
    lens = torch.tensor([61], dtype=torch.int32, device="cuda")
    for version in ("v1", "v2"):
        results = []
        for blocks in (low, high):
            table = torch.tensor([blocks], dtype=torch.int32, device="cuda")
            out = torch.full_like(query, float("nan"))
            tail = (query, *caches, num_kv_heads, 0.09, table, lens, block_size, 61, None, "auto", 1.0, 1.0)
            if version == "v1":
                paged_attention_v1(out, *tail)
            else:
                sums = torch.full((1, 32, 1), float("nan"), device="cuda")
                paged_attention_v2(out, sums, sums.clone(), torch.full((1, 32, 1, head_dim), float("nan"), device="cuda").half(), *tail)
            results.append(out)
        assert bool(results[0].isfinite().all()), version
        assert torch.equal(*results), version


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_seqs", [1, 64])
def test_a_captured_graph_follows_new_lengths(num_seqs: int, route: str) -> None:
    batch = AttentionBatch(decode((2000,) * num_seqs, 8, 2, 128, dtype=BF16), "cuda")
    lens = batch.tensor(batch.seq_lens)
    call(batch, route, lens=lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(batch, route, lens=lens)
    for step in range(3):
        batch.seq_lens = [(2000, 1, 513)[(step + i) % 3] for i in range(num_seqs)]
        lens.copy_(batch.tensor(batch.seq_lens))
        batch.out.fill_(float("nan"))
        graph.replay()
        assert_close(batch.out, batch.expected(), BF16)


def test_a_scale_first_met_in_a_capture_is_right_outside_of_it() -> None:
    batch = AttentionBatch(decode(SHORT, 8, 2, 64, cache_dtype=E4M3, k_scale=0.3711, v_scale=0.5273), "cuda")
    lens = batch.tensor(batch.seq_lens)
    call(batch, "v1 engine", lens=lens, k_scale=1.0, v_scale=1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(batch, "v1 engine", lens=lens)
    assert_close(call(batch, "v1 engine", lens=lens), batch.expected(), FP16)
    batch.out.fill_(float("nan"))
    graph.replay()
    assert_close(batch.out, batch.expected(), FP16)


def test_a_batch_of_empty_sequences_gives_zeros() -> None:
    batch = AttentionBatch(decode((0, 0), 8, 2), "cuda")
    for route in ("v1 engine", "v1 classic", "auto engine"):
        assert torch.equal(call(batch, route), torch.zeros_like(batch.out)), route
    nothing = torch.empty(2, 8, 0, device="cuda")
    paged_attention_v2(
        batch.out.fill_(float("nan")), nothing, nothing, torch.empty(2, 8, 0, 64, device="cuda"), batch.query, batch.key_cache,
        batch.value_cache, 2, batch.scale, batch.block_tables, batch.tensor([0, 0]), 16, 0, None, "auto", 1.0, 1.0,
    )  # fmt: skip
    assert torch.equal(batch.out, torch.zeros_like(batch.out))


def test_a_narrow_window_over_a_context_past_131072() -> None:
    check(decode((200_000, 5), 8, 2, sliding_window=65), ("auto engine",))


def test_what_a_gpu_would_read_astray_is_refused() -> None:
    batch = AttentionBatch(decode(SHORT, 8, 2), "cuda")
    lens = batch.tensor(batch.seq_lens)
    tail = (batch.block_tables, lens, max(SHORT), batch.scale)
    with pytest.raises(ValueError, match="key_cache is on cpu"):
        paged_attention(batch.query, batch.key_cache.cpu(), batch.value_cache, *tail)
    with pytest.raises(ValueError, match="on cuda"):
        paged_attention(batch.query, batch.key_cache, batch.value_cache, *tail, out=torch.empty(batch.query.shape, dtype=FP16))
    with pytest.raises(ValueError, match="out must start"):
        shifted = torch.empty(batch.out.numel() + 1, dtype=FP16, device="cuda")[1:].view(batch.out.shape)
        paged_attention(batch.query, batch.key_cache, batch.value_cache, *tail, out=shifted)


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("partition_size", [None, 64, 192, 1024])
def test_a_plan_serves_every_layer_and_new_lengths(partition_size: int | None, is_even: bool) -> None:
    layers = [AttentionBatch(decode((2000,) * 6, 8, 2, 128, dtype=BF16), "cuda") for _ in range(2)]
    layers[1].key_cache.neg_()
    first = layers[0]
    lens = first.tensor(first.seq_lens)
    batch = (first.query, first.key_cache, first.value_cache, first.block_tables, lens, 2000, first.scale)
    plan = PagedAttentionPlan(*batch, partition_size=partition_size, is_even=is_even)
    for seq_lens in ([2000] * 6, [0, 1, 63, 64, 65, 1999], [129, 257, 300, 0, 640, 1200]):
        lens.copy_(first.tensor(seq_lens))
        for layer in layers:
            layer.seq_lens = seq_lens
            out = torch.full(layer.query.shape, float("nan"), dtype=BF16, device="cuda")
            assert_close(plan.run(layer.query, layer.key_cache, layer.value_cache, out), layer.expected(), BF16)


def test_results_are_the_same_every_time() -> None:
    batch = AttentionBatch(decode((1, 17, 513, 8193, 4000), 32, 8, 128, dtype=BF16), "cuda")
    for route in ROUTES:
        first = call(batch, route).clone()
        assert all(torch.equal(call(batch, route), first) for _ in range(5)), route


def test_a_new_output_is_made_where_none_is_given() -> None:
    batch = AttentionBatch(decode(SHORT, 8, 2), "cuda")
    out = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.tensor(batch.seq_lens), max(SHORT), batch.scale
    )
    assert_close(out, batch.expected(), FP16)
