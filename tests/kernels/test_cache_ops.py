"""Cache ops on the CPU and on the GPU: the same claims, against the loop in kernels/reference.py or plain indexing."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cache_ops import copy_blocks, gather_blocks, reshape_and_cache, scatter_blocks, swap_blocks

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU and comparable bit by bit, NaN included."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def random_rows(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    return key, value


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"), [(3, 64, 16), (2, 128, 8), (1, 80, 32), (5, 120, 16), (2, 20, 4), (1, 256, 64)]
)
def test_each_token_is_written_to_its_slot_and_nothing_else_is(
    device: str, num_heads: int, head_dim: int, block_size: int, kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    num_blocks, num_tokens = 9, 37
    key, value = random_rows(num_tokens, num_heads, head_dim, dtype)
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    slots = torch.where(torch.arange(num_tokens) % 5 == 3, -1, torch.cat((order, order.new_full((num_tokens - len(order),), -1))))
    stored = FP8.get(kv_cache_dtype, dtype)
    # The layer's view of a whole cache: strided over blocks.
    whole = poisoned(num_blocks, 2, 2, num_heads, block_size, head_dim, dtype=stored)
    wanted = whole.clone()
    reference.reshape_and_cache(key, value, wanted[:, 1, 0], wanted[:, 1, 1], slots, 0.5, 2.0) if kv_cache_dtype != "auto" else (
        reference.reshape_and_cache(key, value, wanted[:, 1, 0], wanted[:, 1, 1], slots)
    )
    written = whole.to(device)
    scales = (1.0, 1.0) if kv_cache_dtype == "auto" else (0.5, torch.tensor(2.0, device=device))
    reshape_and_cache(
        key.to(device), value.to(device), written[:, 1, 0], written[:, 1, 1], slots.to(device), kv_cache_dtype, *scales
    )  # fmt: skip
    assert torch.equal(raw(written), raw(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 8), (80, 32)])
def test_the_classic_layout_holds_the_same(device: str, head_dim: int, block_size: int, kv_cache_dtype: str, dtype: torch.dtype) -> None:
    key, value = random_rows(21, 3, head_dim, dtype)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(3))[:21]
    stored = FP8.get(kv_cache_dtype, dtype)
    key_cache, value_cache = (torch.zeros(6, 3, block_size, head_dim, dtype=torch.float32).to(stored) for _ in "kv")
    classic = [cache.to(device) for cache in reference.to_classic_layout(key_cache, value_cache)]
    reference.reshape_and_cache(key, value, key_cache, value_cache, slots)
    # Bytes serve as FP8 too.
    caches = [cache.view(torch.uint8) for cache in classic] if kv_cache_dtype != "auto" else classic
    reshape_and_cache(key.to(device), value.to(device), *caches, slots.to(device), kv_cache_dtype)
    for cache, wanted in zip(classic, reference.to_classic_layout(key_cache, value_cache), strict=True):
        assert torch.equal(raw(cache), raw(wanted))


def test_fp8_saturates_and_keeps_nan(device: str) -> None:
    key = torch.tensor([1e6, -1e6, 448.0, 1e-9, float("nan"), 0.0, -0.0, 3.3]).view(1, 1, 8)
    cache = torch.zeros(1, 1, 1, 8, dtype=torch.float8_e4m3fn)
    caches = [cache.to(device), cache.to(device)]
    reshape_and_cache(key.to(device), key.to(device), *caches, torch.zeros(1, dtype=torch.int64, device=device), "fp8")
    assert caches[0].float().flatten().tolist()[:4] == [448.0, -448.0, 448.0, 0.0]
    assert caches[0].float().isnan().flatten().tolist() == [False] * 4 + [True] + [False] * 3


def test_padding_rows_past_the_end_of_slot_mapping_are_ignored(device: str) -> None:
    """Field report D11: a padded batch has more rows than slots."""
    key, value = random_rows(512, 2, 64, torch.float16)
    slots = torch.randperm(40 * 16, generator=torch.Generator().manual_seed(4))[:509] + 16
    slots[[5, 100, 508]] = -1
    caches = [torch.full((42, 2, 16, 64), 7.0, dtype=torch.float16, device=device) for _ in "kv"]
    reshape_and_cache(key.to(device), value.to(device), *caches, slots.to(device))
    for cache, rows in zip(caches, (key, value), strict=True):
        flat = cache.cpu().transpose(1, 2).reshape(-1, 2, 64)
        is_written = (flat != 7.0).any(-1).any(-1)
        assert int(is_written.sum()) == 506
        assert torch.equal(flat[slots[slots >= 0]], rows[:509][slots >= 0])
        assert not is_written[:16].any()
        assert not is_written[41 * 16 :].any()


@pytest.mark.parametrize("slot", [32, 1 << 31, 1 << 40, -(1 << 40)])
def test_a_slot_outside_the_cache_is_never_written_and_refused_in_debug_mode(
    device: str, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report D12."""
    key, value = random_rows(4, 1, 16, torch.float32)
    memory = torch.full((6, 1, 16, 16), 7.0, device=device)
    caches = [memory[2:4], torch.full((2, 1, 16, 16), 7.0, device=device)]
    slots = torch.tensor([-1, 0, 31, slot], device=device)
    arguments = (key.to(device), value.to(device), *caches, slots)
    with pytest.raises(IndexError, match=f"slot {slot} is outside the cache of 32 slots"):
        reshape_and_cache(*arguments, debug=True)
    monkeypatch.setenv("PAGEWIRE_DEBUG", "1")
    with pytest.raises(IndexError, match="outside"):
        reshape_and_cache(*arguments)
    monkeypatch.delenv("PAGEWIRE_DEBUG")
    if device == "cuda":
        reshape_and_cache(*arguments)
        assert torch.equal(caches[0][0, 0, 0].cpu(), key[1, 0])
        assert torch.equal(caches[0][1, 0, 15].cpu(), key[2, 0])
        assert int((memory != 7.0).any(-1).sum()) == 2


