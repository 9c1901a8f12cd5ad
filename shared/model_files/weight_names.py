"""Which tensors a Llama model has: Hugging Face names, shapes, and what GGUF calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.model_files.model_config import ModelConfig

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class ExpectedWeight:
    name: str
    """Hugging Face's name, which the engine uses."""
    gguf_name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0
    """GGUF stores the rows of q and k so that a head's rotated pairs are neighbours; this is the number of heads to undo it with."""


def expected_weights(config: ModelConfig) -> Iterator[ExpectedWeight]:
    """Every tensor of the model, in the order of a forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield ExpectedWeight("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden))
    projections = (
        ("self_attn.q_proj", "attn_q", (q_size, hidden), config.attention_bias, config.num_heads),
        ("self_attn.k_proj", "attn_k", (kv_size, hidden), config.attention_bias, config.num_kv_heads),
        ("self_attn.v_proj", "attn_v", (kv_size, hidden), config.attention_bias, 0),
        ("self_attn.o_proj", "attn_output", (hidden, q_size), config.attention_output_bias, 0),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), config.mlp_bias, 0),
        ("mlp.up_proj", "ffn_up", (inner, hidden), config.mlp_bias, 0),
        ("mlp.down_proj", "ffn_down", (hidden, inner), config.mlp_bias, 0),
    )
    for layer in range(config.num_layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        yield ExpectedWeight(f"{ours}.input_layernorm.weight", f"{theirs}.attn_norm.weight", (hidden,))
        yield ExpectedWeight(f"{ours}.post_attention_layernorm.weight", f"{theirs}.ffn_norm.weight", (hidden,))
        for name, gguf_name, shape, has_bias, heads in projections:
            yield ExpectedWeight(f"{ours}.{name}.weight", f"{theirs}.{gguf_name}.weight", shape, heads)
            if has_bias:
                yield ExpectedWeight(f"{ours}.{name}.bias", f"{theirs}.{gguf_name}.bias", shape[:1], heads)
    yield ExpectedWeight("model.norm.weight", "output_norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield ExpectedWeight("lm_head.weight", "output.weight", (config.vocab_size, hidden))
