"""How many KV blocks a GPU has room for."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_core import engine_for, greedy
from test_engine_on_gpu import gpu_source
from tiny_models import write_tiny_hf

from shared.config import Settings
from shared.engine.kv_cache import KVCache
from shared.engine.memory_profile import GRAPHS_NBYTES, PROCESS_NBYTES, PROFILE_NUM_BLOCKS, MemoryProfile, largest_step
from shared.engine.model_runner import ModelRunner
from shared.errors import ConfigurationError
from shared.model_files.model_source import resolve_model

GIB = 1 << 30
LLAMA_8B_ON_H200 = MemoryProfile(140 * GIB, 124 * GIB, 15 * GIB, 1 * GIB)
BLOCK_NBYTES = 2 << 20


def test_what_weights_and_the_largest_step_leave_of_the_share_is_for_blocks() -> None:
    kept = PROCESS_NBYTES + GRAPHS_NBYTES
    assert LLAMA_8B_ON_H200.num_blocks(BLOCK_NBYTES, 0.9, 1) == (126 * GIB - 16 * GIB - kept) // BLOCK_NBYTES


def test_two_workers_of_one_gpu_fit_into_it_together() -> None:
    num_blocks = LLAMA_8B_ON_H200.num_blocks(BLOCK_NBYTES, 0.9, 2)
    assert num_blocks == (63 * GIB - 16 * GIB - PROCESS_NBYTES - GRAPHS_NBYTES) // BLOCK_NBYTES
    assert 2 * (num_blocks * BLOCK_NBYTES + 16 * GIB + PROCESS_NBYTES + GRAPHS_NBYTES) <= 126 * GIB


def test_what_another_program_holds_is_not_promised(caplog: pytest.LogCaptureFixture) -> None:
    crowded = MemoryProfile(140 * GIB, 40 * GIB, 15 * GIB, 1 * GIB)
    with caplog.at_level(logging.WARNING):
        assert crowded.num_blocks(BLOCK_NBYTES, 0.9, 1) == (39 * GIB - GRAPHS_NBYTES) // BLOCK_NBYTES
    assert "another program" in caplog.text


@pytest.mark.parametrize(
    "profile", [MemoryProfile(16 * GIB, 1 * GIB, 15 * GIB, GIB // 4), MemoryProfile(24 * GIB, 8 * GIB, 15 * GIB, 5 * GIB)]
)
def test_no_room_names_the_settings_that_would_make_some(profile: MemoryProfile) -> None:
    with pytest.raises(ConfigurationError, match=r"GPU_MEMORY_UTILIZATION.*MAX_NUM_BATCHED_TOKENS.*MAX_NUM_SEQS"):
        profile.num_blocks(BLOCK_NBYTES, 0.9, 1)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs", "max_model_len"), [(2048, 64, 8192), (2048, 1, 8192), (7, 64, 256), (512, 8, 100), (1, 1, 2)]
)
def test_the_largest_step_has_as_many_tokens_and_rows_as_a_step_may_have(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    step = largest_step(max_num_batched_tokens, max_num_seqs, max_model_len, 16)
    lengths = [end - start for start, end in zip(step.starts, step.ends, strict=True)]
    assert sum(lengths) == len(step.token_ids) == max_num_batched_tokens
    assert len(step.hidden_rows) == min(max_num_seqs, max_num_batched_tokens)
    assert all(0 <= start < end <= max_model_len for start, end in zip(step.starts, step.ends, strict=True))
    num_decode = len(step.hidden_rows) - 1
    assert lengths[:num_decode] == [1] * num_decode, "requests of one token stand in front"
    assert step.ends[:num_decode] == [max_model_len] * num_decode
    assert all(len(table) * 16 >= end and set(table) == {0} for table, end in zip(step.block_tables, step.ends, strict=True))


def test_the_largest_step_runs_on_the_cache_of_the_profile(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    engine = engine_for(resolve_model(str(tmp_path)))
    cache = KVCache(engine.config, PROFILE_NUM_BLOCKS, 4, torch.float32)
    hidden = ModelRunner(engine.runner.model, cache).forward(largest_step(300, 5, 256, 4))
    assert hidden.shape == (5, engine.config.hidden_size)
    assert bool(hidden.isfinite().all())


@pytest.mark.parametrize(
    ("device", "settings", "asked"),
    [
        ("cuda", {}, False),
        ("cuda", {"num_blocks": 77}, True),
        ("cuda", {"kv_cache_gib": 0.25}, True),
        ("cpu", {}, True),
        ("cpu", {"kv_cache_gib": 0.25}, True),
    ],
)
def test_only_a_gpu_whose_engine_is_told_no_number_is_profiled(tmp_path: Path, device: str, settings: dict[str, Any], asked: bool) -> None:
    write_tiny_hf(tmp_path)
    engine = engine_for(resolve_model(str(tmp_path)))
    engine.device, engine.settings = torch.device(device), Settings(block_size=4, **settings)
    num_blocks = engine._asked_num_blocks()
    assert (num_blocks is not None) is asked
    if asked:
        nbytes = settings.get("kv_cache_gib", 2.0) * GIB
        assert num_blocks == settings.get("num_blocks", int(nbytes) // engine.cache.block_nbytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_an_engine_told_nothing_takes_its_share_of_the_gpu_and_answers_as_ever(tmp_path: Path) -> None:
    source = gpu_source(tmp_path)
    small = {"device": "cuda", "dtype": "float32", "block_size": 16}
    prompts = [[5, 6, 7, 8, 9], list(range(40))]
    expected, _ = greedy(engine_for(source, **small), prompts, 8)
    total = torch.cuda.mem_get_info()[1]
    # Blocks of a model this small would be millions.
    share = (4 * GIB) / total
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    engine = engine_for(source, **small, num_blocks=None, gpu_memory_utilization=share, debug=False)
    assert torch.cuda.memory_reserved() - before < 4 * GIB
    num_blocks = len(engine.manager.pool.blocks)
    assert GIB < num_blocks * engine.cache.block_nbytes < 4 * GIB
    assert engine.max_model_len == source.config.max_model_len
    assert greedy(engine, prompts, 8)[0] == expected
    del engine  # what this process holds counts as the next one's weights
    gc.collect()
    half = engine_for(source, **small, num_blocks=None, gpu_memory_utilization=share * 1.5, num_gpu_workers=2, debug=False)
    assert len(half.manager.pool.blocks) < num_blocks
    with pytest.raises(ConfigurationError, match="GPU_MEMORY_UTILIZATION"):
        engine_for(source, **small, num_blocks=None, gpu_memory_utilization=0.001)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_gpu_is_chosen_by_its_number(tmp_path: Path) -> None:
    source = gpu_source(tmp_path)
    last = torch.cuda.device_count() - 1
    try:
        engine = engine_for(source, device=f"cuda:{last}", dtype="float32", block_size=16)
        assert (engine.device, torch.cuda.current_device()) == (torch.device("cuda", last), last)
        assert greedy(engine, [[5, 6, 7, 8, 9]], 4)[0] == greedy(engine_for(source, device="cpu", block_size=16), [[5, 6, 7, 8, 9]], 4)[0]
    finally:
        torch.cuda.set_device(0)
    with pytest.raises(ConfigurationError, match="GPUs here"):
        engine_for(source, device="cuda:99", block_size=16)
