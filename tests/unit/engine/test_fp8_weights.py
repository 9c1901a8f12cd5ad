"""Weights in FP8: what they are worth, what they weigh, and what they do not go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_models import CASES, make_model, write_model
from test_engine_core import engine_for, greedy
from tiny_models import with_changes, write_tiny_hf

from kernels.quantize_rows import quantize_rows
from services.local.stack import Stack, StackPlan
from shared.config import load_settings
from shared.engine.layers.fp8_linear import FP8Linear, FP8Weight
from shared.engine.layers.linear import Weights, take_linear
from shared.engine.models.registry import build_model
from shared.engine.rotary import RotaryTables
from shared.engine.tensor_parallel.sharding import Shard
from shared.engine.weights import load_weights
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_files import model_source
from shared.model_files.model_source import ModelSource, resolve_model

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
PROMPTS = [[(7 * i + 3 * j) % 200 for j in range(length)] for i, length in enumerate((1, 5, 30, 97))]


def weight_of(out_features: int, in_features: int, seed: int = 0, **kind: Any) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)).to(**kind) * 0.05


def expanded(source: ModelSource, dtype: torch.dtype = torch.float32) -> Weights:
    """The values that an FP8 engine computes with, as tensors of `dtype`."""
    weights = load_weights(source, dtype, "cpu", quantization="fp8")
    assert weights.fp8
    return Weights({**weights, **{name: weight.expanded(dtype) for name, weight in weights.fp8.items()}})


# ---- a layer --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_without_fp8_products_computes_with_the_expanded_weights(dtype: torch.dtype) -> None:
    weight, bias = weight_of(96, 64), torch.randn(96).to(dtype)
    fp8 = FP8Weight(*quantize_rows(weight))
    x = torch.randn(7, 64).to(dtype)
    assert torch.equal(FP8Linear(fp8, bias)(x), F.linear(x, fp8.expanded(dtype), bias))
    exact = F.linear(x.double(), weight.double(), bias.double())
    error = (FP8Linear(fp8, bias)(x).double() - exact).norm() / exact.norm()
    assert error < 0.04


def test_projections_of_one_input_are_one_layer_with_a_factor_for_each_output() -> None:
    parts = [weight_of(48, 64, 1), weight_of(16, 64, 2) * 100, weight_of(16, 64, 3)]
    fp8 = {f"p{i}.weight": FP8Weight(*quantize_rows(part)) for i, part in enumerate(parts)}
    weights = Weights({f"p{i}.bias": torch.full((len(part),), float(i)) for i, part in enumerate(parts)}, fp8=fp8)
    layer = take_linear(weights, ["p0", "p1", "p2"])
    assert weights.names == []
    x = torch.randn(5, 64)
    wanted = torch.cat([F.linear(x, one.expanded(torch.float32)) + i for i, one in enumerate(fp8.values())], dim=1)
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("sizes", [(4096, 4096), (576, 1536), (14336, 4096)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 128, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU with FP8 products")
def test_fp8_products_are_near_those_of_the_expanded_weights(sizes: tuple[int, int], num_tokens: int, has_bias: bool) -> None:
    out_features, in_features = sizes
    fp8 = FP8Weight(*quantize_rows(weight_of(out_features, in_features, device="cuda", dtype=torch.bfloat16)))
    assert fp8.is_multiplied_in_fp8
    bias = torch.randn(out_features, device="cuda", dtype=torch.bfloat16) if has_bias else None
    x = (
        torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-2, 2, num_tokens, device="cuda")[:, None]
    )
    x = x.bfloat16()
    out = FP8Linear(fp8, bias)(x)
    assert (out.dtype, out.shape) == (torch.bfloat16, (num_tokens, out_features))
    values, factors = quantize_rows(x)
    same_values = (values.double() * factors) @ (fp8.values.double() * fp8.factors).t() + (0 if bias is None else bias.double())
    # The tensor cores round their partial sums; a row's own size is what that is small against.
    allowed = 0.02 * same_values.abs() + 0.02 * same_values.square().mean(1, keepdim=True).sqrt()
    assert bool(((out.double() - same_values).abs() <= allowed).all())
    exact = x.double() @ (fp8.values.double() * fp8.factors).t() + (0 if bias is None else bias.double())
    assert bool(((out.double() - exact).norm(dim=1) / exact.norm(dim=1) < 0.05).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU with FP8 products")
def test_fp8_products_can_be_captured_in_a_cuda_graph() -> None:
    layer = FP8Linear(FP8Weight(*quantize_rows(weight_of(256, 512, device="cuda", dtype=torch.bfloat16))))
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(torch.randn(8, 512))
    graph.replay()
    assert torch.equal(out, layer(x))


# ---- a model --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3", "mixtral"])
def test_an_engine_answers_as_one_with_the_expanded_weights(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    write_model(make_model(case), tmp_path)
    source = resolve_model(str(tmp_path), max_model_len=case.max_model_len)
    found, logits = greedy(engine_for(source, num_blocks=200, quantization="fp8"), PROMPTS, 6)
    plain = engine_for(source, num_blocks=200, cpu_weights="fp32")
    rotary = RotaryTables(source.config, plain.max_model_len, torch.device("cpu"))
    plain.runner.model = build_model(source.config, expanded(source), rotary)
    expected, wanted = greedy(plain, PROMPTS, 6)
    assert found == expected
    for rows, wanted_rows in zip(logits, wanted, strict=True):
        torch.testing.assert_close(rows, wanted_rows, atol=1e-4, rtol=1e-4)


def test_embedding_head_norms_and_routers_keep_the_engines_type(tmp_path: Path) -> None:
    write_model(make_model(CASES["mixtral"]), tmp_path)
    weights = load_weights(resolve_model(str(tmp_path)), torch.bfloat16, "cpu", quantization="fp8")
    kept = {name.replace(".0.", ".N.").replace(".1.", ".N.") for name in weights}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.N.block_sparse_moe.gate.weight"} <= kept
    assert not any(name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")) for name in kept)
    assert all(weight.dtype is torch.bfloat16 for weight in weights.values())
    assert all(weight.values.dtype is torch.float8_e4m3fn for weight in weights.fp8.values())


def test_projections_of_one_input_stand_side_by_side_so_that_they_are_one_without_a_copy(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    weights = load_weights(resolve_model(str(tmp_path)), torch.float32, "cpu", quantization="fp8")
    parts = [weights.fp8[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert FP8Weight.joined(parts).values.untyped_storage().data_ptr() == parts[0].values.untyped_storage().data_ptr()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_hold_parts_of_the_weights_that_one_rank_holds(tmp_path: Path, load_format: Any) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path), load_format)
    whole = load_weights(source, torch.float32, "cpu", quantization="fp8").fp8
    for rank in range(2):
        shard = Shard(rank, 2)
        parts = load_weights(source, torch.float32, "cpu", shard=shard, quantization="fp8").fp8
        assert parts.keys() == whole.keys()
        for name, part in parts.items():
            expected = shard.part_of(name, whole[name].expanded(torch.float32), source.config)
            assert torch.equal(part.expanded(torch.float32), expected), name


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_matrices_of_layers_take_a_byte_an_item_and_never_stand_twice(
    tmp_path: Path, load_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told to the launcher and checked against free memory is what is taken."""
    write_tiny_hf(tmp_path, with_changes(num_layers=8, intermediate_size=256))
    source = resolve_model(str(tmp_path), load_format)
    weights = load_weights(source, torch.bfloat16, "cpu", quantization="fp8")
    values_nbytes = sum(weight.nbytes for weight in weights.values()) + sum(weight.values.nbytes for weight in weights.fp8.values())
    assert values_nbytes == source.num_weight_bytes(2, "fp8")
    assert source.num_weight_bytes(2, "fp8") < 0.7 * source.num_weight_bytes(2)
    factors_nbytes = sum(weight.factors.nbytes for weight in weights.fp8.values())
    assert factors_nbytes < 0.05 * values_nbytes
    monkeypatch.setattr("shared.engine.weights.available_bytes", lambda _device: source.num_weight_bytes(2) - 1)
    load_weights(source, torch.bfloat16, "cpu", quantization="fp8")
    with pytest.raises(ModelLoadError):
        load_weights(source, torch.bfloat16, "cpu")


