"""ModelConfig from the key-values and tensors of a GGUF file."""

from __future__ import annotations

import logging
from typing import Any

from shared.errors import ModelLoadError
from shared.model_files.dequantize import dequantize
from shared.model_files.gguf import GGUFModel
from shared.model_files.gguf_tokenizer import gguf_special_tokens
from shared.model_files.model_config import LinearRopeScaling, ModelConfig, RopeScaling
from shared.model_files.weight_names import ROPE_FREQS

SUPPORTED_ARCHITECTURES = ("llama",)
_log = logging.getLogger(__name__)


def _required(model: GGUFModel, key: str) -> Any:
    value = model.get(key)
    if value is None:
        raise ModelLoadError(f"{model.paths[0]} lacks {key}: the file is damaged or made by an unknown converter")
    return value


def _rope_scaling(model: GGUFModel) -> RopeScaling | None:
    kind = model.get("llama.rope.scaling.type", "linear" if model.get("llama.rope.scale_linear") else "none")
    factor = float(model.get("llama.rope.scaling.factor", model.get("llama.rope.scale_linear", 1.0)))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        raise ModelLoadError(f"rope scaling {kind!r} is not supported; supported are linear and llama3")
    return LinearRopeScaling(factor)


def _rope_freq_factors(model: GGUFModel) -> tuple[float, ...] | None:
    tensor = model.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    _log.info("%s found: used as divisors of the rotary frequencies", ROPE_FREQS)
    return tuple(dequantize(tensor).reshape(-1).tolist())


def config_from_gguf(model: GGUFModel) -> ModelConfig:
    """Raises ModelLoadError when the architecture is not Llama, or a fact is missing or contradicts the tensors."""
    architecture = _required(model, "general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    if int(model.get("llama.expert_count", 0)):
        raise ModelLoadError("mixture-of-experts models are not supported; supported: dense llama")
    num_heads = int(_required(model, "llama.attention.head_count"))
    num_kv_heads = int(model.get("llama.attention.head_count_kv", num_heads))
    hidden_size = int(_required(model, "llama.embedding_length"))
    head_dim = int(model.get("llama.attention.key_length", hidden_size // max(1, num_heads)))
    if (rope_dim := int(model.get("llama.rope.dimension_count", head_dim))) != head_dim:
        raise ModelLoadError(f"rotary embedding over {rope_dim} of {head_dim} dimensions is not supported; it must cover the whole head")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{model.paths[0]} lacks the tensor token_embd.weight: the file is incomplete")
    special = gguf_special_tokens(model)
    return ModelConfig(
        architecture="llama",
        num_layers=int(_required(model, "llama.block_count")),
        hidden_size=hidden_size,
        intermediate_size=int(_required(model, "llama.feed_forward_length")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        tokenizer_vocab_size=min(special.vocab_size, embedding.shape[0]),
        max_model_len=int(_required(model, "llama.context_length")),
        rope_theta=float(model.get("llama.rope.freq_base", 10000.0)),
        rms_norm_eps=float(_required(model, "llama.attention.layer_norm_rms_epsilon")),
        rope_scaling=_rope_scaling(model),
        rope_freq_factors=_rope_freq_factors(model),
        tie_word_embeddings="output.weight" not in model.tensors,
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        attention_output_bias="blk.0.attn_output.bias" in model.tensors,
        mlp_bias="blk.0.ffn_up.bias" in model.tensors,
        eos_token_ids=special.eos_token_ids,
        bos_token_id=special.bos_token_id,
        add_bos=special.add_bos,
    )
