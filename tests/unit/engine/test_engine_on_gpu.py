"""The engine on an NVIDIA GPU against the same engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_core import VARIANTS, engine_for, greedy
from tiny_models import with_changes, write_tiny_hf

from shared.engine.weights import load_weights
from shared.errors import ConfigurationError
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
PROMPTS = [[(7 * i + 3 * j) % 200 for j in range(length)] for i, length in enumerate((1, 3, 4, 5, 8, 13, 30, 97))]


def gpu_source(directory: Path, **changes: Any) -> ModelSource:
    """Head size 32, the smallest with GPU kernels."""
    config_changes, file_changes = changes.pop("variant", ({}, {}))
    # The file states head_dim, else it would be hidden_size / num_heads.
    write_tiny_hf(directory, with_changes(head_dim=32, **config_changes, **changes), head_dim=32, **file_changes)
    return resolve_model(str(directory))


def on(device: str, source: ModelSource, **settings: Any) -> Any:
    return engine_for(source, **{"device": device, "dtype": "float32", "block_size": 16, "max_num_batched_tokens": 19, **settings})


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_of_every_variant_equal_the_cpus_in_fp32(tmp_path: Path, name: str) -> None:
    source = gpu_source(tmp_path, variant=VARIANTS[name])
    expected, cpu_logits = greedy(on("cpu", source), PROMPTS, 12)
    answers, gpu_logits = greedy(on("cuda", source), PROMPTS, 12)
    assert answers == expected
    for rows, expected_rows in zip(gpu_logits, cpu_logits, strict=True):
        torch.testing.assert_close(rows.cpu(), expected_rows, atol=1e-4, rtol=1e-4)


def test_a_small_pool_preempts_and_answers_the_same(tmp_path: Path) -> None:
    source = gpu_source(tmp_path)
    prompts = [[i + 1] * 33 for i in range(6)]
    roomy, _ = greedy(on("cuda", source), prompts, 24)
    engine = on("cuda", source, num_blocks=15)
    tight, _ = greedy(engine, prompts, 24)
    assert engine.scheduler.num_preemptions > 0
    assert tight == roomy
    assert engine.manager.num_used() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sixteen_bit_decode_and_chunk_kernels_together_stay_near_fp32(tmp_path: Path, dtype: str, head_dim: int) -> None:
    write_tiny_hf(tmp_path, with_changes(head_dim=head_dim, num_heads=8, num_kv_heads=2), head_dim=head_dim)
    source = resolve_model(str(tmp_path))
    expected, exact = greedy(on("cpu", source), PROMPTS, 6)
    forced = on("cuda", source, dtype=dtype)
    # The exact answers are fed, so that one near tie does not put all later rows on another text.
    requests = [
        Request(f"{i}", list(prompt), arrival_s=float(i), deadline_at_s=1e9, sampling=SamplingParams(max_tokens=6))
        for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        forced.scheduler.add(request)
    while (output := forced.schedule()) is not None:
        result = forced.run(output)
        for request, row in zip(result.completed(), forced.runner.compute_logits(result.hidden), strict=True):
            number = int(request.request_id)
            position = request.num_output_tokens
            torch.testing.assert_close(row.cpu(), exact[number][position], atol=0.25, rtol=0.1)
            request.token_ids.append(expected[number][position])
            if request.num_output_tokens == 6:
                forced.scheduler.remove(request.request_id)


def test_auto_takes_the_gpu_in_bf16_and_leaves_it_where_no_kernel_fits(tmp_path: Path) -> None:
    source = gpu_source(tmp_path)
    engine = engine_for(source, block_size=16)
    assert (engine.device.type, engine.dtype) == ("cuda", torch.bfloat16)
    assert engine_for(source, block_size=4).device.type == "cpu"
    with pytest.raises(ConfigurationError, match="PAGEWIRE_BLOCK_SIZE"):
        on("cuda", source, block_size=4)


def test_a_cache_larger_than_the_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="NUM_BLOCKS"):
        on("cuda", gpu_source(tmp_path), num_blocks=10**9)


def test_groups_of_layers_are_final_when_they_are_reported(tmp_path: Path) -> None:
    source = gpu_source(tmp_path, num_layers=6, hidden_size=2048, intermediate_size=4096, max_model_len=4096)
    engine = on("cuda", source, dtype="bfloat16", max_num_batched_tokens=2048, kv_layer_groups=3, num_blocks=256)
    engine.scheduler.add(Request("r", [(3 * i) % 200 for i in range(2048)], arrival_s=0.0, deadline_at_s=1e9))
    output = engine.schedule()
    blocks, side, seen = torch.tensor(engine.manager.block_ids("r")), torch.cuda.Stream(), []

    def listen(start: int, count: int) -> None:
        with torch.cuda.stream(side):  # which does not wait for the engine's stream
            seen.append((start, count, engine.cache.tensor[blocks.cuda(), start : start + count].cpu()))

    engine.run(output, listen)
    assert [(start, count) for start, count, _ in seen] == [(0, 2), (2, 2), (4, 2)]
    for start, count, then in seen:
        assert bool(then.any())
        assert torch.equal(engine.cache.tensor[blocks.cuda(), start : start + count].cpu(), then)


def test_dummy_weights_are_the_same_on_both_devices(tmp_path: Path) -> None:
    gpu_source(tmp_path)
    source = resolve_model(str(tmp_path), "dummy")
    on_cpu, on_gpu = (load_weights(source, torch.bfloat16, device) for device in ("cpu", "cuda"))
    assert all(torch.equal(on_cpu[name], on_gpu[name].cpu()) for name in on_cpu)
