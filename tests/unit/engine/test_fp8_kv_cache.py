"""A KV cache in FP8: what is read is what was written, from the first run on, and nobody takes it for another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import CASES, make_model, write_model
from test_engine_core import engine_for, greedy
from tiny_models import with_changes, write_tiny_hf

from kernels import reference
from services.local.stack import Stack, StackPlan
from shared.config import Settings, load_settings
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.device import select_kv_dtype
from shared.engine.kv_cache import KVCache, kv_dtype_name
from shared.engine.models.causal_lm import CausalLM
from shared.engine.models.registry import build_model
from shared.engine.rotary import RotaryTables
from shared.engine.weights import load_weights
from shared.errors import ConfigurationError
from shared.model_files.model_source import ModelSource, resolve_model
from shared.transport.protocol.kv_format import KVFormat

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
FP8 = torch.float8_e4m3fn


# ---- layers over such a cache, by the plain meaning of the kernels --------------------------------------------------------
class _PlainAttention:
    def __init__(self, length: int, start: int, block_size: int) -> None:
        self._step = ([list(range(-(-length // block_size)))], [0, length - start], [length])

    def __call__(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        return reference.paged_attention(query, key_cache, value_cache, *self._step, scale, **options)


def last_hidden(model: CausalLM, cache: KVCache, token_ids: Sequence[int], start: int = 0) -> torch.Tensor:
    """After the last of token_ids; those before `start` stand in the cache."""
    length, positions = len(token_ids), torch.arange(start, len(token_ids))
    attention: Any = _PlainAttention(length, start, cache.block_size)
    metadata = AttentionMetadata(positions, positions, torch.tensor([length - start - 1]), attention)
    with torch.inference_mode():
        return model.forward(torch.tensor(list(token_ids[start:])), metadata, cache)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "smollm3"])
def test_a_model_over_it_stays_near_and_goes_on_from_a_prefix_as_from_the_start(tmp_path: Path, name: str) -> None:
    """With and without rotary embedding, windows and soft caps."""
    write_model(make_model(CASES[name]), tmp_path)
    source = resolve_model(str(tmp_path))
    rotary = RotaryTables(source.config, source.config.max_model_len, torch.device("cpu"))
    model = build_model(
        source.config, load_weights(source, torch.float32, "cpu"), rotary
    )  # of tensors: packed layers have their own attention
    prompt = [(7 * i) % 200 for i in range(45)]
    exact, rounded, again = (KVCache(source.config, 12, 4, dtype) for dtype in (torch.float32, FP8, FP8))
    wanted, found = last_hidden(model, exact, prompt), last_hidden(model, rounded, prompt)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2
    last_hidden(model, again, prompt[:32])
    torch.testing.assert_close(last_hidden(model, again, prompt, start=32), found, atol=1e-5, rtol=1e-5)
    assert torch.equal(again.tensor.view(torch.uint8), rounded.tensor.view(torch.uint8))


# ---- what others are told -------------------------------------------------------------------------------------------------
def test_its_blocks_are_half_as_large_and_hashed_apart(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    config = resolve_model(str(tmp_path)).config
    assert 2 * KVCache(config, 2, 16, FP8).block_nbytes == KVCache(config, 2, 16, torch.bfloat16).block_nbytes
    formats = [KVFormat(kv_dtype_name(dtype), 16) for dtype in (torch.bfloat16, FP8)]
    assert formats[0].root("model") != formats[1].root("model")


def test_who_holds_fp8_sends_to_its_like_and_to_wider_types_which_lose_nothing() -> None:
    fp8, bf16, fp32 = (KVFormat(kv_dtype_name(dtype), 16) for dtype in (FP8, torch.bfloat16, torch.float32))
    assert fp8.can_send_to(fp8) and fp8.can_send_to(bf16) and fp8.can_send_to(fp32)
    assert not bf16.can_send_to(fp8)


def test_decode_workers_alone_cannot_have_it_since_nobody_could_send_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_DECODE_KV_CACHE_DTYPE", "fp8")
    with pytest.raises(ConfigurationError, match="kv_cache_dtype fp8 for decode alone"):
        Stack(StackPlan(load_settings("router"), 1, 1, None, is_json=True))._check_roles_agree()
    Stack(StackPlan(load_settings("router"), 0, 1, None, is_json=True))._check_roles_agree()  # computes its prompts itself
    monkeypatch.setenv("PAGEWIRE_PREFILL_KV_CACHE_DTYPE", "fp8")
    Stack(StackPlan(load_settings("router"), 1, 1, None, is_json=True))._check_roles_agree()


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "cuda")])
def test_where_no_kernel_reads_it_it_is_refused(dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_dtype"):
        select_kv_dtype(Settings(kv_cache_dtype="fp8"), dtype, torch.device(device))
    assert select_kv_dtype(Settings(), dtype, torch.device(device)) is dtype


def test_an_engine_on_the_cpu_says_so(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype.*NVIDIA"):
        engine_for(resolve_model(str(tmp_path)), device="cpu", kv_cache_dtype="fp8")


# ---- engines on a GPU -----------------------------------------------------------------------------------------------------
@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    config = with_changes(head_dim=64, num_heads=8, num_kv_heads=2, max_model_len=2048)
    write_tiny_hf(tmp_path, config, head_dim=64)
    return resolve_model(str(tmp_path))


def on_gpu(source: ModelSource, **settings: Any) -> Any:
    defaults = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 512, "num_blocks": 256}
    return engine_for(source, **{**defaults, "kv_cache_dtype": "fp8", **settings})


PROMPTS = [[(7 * i + 3 * j) % 200 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 97, 300, 700))]


@pytest.mark.parametrize("enforce_eager", [pytest.param(False, marks=GPU, id="graphs"), pytest.param(True, marks=GPU, id="eager")])
def test_an_engine_over_it_stays_near_one_over_its_own_type(source: ModelSource, enforce_eager: bool) -> None:
    _, wanted = greedy(on_gpu(source, kv_cache_dtype="auto", enforce_eager=True), PROMPTS, 1)
    engine = on_gpu(source, enforce_eager=enforce_eager)
    assert engine.cache.tensor.dtype is FP8
    _, found = greedy(engine, PROMPTS, 1)
    for rows, wanted_rows in zip(found, wanted, strict=True):
        assert float((rows - wanted_rows).norm() / wanted_rows.norm()) < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_prompt_whose_prefix_is_cached_answers_as_it_did_at_first(source: ModelSource) -> None:
    engine = on_gpu(source)
    first, logits = greedy(engine, PROMPTS, 8)
    hits = engine.manager.num_hit_tokens
    again, logits_again = greedy(engine, PROMPTS, 8)
    assert engine.manager.num_hit_tokens > hits
    assert again == first
    for rows, rows_again in zip(logits, logits_again, strict=True):
        torch.testing.assert_close(rows_again, rows, atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_small_pool_preempts_and_copied_blocks_are_the_same(source: ModelSource) -> None:
    prompts = [[i + 1] * 33 for i in range(6)]
    roomy, _ = greedy(on_gpu(source), prompts, 24)
    tight_engine = on_gpu(source, num_blocks=15)
    tight, _ = greedy(tight_engine, prompts, 24)
    assert tight_engine.scheduler.num_preemptions > 0
    assert tight == roomy
    cache = tight_engine.cache
    cache.copy_block(3, 5)
    assert torch.equal(cache.tensor[5].view(torch.uint8), cache.tensor[3].view(torch.uint8))
