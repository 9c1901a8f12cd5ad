"""Weights of an engine on the CPU: as the file has them, in fp16, in fp32, and without a C++ compiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_engine_core import engine_for, greedy
from tiny_models import TINY_CONFIG, tiny_weights, with_changes, write_tiny_gguf, write_tiny_hf

from kernels import cpu_linear
from kernels.build import find_cxx
from shared.config import Settings, load_settings
from shared.engine.engine_core import EngineCore
from shared.engine.layers.cpu_layer import CPULayer
from shared.engine.layers.linear import DenseLinear, Linear, PackedLinear
from shared.engine.reference_model import forward
from shared.engine.weights import cpu_storage, load_for_cpu, load_weights
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_files.model_source import ModelSource, resolve_model
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_names import expected_weights

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "golden_logits.json").read_text())["prompts"]
PROMPTS = [[1, 5, 9, 40, 7], [3, 4], [11] * 9]
needs_compiler = pytest.mark.skipif(find_cxx() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    return resolve_model("smollm2")


def smollm2_engine(source: ModelSource, cpu_weights: str) -> EngineCore:
    settings = {"cpu_weights": cpu_weights, "block_size": 16, "max_num_batched_tokens": 48}
    return engine_for(source.with_cpu_weights(cpu_weights), **settings)


def qkv_of(engine: EngineCore) -> Linear:
    layer = engine.runner.model.layers[0]
    return (layer.parts if isinstance(layer, CPULayer) else layer).attention.qkv


@needs_compiler
def test_golden_answers_are_the_same_in_every_mode_and_logits_close_in_those_of_the_files_values(smollm2: ModelSource) -> None:
    logits, roots = {}, {}
    for cpu_weights in ("auto", "int16", "fp32", "fp16"):
        engine = smollm2_engine(smollm2, cpu_weights)
        roots[cpu_weights], logits[cpu_weights] = engine.root, []
        for name, golden in GOLDEN.items():
            answers, rows = greedy(engine, [golden["token_ids"]], len(golden["greedy"]))
            assert answers[0] == golden["greedy"], f"{name} with {cpu_weights}"
            logits[cpu_weights].append(rows[0])
    for ours, rounded, exact in zip(logits["auto"], logits["int16"], logits["fp32"], strict=True):
        torch.testing.assert_close(ours, exact, atol=3e-4, rtol=0)
        torch.testing.assert_close(rounded, exact, atol=0.02, rtol=0)
        assert float((rounded - exact).square().mean().sqrt()) < 0.003
    assert roots["int16"] == roots["fp32"] == roots["auto"], "one may use the other's KV"
    assert not torch.equal(logits["fp16"][0], logits["auto"][0])
    assert roots["fp16"] != roots["auto"], "KV of other weights must not pass for the file's"


@needs_compiler
@pytest.mark.long
def test_rounded_inputs_hardly_ever_change_a_word(smollm2: ModelSource) -> None:
    tokenizer = smollm2.load_tokenizer()
    beginnings = [
        "The history of the steam engine begins", "Once upon a time in a village", "def fibonacci(n):\n", "The three primary colours are",
        "Water boils at", "My favourite recipe for bread is", "In the year 1969,", "Dear Sir or Madam,", "The mitochondria is",
        "To install Python on Windows,", "A prime number is", "The quick brown fox", "Question: What is gravity?\nAnswer:",
        "SELECT name FROM", "The river flowed past", "Photosynthesis converts", "Roses are red,", "The president announced",
        "Il \u00e9tait une fois", "If x + 2 = 5 then x =",
    ]  # fmt: skip
    prompts = [tokenizer.encode(text) for text in beginnings]
    exact, ours = (greedy(smollm2_engine(smollm2, mode), prompts, 64)[0] for mode in ("fp32", "int16"))
    assert sum(a == b for a, b in zip(exact, ours, strict=True)) >= 19, "two tokens may all but tie once in a thousand"


@needs_compiler
@pytest.mark.parametrize("cpu_weights", ["auto", "int16"])
def test_the_batch_a_request_is_in_changes_no_bit_of_its_logits(smollm2: ModelSource, cpu_weights: str) -> None:
    engine = smollm2_engine(smollm2, cpu_weights)
    prompts = [golden["token_ids"] for golden in GOLDEN.values()]
    alone = [greedy(engine, [prompt], 6)[1][0] for prompt in prompts]
    engine = smollm2_engine(smollm2, cpu_weights)
    together = greedy(engine, prompts * 2, 6)[1]
    assert all(torch.equal(a, b) for a, b in zip(alone * 2, together, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_safetensors_model_keeps_its_type_and_its_values(tmp_path: Path, dtype: torch.dtype, is_tied: bool) -> None:
    config = with_changes(tie_word_embeddings=is_tied, mlp_bias=True)
    write_tiny_hf(tmp_path, config)
    weights = {name: torch.from_numpy(array).to(dtype) for name, array in tiny_weights(config).items()}
    save_file(weights, tmp_path / "model.safetensors")
    engine = engine_for(resolve_model(str(tmp_path)))
    linear = qkv_of(engine)
    assert isinstance(linear, PackedLinear)
    assert [weight.type_name for weight in linear.weights] == [{"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[str(dtype)[6:]]]
    plain = {name: tensor.float() for name, tensor in weights.items()}
    answers, logits = greedy(engine, PROMPTS, 4)
    for prompt, answer, rows in zip(PROMPTS, answers, logits, strict=True):
        wanted = forward(plain, config, prompt + answer[:-1])[len(prompt) - 1 :, : config.tokenizer_vocab_size]
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_projections_of_unequal_formats_are_one_layer(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    weights = {name: torch.from_numpy(array) for name, array in tiny_weights().items()}
    mixed = {name: tensor.half() if "v_proj" in name else tensor for name, tensor in weights.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    engine = engine_for(resolve_model(str(tmp_path)))
    assert [weight.type_name for weight in qkv_of(engine).weights] == ["F32", "F16"]
    answers, logits = greedy(engine, PROMPTS[:1], 3)
    wanted = forward({n: t.float() for n, t in mixed.items()}, TINY_CONFIG, PROMPTS[0] + answers[0][:-1])[len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(logits[0], wanted[:, : TINY_CONFIG.tokenizer_vocab_size], atol=1e-4, rtol=1e-4)


def test_formats_that_the_kernel_does_not_have_become_fp32_of_the_same_values(tmp_path: Path) -> None:
    """A Q4_K_M file of a small model has Q5_0 where rows are no whole blocks of 256, a Q5_K_M file Q5_K throughout."""
    write_tiny_gguf(tmp_path / "m.gguf")
    plain = resolve_model(str(tmp_path / "m.gguf"))
    rng = np.random.default_rng(0)

    def quantised(tensor: StoredTensor) -> StoredTensor:
        if ".attn_v." not in tensor.name and ".ffn_down." not in tensor.name:
            return tensor
        blocks = rng.integers(0, 256, (tensor.num_elements // 32, 22), dtype=np.uint8)
        blocks[:, :2] = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
        return replace(tensor, type_name="Q5_0", data=blocks.reshape(-1))

    source = replace(plain, tensors={name: quantised(tensor) for name, tensor in plain.tensors.items()})
    answers, logits = greedy(engine_for(source), PROMPTS[:1], 3)
    weights = load_weights(source, torch.float32, "cpu")
    wanted = forward(weights, source.config, PROMPTS[0] + answers[0][:-1])[len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(logits[0], wanted[:, : source.config.tokenizer_vocab_size], atol=1e-4, rtol=1e-4)


def test_without_a_compiler_torch_gives_the_same_answers_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    source = resolve_model(str(tmp_path / "m.gguf"))
    kernel = {mode: greedy(engine_for(source, cpu_weights=mode), PROMPTS, 4) for mode in ("auto", "int16", "fp16", "fp32")}
    monkeypatch.setattr(cpu_linear, "_library", lambda: None)
    for mode, (answers, logits) in kernel.items():
        engine = engine_for(source, cpu_weights=mode)
        assert isinstance(qkv_of(engine), DenseLinear)
        plain_answers, plain_logits = greedy(engine, PROMPTS, 4)
        assert plain_answers == answers
        for a, b in zip(plain_logits, logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_stored_weights_need_the_room_of_the_file_and_not_of_fp32(smollm2: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_linear.prepare():
        pytest.skip("no C++ compiler")
    assert smollm2.num_stored_bytes < 100 << 20 < smollm2.num_parameters * 4
    monkeypatch.setattr("shared.engine.weights.available_memory_bytes", lambda: 150 << 20)
    monkeypatch.setattr("shared.model_files.weight_reader.available_memory_bytes", lambda: 150 << 20)
    engine_for(smollm2, num_blocks=16, block_size=16)
    with pytest.raises(ModelLoadError, match="needs"):
        engine_for(smollm2, num_blocks=16, block_size=16, cpu_weights="fp32")


def test_k_quants_need_more_room_than_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked scales make them half as large again: what does not fit is refused, not killed while it is packed."""
    if not cpu_linear.prepare():
        pytest.skip("no C++ compiler")
    config = replace(TINY_CONFIG, hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    write_tiny_gguf(tmp_path / "m.gguf", config, weights={w.name: np.zeros(w.shape, np.float32) for w in expected_weights(config)})
    plain = resolve_model(str(tmp_path / "m.gguf"))

    def quantised(tensor: StoredTensor) -> StoredTensor:
        data = np.zeros(tensor.num_elements // 256 * 210, np.uint8)
        return replace(tensor, type_name="Q6_K", data=data) if len(tensor.shape) == 2 else tensor

    source = replace(plain, tensors={name: quantised(tensor) for name, tensor in plain.tensors.items()})
    size = source.num_stored_bytes
    monkeypatch.setattr("shared.engine.weights.available_memory_bytes", lambda: size * 5 // 4)
    with pytest.raises(ModelLoadError, match="needs"):
        load_for_cpu(source, "stored")
    monkeypatch.setattr("shared.engine.weights.available_memory_bytes", lambda: size * 7 // 4)
    assert {rows.type_name for rows in load_for_cpu(source, "stored").stored.values()} == {"Q6_K"}


@pytest.mark.parametrize("value", ["int8", "FP16", "q4"])
def test_a_mode_that_does_not_exist_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="cpu_weights"):
        load_settings("decode", {"PAGEWIRE_CPU_WEIGHTS": value})


def test_a_mode_needs_an_fp32_engine_on_the_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigurationError, match="needs dtype float32"):
        cpu_storage(Settings(cpu_weights="stored"), torch.bfloat16, cpu)
    assert cpu_storage(Settings(), torch.bfloat16, cpu) is None
    assert cpu_storage(Settings(cpu_weights="fp32"), torch.bfloat16, gpu) is None
    assert cpu_storage(Settings(), torch.float32, cpu) == "stored"


@pytest.mark.parametrize("mode", ["stored", "fp16"])
def test_a_mode_that_ranks_do_not_have_is_refused(mode: Literal["stored", "fp16"]) -> None:
    """An fp16 engine has a fingerprint of its own: one that is none must not be served under it."""
    cpu = torch.device("cpu")
    with pytest.raises(ConfigurationError, match="does not go with tensor_parallel_size"):
        cpu_storage(Settings(cpu_weights=mode, tensor_parallel_size=2), torch.float32, cpu)
    assert cpu_storage(Settings(cpu_weights="fp32", tensor_parallel_size=2), torch.float32, cpu) is None


def test_a_16_bit_engine_on_the_cpu_works_as_before(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path))
    answers, _ = greedy(engine_for(source, dtype="bfloat16"), PROMPTS, 3)
    weights = {name: tensor.float() for name, tensor in load_weights(source, torch.bfloat16, "cpu").items()}
    first = int(forward(weights, TINY_CONFIG, PROMPTS[0])[-1, : TINY_CONFIG.tokenizer_vocab_size].argmax())
    assert answers[0][0] == first
