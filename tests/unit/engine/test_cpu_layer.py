"""A decoder layer in one call of the CPU's kernels, beside the same kernels called one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_CONFIG, with_changes, write_tiny_hf

from kernels.build import find_cxx
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.kv_cache import KVCache
from shared.engine.layers.cpu_layer import CPULayer
from shared.engine.models.registry import build_model
from shared.engine.rotary import RotaryTables
from shared.engine.step_input import StepInput
from shared.engine.weights import load_for_cpu
from shared.model_files.model_config import ModelConfig
from shared.model_files.model_source import resolve_model

pytestmark = pytest.mark.skipif(find_cxx() is None, reason="no C++ compiler")

BLOCK_SIZE, NUM_BLOCKS = 4, 160
CPU = torch.device("cpu")


def layer_of(folder: Path, config: ModelConfig = TINY_CONFIG, **file_changes: Any) -> CPULayer:
    write_tiny_hf(folder, config, **file_changes)
    source = resolve_model(str(folder))
    model = build_model(source.config, load_for_cpu(source, "stored"), RotaryTables(source.config, 600, CPU))
    layer = model.layers[0]
    assert isinstance(layer, CPULayer)
    return layer


def step(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    """lengths: cached and new tokens of each request."""
    tables = [list(range(i, NUM_BLOCKS, len(lengths))) for i in range(len(lengths))]
    starts, ends = [start for start, _ in lengths], [start + new for start, new in lengths]
    num_tokens = sum(new for _, new in lengths)
    return AttentionMetadata.build(StepInput([0] * num_tokens, starts, ends, tables, []), BLOCK_SIZE, TINY_CONFIG, CPU)


def new_cache() -> KVCache:
    cache = KVCache(TINY_CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def hidden(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, TINY_CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "biases": (
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.mark.parametrize("lengths", [[(37, 1)], [(0, 5)], [(3, 1), (0, 7), (90, 1)], [(20, 600 - 20)]], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_one_call_gives_the_bits_of_the_kernels_one_by_one(tmp_path: Path, name: str, lengths: list[tuple[int, int]]) -> None:
    config_changes, file_changes = VARIANTS[name]
    layer = layer_of(tmp_path, with_changes(**config_changes), **file_changes)
    metadata, num_tokens = step(lengths), sum(new for _, new in lengths)
    last = num_tokens - 1
    for rows in (None, [], [last], [last, 0, last]):
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        results = []
        for run in (layer, layer.parts):
            cache = new_cache()
            results.append((run(hidden(num_tokens), metadata, *cache.layer(0), wanted), cache.tensor))
        assert results[0][0].shape == (num_tokens if rows is None else len(rows), TINY_CONFIG.hidden_size)
        assert torch.equal(results[0][0], results[1][0]), f"rows {rows}"
        assert torch.equal(results[0][1], results[1][1]), "the cache"


def test_the_rows_that_are_wanted_are_those_of_the_whole_result(tmp_path: Path) -> None:
    layer, metadata = layer_of(tmp_path), step([(3, 9), (8, 1)])
    everything = layer(hidden(10), metadata, *new_cache().layer(0))
    some = layer(hidden(10), metadata, *new_cache().layer(0), torch.tensor([9, 2]))
    assert torch.equal(some, everything[[9, 2]])


def test_a_layer_serves_another_cache_when_it_is_given_one(tmp_path: Path) -> None:
    layer, metadata = layer_of(tmp_path), step([(8, 1)])
    first, second = new_cache(), new_cache()
    second.tensor.mul_(2)
    outputs = [layer(hidden(1), metadata, *cache.layer(0)) for cache in (first, second, first)]
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    layer, metadata, cache = layer_of(tmp_path), step([(0, 2)]), new_cache()
    for x in (hidden(3), hidden(2).double(), hidden(4)[::2]):
        with pytest.raises(ValueError, match=r"x must be|must be contiguous int64"):
            layer(x, metadata, *cache.layer(0))
    with pytest.raises(IndexError, match="rows are 0 to 1"):
        layer(hidden(2), metadata, *cache.layer(0), torch.tensor([2]))
    metadata.positions[1] = 600
    with pytest.raises(IndexError, match="position 600"):
        layer(hidden(2), metadata, *cache.layer(0))
    key_cache, value_cache = cache.layer(0)
    with pytest.raises(ValueError, match="caches must be"):
        layer(hidden(2), metadata, key_cache.half(), value_cache.half())
