"""Llama-architecture decoder over a paged KV cache: grouped queries, tied or untied embeddings, optional biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.rms_norm import rms_norm
from kernels.rotary_embedding import rotary_embedding_and_cache
from kernels.silu_and_mul import silu_and_mul
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.kv_cache import KVCache
from shared.engine.layers.linear import Linear, Weights, take_embedding, take_linear
from shared.engine.rotary import RotaryTable
from shared.model_files.model_config import ModelConfig


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaForCausalLM:
    """Consumes `weights` (Hugging Face names). fp32, bf16 or fp16."""

    def __init__(self, config: ModelConfig, weights: Weights, rotary: RotaryTable) -> None:
        self.config = config
        self._rotary = rotary
        self._embed = take_embedding(weights, "model.embed_tokens")
        self._final_norm = weights.pop("model.norm.weight")
        table = self._embed if config.tie_word_embeddings else take_embedding(weights, "lm_head")
        # Rows past the tokenizer's vocabulary are padding: they are never computed, so they can never be sampled.
        self._head = table.head(config.tokenizer_vocab_size)
        self._layers = [self._take_layer(weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._scale = config.head_dim**-0.5

    @staticmethod
    def _take_layer(weights: Weights, prefix: str) -> _Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            input_norm=weights.pop(f"{prefix}.input_layernorm.weight"),
            qkv=take_linear(weights, [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"]),
            output=take_linear(weights, [f"{attention}.o_proj"]),
            post_attention_norm=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=take_linear(weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=take_linear(weights, [f"{mlp}.down_proj"]),
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        after_layer: Callable[[int], None] = lambda _index: None,
    ) -> torch.Tensor:
        """token_ids: [num_tokens], flattened batch; writes their KV, and calls `after_layer` when layer `index` has (on a GPU: has been
        queued to). Returns the hidden states (after the last norm) of `metadata.hidden_rows`: [len(hidden_rows), hidden_size]."""
        config = self.config
        cos, sin = self._rotary.cos, self._rotary.sin
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        x = self._embed(token_ids)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            query, key, value = torch.split(qkv.view(len(x), -1, config.head_dim), heads, dim=1)
            key_cache, value_cache = cache.layer(index)
            rotary_embedding_and_cache(query, key, value, metadata.positions, cos, sin, key_cache, value_cache, metadata.slot_mapping)
            x += layer.output(metadata.attention(query, key_cache, value_cache, self._scale).flatten(1))
            x += layer.down(silu_and_mul(layer.gate_up(self._norm(x, layer.post_attention_norm))))
            after_layer(index)
        return self._norm(x[metadata.hidden_rows], self._final_norm)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] -> fp32 [n, tokenizer_vocab_size]."""
        return self._head(hidden).float()
