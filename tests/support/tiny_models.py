"""Small Llama models written as real files: the same random weights as GGUF (whole or split) and as a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from shared.model_files.model_config import ModelConfig
from shared.model_files.weight_names import expected_weights

SPECIAL_TOKENS = ["<|endoftext|>", "<s>", "</s>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TINY_TOKENS = SPECIAL_TOKENS + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TINY_CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=len(TINY_TOKENS) + 8,
    tokenizer_vocab_size=len(TINY_TOKENS),
    max_model_len=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    eos_token_ids=(2,),
    bos_token_id=1,
)
HERMES_TEMPLATE = """{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
Weights = dict[str, NDArray[np.float32]]


def tiny_weights(config: ModelConfig = TINY_CONFIG, seed: int = 0) -> Weights:
    """Hugging Face names and row order."""
    rng = np.random.default_rng(seed)
    return {weight.name: rng.normal(0, 0.1, weight.shape).astype(np.float32) for weight in expected_weights(config)}


def permute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What the GGUF converter does to q and k: (half, pair) -> (pair, half) within each head."""
    return rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_tiny_gguf(
    path: Path,
    config: ModelConfig = TINY_CONFIG,
    *,
    weights: Weights | None = None,
    leave_out: Iterable[str] = (),
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    tensors_per_file: int = 0,
) -> None:
    """`leave_out`: GGUF tensor names or metadata keys. `tensors_per_file` > 0 splits: path `m.gguf` gives `m-00001-of-0000N.gguf`."""
    weights = tiny_weights(config) if weights is None else weights
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    values: dict[str, Any] = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_model_len,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS) + [1] * (len(TINY_TOKENS) - len(SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": config.add_bos,
    }
    for key, value in (values | dict(metadata or {})).items():
        if key not in leave_out:
            add_value(writer, key, value)
    for weight in expected_weights(config):
        if weight.gguf_name not in leave_out:
            array = weights[weight.name]
            writer.add_tensor(weight.gguf_name, permute(array, weight.permuted_heads) if weight.permuted_heads else array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_tokenizer_json(add_bos: bool = False) -> dict[str, Any]:
    vocabulary = {token: token_id for token_id, token in enumerate(TINY_TOKENS)}
    bos_template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": token, **flags} for token_id, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "post_processor": bos_template if add_bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": MERGES, "ignore_merges": False, "byte_fallback": False, "fuse_unk": False},
    }


def tiny_hf_config(config: ModelConfig = TINY_CONFIG) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": 1,
    }


def write_tiny_hf(
    directory: Path, config: ModelConfig = TINY_CONFIG, *, weights: Weights | None = None, num_files: int = 1, **changes: Any
) -> None:
    """`changes` override fields of config.json."""
    weights = tiny_weights(config) if weights is None else weights
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_hf_config(config) | changes))
    (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json(config.add_bos)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    if num_files == 1:
        save_file(weights, directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number in range(num_files):
        file_name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: array for position, (name, array) in enumerate(weights.items()) if position % num_files == number}
        save_file(part, directory / file_name)
        index.update(dict.fromkeys(part, file_name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def with_changes(**changes: Any) -> ModelConfig:
    return dataclasses.replace(TINY_CONFIG, **changes)