def test_slices_of_a_fused_projection_are_read_in_place(device: str) -> None:
    fused = torch.randn(7, (4 + 2 + 2) * 64, generator=torch.Generator().manual_seed(5)).to(device)
    key, value = fused[:, 4 * 64 : 6 * 64].view(7, 2, 64), fused[:, 6 * 64 :].view(7, 2, 64)
    caches = [torch.zeros(1, 2, 16, 64, device=device) for _ in "kv"]
    reshape_and_cache(key, value, *caches, torch.arange(7, device=device))
    assert torch.equal(caches[0][0, :, :7].transpose(0, 1), key)
    assert torch.equal(caches[1][0, :, :7].transpose(0, 1), value)


def test_no_tokens_are_no_work(device: str) -> None:
    cache = torch.zeros(1, 2, 16, 64, device=device)
    rows = torch.zeros(3, 2, 64, device=device)
    reshape_and_cache(rows, rows, cache, cache.clone(), torch.zeros(0, dtype=torch.int64, device=device))
    reshape_and_cache(rows[:0], rows[:0], cache, cache.clone(), torch.zeros(0, dtype=torch.int64, device=device))
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping has 5 entries"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, "slot_mapping must be contiguous int64"),
        ({"key": torch.zeros(4, 2, 32)}, "key and value must be"),
        ({"key_cache": torch.zeros(3, 2, 16, 32)}, "key_cache must be"),
        ({"value_cache": torch.zeros(3, 2, 64, 16).transpose(2, 3)}, "value_cache must be contiguous"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be auto"),
        ({"kv_cache_dtype": "fp8"}, "the caches are"),
        ({"k_scale": 0.0}, "greater than 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "key": torch.zeros(4, 2, 64), "value": torch.zeros(4, 2, 64), "key_cache": torch.zeros(3, 2, 16, 64),
        "value_cache": torch.zeros(3, 2, 16, 64), "slot_mapping": torch.zeros(4, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(**(arguments | change))  # type: ignore[arg-type]


# ---- whole blocks ---------------------------------------------------------------------------------------------------------
def engine_cache(num_blocks: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> torch.Tensor:
    """[num_blocks, num_layers, K and V, heads, block size, head_dim] of distinct bits."""
    shape = (num_blocks, 3, 2, 2, 16, head_dim)
    return torch.randint(
        0, 256, (*shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(6)
    ).view(dtype)


@pytest.mark.parametrize("ids", [[4], [0, 11, 3, 7, 5], list(range(12)), []])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.float8_e5m2, 64), (torch.uint8, 3)])
def test_gathered_blocks_are_theirs_and_scatter_puts_them_back(device: str, dtype: torch.dtype, head_dim: int, ids: list[int]) -> None:
    cache = engine_cache(12, dtype, head_dim).to(device)
    before = raw(cache)
    block_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    staging = torch.zeros(len(ids), *cache.shape[1:], device=device).to(dtype)
    gather_blocks(cache, block_ids, staging)
    assert torch.equal(raw(staging), before[ids])
    target = torch.zeros(cache.shape, device=device).to(dtype)
    scatter_blocks(staging, block_ids, target)
    wanted = torch.zeros_like(before)
    wanted[ids] = before[ids]
    assert torch.equal(raw(target), wanted)
    assert torch.equal(raw(cache), before)


def test_staging_may_be_bytes(device: str) -> None:
    cache = engine_cache(5).to(device)
    staging = torch.zeros(2 * cache[0].nbytes, dtype=torch.uint8, device=device)
    gather_blocks(cache, torch.tensor([3, 1], device=device), staging)
    assert torch.equal(staging.cpu(), raw(cache[[3, 1]]).flatten())


def test_blocks_need_not_lie_side_by_side(device: str) -> None:
    whole = engine_cache(5).to(device)
    layer = whole[:, 1]
    staging = torch.zeros(2, *layer.shape[1:], dtype=layer.dtype, device=device)
    gather_blocks(layer, torch.tensor([4, 0], device=device), staging)
    assert torch.equal(raw(staging), raw(layer[[4, 0]]))


def test_copy_on_write_copies_every_pair(device: str) -> None:
    caches = [engine_cache(9).to(device), engine_cache(9, torch.float32).to(device)]
    before = [raw(cache) for cache in caches]
    copy_blocks(caches, torch.tensor([[0, 5], [0, 6], [3, 8]], device=device))
    for cache, was in zip(caches, before, strict=True):
        wanted = was.clone()
        wanted[[5, 6, 8]] = was[[0, 0, 3]]
        assert torch.equal(raw(cache), wanted)


@pytest.mark.parametrize("is_from_host", [True, False])
def test_blocks_swap_between_memories(device: str, is_from_host: bool) -> None:
    source, target = engine_cache(8), torch.zeros_like(engine_cache(6))
    source, target = (source, target.to(device)) if is_from_host else (source.to(device), target)
    pairs = torch.tensor([[2, 0], [3, 1], [4, 2], [0, 5]])
    swap_blocks(source, target, pairs)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(raw(target)[[0, 1, 2, 5]], raw(source)[[2, 3, 4, 0]])
    assert not raw(target)[[3, 4]].any()


def test_a_block_outside_the_cache_is_refused(device: str) -> None:
    cache = engine_cache(3).to(device)
    ids = torch.tensor([0, 3], device=device)
    staging = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype, device=device)
    with pytest.raises(IndexError, match="block 3"):
        gather_blocks(cache, ids, staging, debug=True)
    with pytest.raises(IndexError, match="block 3"):
        copy_blocks(cache, torch.tensor([[0, 3]], device=device), debug=True)
    with pytest.raises(IndexError, match="block -1"):
        swap_blocks(cache, cache.clone(), torch.tensor([[-1, 0]]))
    if device == "cuda":
        gather_blocks(cache, ids, staging)
        assert torch.equal(raw(staging[0]), raw(cache[0]))
        assert not staging[1].any()


def test_staging_that_does_not_fit_is_refused() -> None:
    cache = engine_cache(3)
    ids = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="staging must be contiguous and hold 2 blocks"):
        gather_blocks(cache, ids, torch.zeros(3, *cache.shape[1:], dtype=cache.dtype))
    with pytest.raises(ValueError, match="block_ids must be"):
        scatter_blocks(cache[:2].clone(), ids.int(), cache)
    with pytest.raises(ValueError, match="contiguous blocks"):
        copy_blocks(cache[:, :, 0], torch.tensor([[0, 1]]))


