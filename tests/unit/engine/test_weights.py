from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import TINY_CONFIG, tiny_weights, with_changes, write_tiny_gguf, write_tiny_hf

import shared.engine.weights
from shared.engine.layers.linear import Weights, take_linear
from shared.engine.reference_model import forward, rotary_frequencies, rotate
from shared.engine.weights import load_weights
from shared.errors import ModelLoadError
from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from shared.model_files.model_source import resolve_model
from shared.model_files.weight_reader import read_weight, start_loading

BIASED = with_changes(attention_bias=True, attention_output_bias=True, mlp_bias=True)


@pytest.mark.parametrize("config", [TINY_CONFIG, BIASED, with_changes(tie_word_embeddings=True)], ids=["plain", "biased", "tied"])
def test_gguf_and_safetensors_give_the_same_model(tmp_path: Path, config: ModelConfig) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", config)
    write_tiny_hf(tmp_path / "hf", config, num_files=2)
    sources = [resolve_model(str(tmp_path / "m.gguf")), resolve_model(str(tmp_path / "hf"))]
    loaded = [load_weights(source, torch.float32, "cpu") for source in sources]
    assert loaded[0].keys() == loaded[1].keys() == tiny_weights(config).keys()
    assert ("lm_head.weight" in loaded[0]) is not config.tie_word_embeddings
    logits = [forward(weights, source.config, [1, 5, 9, 40]) for weights, source in zip(loaded, sources, strict=True)]
    assert logits[0].shape == (4, config.vocab_size)
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_every_stored_type_becomes_the_wanted_one(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    write_tiny_hf(tmp_path)
    originals = {name: torch.from_numpy(array).to(stored) for name, array in tiny_weights().items()}
    save_file(originals, tmp_path / "model.safetensors")
    seen: list[float] = []
    weights = load_weights(resolve_model(str(tmp_path)), dtype, "cpu", seen.append)
    assert all(torch.equal(weights[name], original.to(dtype)) for name, original in originals.items())
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_pending_float32_weights_are_wrapped_without_a_copy(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    source = resolve_model(str(tmp_path / "m.gguf"))
    pending = start_loading(source)
    arrays = pending.result()
    pending._arrays = dict(arrays)  # results are handed over once; put them back to see where they go
    weights = load_weights(source, torch.float32, "cpu", pending=pending)
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == {name: array.ctypes.data for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_of_one_input_are_read_to_where_the_layer_wants_them(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tiny_hf(tmp_path, BIASED, num_files=3, attention_bias=True, mlp_bias=True)
    weights = Weights(load_weights(resolve_model(str(tmp_path)), dtype, "cpu"))
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    parts = [weights[f"{name}.weight"] for name in names]
    expected, address = torch.cat(parts), parts[0].data_ptr()
    joined = take_linear(weights, names)
    assert torch.equal(joined.weight, expected) and joined.weight.data_ptr() == address
    apart = Weights({f"{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)})
    assert torch.equal(take_linear(apart, names).weight, expected)
    swapped = Weights({f"{name}.weight": part for name, part in zip(names, parts, strict=True)})
    assert torch.equal(take_linear(swapped, names[::-1]).weight, torch.cat(parts[::-1]))


def test_model_larger_than_memory_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(shared.engine.weights, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ModelLoadError, match="needs"):
        load_weights(resolve_model(str(tmp_path / "m.gguf")), torch.bfloat16, "cpu")


def test_smollm2_q_and_k_use_their_own_head_counts() -> None:
    """Layer 0's q and k rows, rotated in half-split form, equal GGUF's own rows rotated as neighbours, at positions 0, 1 and 100."""
    source = resolve_model("smollm2")
    pairs = {expected.name: stored for expected, stored in source.weights()}
    from_half_split = {}
    hidden = np.random.default_rng(0).normal(size=source.config.hidden_size).astype(np.float32)
    for kind, num_heads in (("q", 9), ("k", 3)):
        name = f"model.layers.0.self_attn.{kind}_proj.weight"
        expected = next(weight for weight, _ in source.weights() if weight.name == name)
        half_split = torch.from_numpy(read_weight(source, expected, pairs[name]) @ hidden)
        stored = pairs[name]
        raw = gguf.dequantize(stored.data.reshape(stored.shape[0], -1), gguf.GGMLQuantizationType[stored.type_name])
        neighbours = torch.from_numpy(raw.astype(np.float32) @ hidden).view(num_heads, 32, 2)
        for position in (0, 1, 100):
            angles = position * rotary_frequencies(source.config)
            rotated = rotate(half_split.view(1, num_heads, 64), angles[None])[0]
            cos, sin = angles.cos(), angles.sin()
            first, second = neighbours.unbind(-1)
            by_neighbours = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
            torch.testing.assert_close(rotated, by_neighbours.transpose(1, 2).reshape(num_heads, 64))
        from_half_split[kind] = half_split
    assert from_half_split["q"].shape == (576,) and from_half_split["k"].shape == (192,)


def test_rope_scalings_follow_their_published_rules() -> None:
    plain = rotary_frequencies(TINY_CONFIG)
    torch.testing.assert_close(rotary_frequencies(with_changes(rope_scaling=LinearRopeScaling(4.0))), plain / 4)
    scaled = rotary_frequencies(with_changes(rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64)))
    turns = 64 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4]) and (turns > 4).any()
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    divisors = tuple(float(n) for n in range(1, 9))
    torch.testing.assert_close(rotary_frequencies(with_changes(rope_freq_factors=divisors)), plain / torch.tensor(divisors))
