"""How attention and the feed-forward part are joined to a decoder layer: with a norm before each, or one after each as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, ParamSpec, Protocol

import torch

from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.layers.linear import Weights
from shared.engine.layers.norm import Norm, NormFactory, RMSNorm
from shared.engine.tensor_parallel.sharding import Reduce
from shared.model_files.model_config import ModelConfig

_P = ParamSpec("_P")


class Part(Protocol[_P]):
    """Attention or the feed-forward part of a layer."""

    def __call__(self, x: torch.Tensor, *args: _P.args, **kwargs: _P.kwargs) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape."""

    def add_normed(self, residual: torch.Tensor, norm: Norm, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """residual += self(norm(residual), ...), in place."""


class AttentionPart(Part[[AttentionMetadata, torch.Tensor, torch.Tensor]], Protocol):
    """See layers.attention.Attention."""

    def of_rows(
        self, rows: torch.Tensor, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """[len(rows), hidden_size]: those rows of self(x, ...), where nothing but K and V is computed for others."""


FeedForward = Part[[]]


class DecoderLayer(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        metadata: AttentionMetadata,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size], which may be written over; writes the K and V of all tokens into this layer's caches. Returns
        [len(rows), hidden_size]: nothing but K and V is computed for other rows; None: all are wanted."""

    def summed_over_ranks(self, reduce: Reduce) -> DecoderLayer:
        """The same, where each rank computes a share of both parts."""


@dataclass(frozen=True)
class PreNormLayer:
    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    feed_forward: FeedForward

    def __call__(
        self,
        x: torch.Tensor,
        metadata: AttentionMetadata,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if rows is None:
            self.attention.add_normed(x, self.input_norm, metadata, key_cache, value_cache)
        else:
            mixed = self.attention.of_rows(rows, self.input_norm(x), metadata, key_cache, value_cache)
            x = x[rows]
            x += mixed
        if len(x):
            self.feed_forward.add_normed(x, self.post_attention_norm)
        return x

    def summed_over_ranks(self, reduce: Reduce) -> PreNormLayer:
        return replace(self, attention=_SummedAttention(self.attention, reduce), feed_forward=_Summed(self.feed_forward, reduce))


@dataclass(frozen=True)
class SandwichNormLayer:
    """What each part gives is normalised before it is added."""

    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    pre_feed_forward_norm: Norm
    feed_forward: FeedForward
    post_feed_forward_norm: Norm

    def __call__(
        self,
        x: torch.Tensor,
        metadata: AttentionMetadata,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.input_norm(x)
        if rows is None:
            mixed = self.attention(normed, metadata, key_cache, value_cache)
        else:
            mixed, x = self.attention.of_rows(rows, normed, metadata, key_cache, value_cache), x[rows]
        if not len(x):
            return x
        x += self.post_attention_norm(mixed)
        x += self.post_feed_forward_norm(self.feed_forward(self.pre_feed_forward_norm(x)))
        return x

    def summed_over_ranks(self, reduce: Reduce) -> SandwichNormLayer:
        return replace(self, attention=_SummedAttention(self.attention, reduce), feed_forward=_Summed(self.feed_forward, reduce))


class _Summed(Generic[_P]):
    """A part of which each rank computes a share."""

    def __init__(self, part: Part[_P], reduce: Reduce) -> None:
        self._part, self._reduce = part, reduce

    def __call__(self, x: torch.Tensor, *args: _P.args, **kwargs: _P.kwargs) -> torch.Tensor:
        return self._reduce(self._part(x, *args, **kwargs))

    def add_normed(self, residual: torch.Tensor, norm: Norm, *args: _P.args, **kwargs: _P.kwargs) -> None:
        residual += self(norm(residual), *args, **kwargs)


class _SummedAttention(_Summed[[AttentionMetadata, torch.Tensor, torch.Tensor]]):
    def __init__(self, part: AttentionPart, reduce: Reduce) -> None:
        super().__init__(part, reduce)
        self._attention = part

    def of_rows(
        self, rows: torch.Tensor, x: torch.Tensor, metadata: AttentionMetadata, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        partial = self._attention.of_rows(rows, x, metadata, key_cache, value_cache)
        return self._reduce(partial) if len(rows) else partial


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