class TestOnGPU:
    """What there is only on a GPU."""

    pytestmark = GPU

    def test_blocks_go_to_pinned_memory_and_back_in_one_launch(self) -> None:
        cache = engine_cache(12).cuda()
        ids = torch.tensor([7, 0, 11], device="cuda")
        staging = torch.zeros(3, *cache.shape[1:], dtype=cache.dtype, pin_memory=True)
        gather_blocks(cache, ids, staging)
        torch.cuda.synchronize()
        assert torch.equal(raw(staging), raw(cache[ids]))
        target = torch.zeros_like(cache)
        scatter_blocks(staging, ids, target)
        assert torch.equal(raw(target[ids]), raw(staging))
        with pytest.raises(ValueError, match="pinned"):
            gather_blocks(cache, ids, torch.zeros(3, *cache.shape[1:], dtype=cache.dtype))

    def test_blocks_past_2_31_elements_are_reached(self) -> None:
        """Field report D05: block x stride wraps in 32 bits."""
        num_blocks = 70_000
        cache = torch.zeros(num_blocks, 16, 16, 128, dtype=torch.float16, device="cuda")
        blocks = torch.tensor([0, 65_535, 65_536, num_blocks - 1], device="cuda")
        key, value = (rows.cuda() for rows in random_rows(4, 16, 128, torch.float16))
        value_cache = torch.zeros_like(cache)
        slots = blocks * 16 + 3
        reshape_and_cache(key, value, cache, value_cache, slots)
        for row, block in enumerate(blocks.tolist()):
            assert torch.equal(cache[block, :, 3], key[row])
            assert torch.equal(value_cache[block, :, 3], value[row])
        assert int((cache.view(torch.int64).view(num_blocks, -1) != 0).any(1).sum()) == 4
        staging = torch.empty(4, 16, 16, 128, dtype=torch.float16, device="cuda")
        gather_blocks(cache, blocks, staging)
        assert torch.equal(staging, torch.stack([cache[block] for block in blocks.tolist()]))
        copy_blocks(cache, torch.tensor([[num_blocks - 1, 7], [65_536, num_blocks - 2]], device="cuda"))
        assert torch.equal(cache[7], cache[num_blocks - 1])
        assert torch.equal(cache[num_blocks - 2], cache[65_536])
        scatter_blocks(torch.ones_like(staging), blocks, cache)
        assert bool((cache[num_blocks - 1] == 1).all())
        assert int((cache.view(torch.int64).view(num_blocks, -1) != 0).any(1).sum()) == 6

    def test_nothing_waits_for_the_gpu(self) -> None:
        cache = engine_cache(8).cuda()
        ids = torch.tensor([1, 2], device="cuda")
        staging = torch.empty(2, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        rows = torch.zeros(2, 2, 64, dtype=torch.bfloat16, device="cuda")
        pairs = torch.tensor([[0, 1]], device="cuda")
        for attempt in range(2):  # the first one builds and allocates
            torch.cuda.set_sync_debug_mode("error" if attempt else "default")
            try:
                gather_blocks(cache, ids, staging)
                scatter_blocks(staging, ids, cache)
                copy_blocks(cache, pairs)
                reshape_and_cache(rows, rows, cache[:, 0, 0], cache[:, 0, 1], ids, "auto")
            finally:
                torch.cuda.set_sync_debug_mode("default")
