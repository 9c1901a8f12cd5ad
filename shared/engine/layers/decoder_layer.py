"""How attention and the feed-forward part are joined to a decoder layer: with a norm before each, or one after each as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.layers.attention import Attention
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import Norm, NormFactory, RMSNorm
from shared.model_files.model_config import ModelConfig

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, hidden_size] -> the same shape."""


class DecoderLayer(Protocol):
    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V into this layer's caches."""


@dataclass(frozen=True)
class PreNormLayer:
    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    feed_forward: FeedForward

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), metadata, key_cache, value_cache)
        return x + self.feed_forward(self.post_attention_norm(x))


@dataclass(frozen=True)
class SandwichNormLayer:
    """What each part gives is normalised before it is added."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    pre_feed_forward_norm: Norm
    feed_forward: FeedForward
    post_feed_forward_norm: Norm

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), metadata, key_cache, value_cache))
        return x + self.post_feed_forward_norm(self.feed_forward(self.pre_feed_forward_norm(x)))


def take_pre_norm_layer(weights: Weights, config: ModelConfig, layer: int, attention: Attention, feed_forward: FeedForward) -> PreNormLayer:
    input_norm, post_attention_norm = _norms(weights, config, layer, ("input", "post_attention"), RMSNorm)
    return PreNormLayer(input_norm, attention, post_attention_norm, feed_forward)


def take_sandwich_norm_layer(
    weights: Weights, config: ModelConfig, layer: int, attention: Attention, feed_forward: FeedForward, norm: NormFactory
) -> SandwichNormLayer:
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    before, after, before_mlp, after_mlp = _norms(weights, config, layer, names, norm)
    return SandwichNormLayer(before, attention, after, before_mlp, feed_forward, after_mlp)


def _norms(weights: Weights, config: ModelConfig, layer: int, names: tuple[str, ...], norm: NormFactory) -> list[Norm]:
    return [norm(weights.pop(f"model.layers.{layer}.{name}_layernorm.weight"), config.rms_norm_eps) for name in names]
