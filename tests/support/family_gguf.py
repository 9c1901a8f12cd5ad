"""GGUF files of `transformers` models, laid out as llama.cpp's converter does. Names and keys come from its own package."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter
from numpy.typing import NDArray
from tiny_models import MERGES, SPECIAL_TOKENS, TINY_TOKENS, permute
from transformers import PreTrainedModel

_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<name>\w+)\.weight$")
_STACKED = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_family_gguf(path: Path, model: PreTrainedModel, checkpoint: dict[str, torch.Tensor], architecture: MODEL_ARCH) -> None:
    """`checkpoint`: the tensors as `save_pretrained` wrote them."""
    config = model.config
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _add_rope(writer, model, head_dim)
    if getattr(config, "num_local_experts", 0):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3, MODEL_ARCH.PHI3) and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_tokenizer(writer)
    for name, array in _tensors(model, checkpoint, architecture):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_rope(writer: GGUFWriter, model: PreTrainedModel, head_dim: int) -> None:
    config = model.config
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TINY_TOKENS)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(TINY_TOKENS) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(
    model: PreTrainedModel, checkpoint: dict[str, torch.Tensor], architecture: MODEL_ARCH
) -> list[tuple[str, NDArray[np.float32]]]:
    config = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    is_permuted = architecture in (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3)
    is_gemma = architecture in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)
    stacks: dict[str, dict[int, NDArray[np.float32]]] = {}
    tensors: list[tuple[str, NDArray[np.float32]]] = []
    for name, tensor in checkpoint.items():
        array = tensor.float().numpy()
        if match := _EXPERT.match(name):
            layer = name.split(".")[2]
            stacks.setdefault(f"blk.{layer}.ffn_{_STACKED[match['name']]}_exps.weight", {})[int(match["expert"])] = array
            continue
        if is_permuted and ".q_proj." in name:
            array = permute(array, config.num_attention_heads)
        if is_permuted and ".k_proj." in name:
            array = permute(array, config.num_key_value_heads)
        if is_gemma and name.endswith("norm.weight"):
            array = array + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, f"{name} has no name in GGUF"
        tensors.append((gguf_name, array))
    tensors += [(name, np.stack([stack[i] for i in range(len(stack))])) for name, stack in stacks.items()]
    return tensors
