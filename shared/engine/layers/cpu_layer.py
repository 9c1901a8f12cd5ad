"""Decoder layers whose parts are all kernels of the CPU, as one call of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu_attention import CPUPagedAttention
from kernels.cpu_decoder_layer import CPUDecoderLayer, LayerParts, Norm, Projection
from kernels.silu_and_mul import silu_and_mul
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.layers.attention import Attention
from shared.engine.layers.decoder_layer import DecoderLayer, PreNormLayer
from shared.engine.layers.gated_mlp import GatedMLP
from shared.engine.layers.linear import PackedLinear
from shared.engine.layers.norm import RMSNorm
from shared.engine.tensor_parallel.sharding import Reduce


@dataclass(frozen=True)
class CPULayer:
    parts: PreNormLayer
    kernel: CPUDecoderLayer

    def __call__(
        self,
        x: torch.Tensor,
        metadata: AttentionMetadata,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(metadata.attention, CPUPagedAttention), "packed weights are of the CPU"
        return self.kernel(x, metadata.positions, metadata.slot_mapping, metadata.attention, key_cache, value_cache, rows)

    def summed_over_ranks(self, reduce: Reduce) -> DecoderLayer:
        return self.parts.summed_over_ranks(reduce)


def in_one_call(layer: DecoderLayer) -> DecoderLayer:
    """`layer` itself where some part of it has no kernel."""
    match layer:
        case PreNormLayer(
            input_norm=RMSNorm() as input_norm,
            attention=Attention(qkv=PackedLinear() as qkv, output=PackedLinear() as output, query_norm=None, key_norm=None) as attention,
            post_attention_norm=RMSNorm() as post_attention_norm,
            feed_forward=GatedMLP(gate_up=PackedLinear() as gate_up, down=PackedLinear() as down, activation=activation),
        ) if attention.rotary is not None and activation is silu_and_mul:
            parts = LayerParts(
                input_norm=Norm(input_norm.weight, input_norm.eps),
                qkv=_projection(qkv),
                cos=attention.rotary.cos,
                sin=attention.rotary.sin,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                scale=attention.scale,
                sliding_window=attention.sliding_window,
                soft_cap=attention.soft_cap,
                output=_projection(output),
                post_attention_norm=Norm(post_attention_norm.weight, post_attention_norm.eps),
                gate_up=_projection(gate_up),
                down=_projection(down),
            )
            try:
                return CPULayer(layer, CPUDecoderLayer(parts))
            except LookupError:
                return layer
    return layer


def _projection(linear: PackedLinear) -> Projection:
    return Projection(linear.weights, linear.biases)
