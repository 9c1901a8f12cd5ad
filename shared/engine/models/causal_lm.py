"""A decoder over a paged KV cache, whatever its layers are: embedding, layers, last norm, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.kv_cache import KVCache
from shared.engine.layers.decoder_layer import DecoderLayer
from shared.engine.layers.linear import Weights, take_embedding
from shared.engine.layers.norm import NormFactory, RMSNorm
from shared.model_files.model_config import ModelConfig


class CausalLM:
    """fp32, bf16 or fp16; takes from `weights` (Hugging Face's names) what the layers left."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layers: Sequence[DecoderLayer],
        norm: NormFactory = RMSNorm,
        has_scaled_embedding: bool = False,
    ) -> None:
        """`has_scaled_embedding`: times the square root of hidden_size, rounded to the weights' type."""
        self.config = config
        self.layers = layers
        self.is_capturable = config.experts is None
        """A step waits for nothing on the host, so it can be a CUDA graph; experts are counted there."""
        self._embed = take_embedding(weights, "model.embed_tokens")
        self._final_norm = norm(weights.pop("model.norm.weight"), config.rms_norm_eps)
        table = self._embed if config.tie_word_embeddings else take_embedding(weights, "lm_head")
        # Rows past the tokenizer's vocabulary are padding: they are never computed, so they can never be sampled.
        self._head = table.head(config.tokenizer_vocab_size)
        self._embedding_scale = torch.tensor(math.sqrt(config.hidden_size)) if has_scaled_embedding else None

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        after_layer: Callable[[int], None] = lambda _index: None,
    ) -> torch.Tensor:
        """token_ids: [num_tokens], flattened batch; writes their KV, and calls `after_layer` when layer `index` has (on a GPU: has been
        queued to). Returns the hidden states (after the last norm) of `metadata.hidden_rows`: [len(hidden_rows), hidden_size]."""
        x = self._embed(token_ids)  # [num_tokens, hidden_size]
        if self._embedding_scale is not None:
            x *= self._embedding_scale.to(x.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, metadata, *cache.layer(index), metadata.hidden_rows if index == last else None)
            after_layer(index)
        return self._final_norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] -> fp32 [n, tokenizer_vocab_size]."""
        return self.compute_raw_logits(hidden).float()

    def compute_raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same numbers in the model's own type where that holds them."""
        logits = self._head(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap
