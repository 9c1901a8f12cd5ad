"""Random weights for measurements: the same for every worker, and sane numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_engine_core import engine_for, greedy
from tiny_models import tiny_hf_config, tiny_tokenizer_json, write_tiny_hf

from shared.engine.dummy_weights import dummy_weight
from shared.engine.weights import load_weights
from shared.errors import ModelLoadError
from shared.model_files.model_source import resolve_model
from shared.model_files.weight_names import ExpectedWeight


def write_config_only(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(tiny_hf_config()))
    (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))


def test_a_directory_without_weights_runs_and_two_workers_agree(tmp_path: Path) -> None:
    write_config_only(tmp_path)
    with pytest.raises(ModelLoadError, match="safetensors"):
        resolve_model(str(tmp_path))
    source = resolve_model(str(tmp_path), "dummy")
    answers = [greedy(engine_for(source), [[5, 6, 7, 8, 9]], 4)[0] for _ in range(2)]
    assert answers[0] == answers[1]


def test_its_fingerprint_is_not_that_of_a_model_with_weights(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    assert resolve_model(str(tmp_path), "dummy").fingerprint != resolve_model(str(tmp_path)).fingerprint


def test_weights_are_spread_about_zero_and_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    write_config_only(tmp_path)
    weights = load_weights(resolve_model(str(tmp_path), "dummy"), torch.float32, "cpu")
    gate, up = weights["model.layers.0.mlp.gate_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    assert abs(float(gate.mean())) < 0.002
    assert abs(float(gate.std()) - 0.02) < 0.002
    assert abs(float(torch.corrcoef(torch.stack([gate.flatten(), up.flatten()]))[0, 1])) < 0.05
    assert bool((weights["model.norm.weight"] == 1).all())


@pytest.mark.parametrize("place", [0, 1, (1 << 18) - 1, 1 << 18, 3 * (1 << 18) + 4711])
def test_each_number_is_a_hash_of_its_place_alone(place: int) -> None:
    """Whatever the device and however much is computed at a time."""
    expected, seed = ExpectedWeight("model.layers.0.mlp.up_proj.weight", "", (1000, 1000)), 17
    bits = (place + (seed + 1) * 0x85EBCA6B) % 2**32
    for shift in (16, 15, 16):
        bits = (bits ^ (bits >> shift)) * 0x9E3779B1 % 2**32
    bound = 3**0.5 * 0.02
    found = float(dummy_weight(expected, seed, torch.float32, torch.device("cpu")).view(-1)[place])
    assert found == pytest.approx((bits >> 8) * 2 * bound / 2**24 - bound, abs=1e-8)


def test_what_is_no_directory_with_a_configuration_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve_model("smollm2", "dummy")