def test_its_blocks_are_none_of_the_unquantised_models(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path))
    quantized = source.with_quantization("fp8")
    assert source.with_quantization(None).fingerprint == source.fingerprint
    fingerprints = {source.fingerprint, quantized.fingerprint, source.with_cpu_weights("fp16").fingerprint}
    assert len(fingerprints) == 3
    assert engine_for(quantized, quantization="fp8").root != engine_for(source).root


@pytest.mark.long
def test_the_packaged_model_still_counts_and_knows_the_alphabet() -> None:
    engine = engine_for(
        resolve_model(model_source.PACKAGED_MODEL), num_blocks=20, block_size=16, quantization="fp8", max_num_batched_tokens=64
    )
    counting = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
    alphabet = [4590, 314, 260, 2321, 12567, 42, 17638]
    answers, _ = greedy(engine, [counting, alphabet], 12)
    assert answers[0] == [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]
    assert answers[1][:3] == [33203, 23960, 57]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU with FP8 products")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_engine_that_multiplies_in_fp8_stays_near_one_that_expands(tmp_path: Path, enforce_eager: bool) -> None:
    write_tiny_hf(tmp_path, with_changes(head_dim=64, num_heads=8, num_kv_heads=2), head_dim=64)
    source = resolve_model(str(tmp_path))
    on_gpu = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 256}
    _, wanted = greedy(engine_for(source, device="cpu", block_size=16, quantization="fp8"), PROMPTS, 1)
    engine = engine_for(source, **on_gpu, enforce_eager=enforce_eager, quantization="fp8")
    answers, found = greedy(engine, PROMPTS, 6)
    for rows, wanted_rows in zip(found, wanted, strict=True):
        assert float((rows[0].cpu() - wanted_rows[0]).norm() / wanted_rows[0].norm()) < 0.1
    again, _ = greedy(engine, PROMPTS, 6)
    assert [answer[0] for answer in again] == [answer[0] for answer in answers]


# ---- what it does not go with ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cpu_weights", ["stored", "fp16", "fp32"])
def test_two_ways_to_hold_weights_are_refused(tmp_path: Path, cpu_weights: str) -> None:
    write_tiny_hf(tmp_path)
    with pytest.raises(ConfigurationError, match=r"cpu_weights.*quantization"):
        engine_for(resolve_model(str(tmp_path)), quantization="fp8", cpu_weights=cpu_weights)


def test_an_unknown_quantization_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigurationError, match="quantization"):
        load_settings("decode", {"PAGEWIRE_QUANTIZATION": "int3"})


def test_one_role_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_DECODE_QUANTIZATION", "fp8")
    with pytest.raises(ConfigurationError, match="quantization must be the same"):
        Stack(StackPlan(load_settings("router"), 1, 1, None, is_json=True))._check_roles_agree()
    for_all = load_settings("router", quantization="fp8")  # as an option of the command
    Stack(StackPlan(for_all, 1, 1, None, is_json=True))._check_roles_agree()
