"""How attention and the feed-forward part are joined to a decoder layer: with a norm before each, or one after each as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol

import torch

from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import Norm, NormFactory, RMSNorm
from shared.engine.tensor_parallel.sharding import Reduce
from shared.model_files.model_config import ModelConfig

AttentionPart = Callable[[torch.Tensor, AttentionMetadata, torch.Tensor, torch.Tensor], torch.Tensor]
"""See layers.attention.Attention."""
FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, hidden_size] -> the same shape."""
_P = ParamSpec("_P")


class DecoderLayer(Protocol):
    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size], which is written over and returned; writes the tokens' K and V into this layer's caches."""

    def summed_over_ranks(self, reduce: Reduce) -> DecoderLayer:
        """The same, where each rank computes a share of both parts."""


@dataclass(frozen=True)
class PreNormLayer:
    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    feed_forward: FeedForward

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        x += self.attention(self.input_norm(x), metadata, key_cache, value_cache)
        x += self.feed_forward(self.post_attention_norm(x))
        return x

    def summed_over_ranks(self, reduce: Reduce) -> PreNormLayer:
        return replace(self, attention=_summed(self.attention, reduce), feed_forward=_summed(self.feed_forward, reduce))


@dataclass(frozen=True)
class SandwichNormLayer:
    """What each part gives is normalised before it is added."""

    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    pre_feed_forward_norm: Norm
    feed_forward: FeedForward
    post_feed_forward_norm: Norm

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        x += self.post_attention_norm(self.attention(self.input_norm(x), metadata, key_cache, value_cache))
        x += self.post_feed_forward_norm(self.feed_forward(self.pre_feed_forward_norm(x)))
        return x

    def summed_over_ranks(self, reduce: Reduce) -> SandwichNormLayer:
        return replace(self, attention=_summed(self.attention, reduce), feed_forward=_summed(self.feed_forward, reduce))


def _summed(part: Callable[_P, torch.Tensor], reduce: Reduce) -> Callable[_P, torch.Tensor]:
    return lambda *args, **kwargs: reduce(part(*args, **kwargs))


def take_pre_norm_layer(
    weights: Weights, config: ModelConfig, layer: int, attention: AttentionPart, feed_forward: FeedForward
) -> PreNormLayer:
    input_norm, post_attention_norm = _norms(weights, config, layer, ("input", "post_attention"), RMSNorm)
    return PreNormLayer(input_norm, attention, post_attention_norm, feed_forward)


def take_sandwich_norm_layer(
    weights: Weights, config: ModelConfig, layer: int, attention: AttentionPart, feed_forward: FeedForward, norm: NormFactory
) -> SandwichNormLayer:
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    before, after, before_mlp, after_mlp = _norms(weights, config, layer, names, norm)
    return SandwichNormLayer(before, attention, after, before_mlp, feed_forward, after_mlp)


def _norms(weights: Weights, config: ModelConfig, layer: int, names: tuple[str, ...], norm: NormFactory) -> list[Norm]:
    return [norm(weights.pop(f"model.layers.{layer}.{name}_layernorm.weight"), config.rms_norm_eps) for name in names]
