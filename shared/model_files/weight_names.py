"""Which tensors a model has: Hugging Face names, shapes, and what GGUF calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.model_files.model_config import Architecture, ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_PERMUTED: tuple[Architecture, ...] = ("llama", "mistral", "mixtral", "smollm3")
"""Families whose q and k are stored by GGUF with a head's rotated pairs as neighbours."""
_ROUTER = ".gate.weight"
_HEAD_NORMS: tuple[Architecture, ...] = ("qwen3", "qwen3_moe", "gemma3")
_POST_NORMS: tuple[Architecture, ...] = ("gemma2", "gemma3")
"""Families that also normalise what a block gives; GGUF holds their norms' weights plus one."""


@dataclass(frozen=True, slots=True)
class ExpectedWeight:
    name: str
    """Hugging Face's name, which the engine uses."""
    gguf_name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0
    """GGUF stores the rows of q and k so that a head's rotated pairs are neighbours; this is the number of heads to undo it with."""
    gguf_offset: float = 0.0
    """What GGUF has added to every item."""
    gguf_expert: int | None = None
    """GGUF stacks the experts in one tensor; this one's place there."""

    @property
    def is_quantizable(self) -> bool:
        """A matrix of a layer: neither embedding, head nor norm, nor a router of experts, where a small error chooses another expert."""
        return self.name.startswith("model.layers.") and len(self.shape) == 2 and not self.name.endswith(_ROUTER)


def expected_weights(config: ModelConfig) -> Iterator[ExpectedWeight]:
    """Every tensor of the model, in the order of a forward pass."""
    hidden = config.hidden_size
    yield ExpectedWeight(EMBEDDING, "token_embd.weight", (config.vocab_size, hidden))
    for layer in range(config.num_layers):
        yield from _norms(config, layer)
        yield from _attention(config, layer)
        yield from _experts(config, layer) if config.has_experts(layer) else _gated_mlp(config, layer)
    yield _norm(config, "model.norm", "output_norm", hidden)
    if not config.tie_word_embeddings:
        yield ExpectedWeight(HEAD, "output.weight", (config.vocab_size, hidden))


def _norm(config: ModelConfig, name: str, gguf_name: str, size: int) -> ExpectedWeight:
    offset = 1.0 if config.architecture in _POST_NORMS else 0.0
    return ExpectedWeight(f"{name}.weight", f"{gguf_name}.weight", (size,), gguf_offset=offset)


def _norms(config: ModelConfig, layer: int) -> Iterator[ExpectedWeight]:
    names = [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")]
    if config.architecture in _POST_NORMS:
        names = [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ]
    for name, gguf_name in names:
        yield _norm(config, f"model.layers.{layer}.{name}", f"blk.{layer}.{gguf_name}", config.hidden_size)
    if config.architecture in _HEAD_NORMS:
        for part in "qk":
            yield _norm(config, f"model.layers.{layer}.self_attn.{part}_norm", f"blk.{layer}.attn_{part}_norm", config.head_dim)


def _linear(name: str, gguf_name: str, shape: tuple[int, int], has_bias: bool, permuted_heads: int = 0) -> Iterator[ExpectedWeight]:
    yield ExpectedWeight(f"{name}.weight", f"{gguf_name}.weight", shape, permuted_heads)
    if has_bias:
        yield ExpectedWeight(f"{name}.bias", f"{gguf_name}.bias", shape[:1], permuted_heads)


def _attention(config: ModelConfig, layer: int) -> Iterator[ExpectedWeight]:
    ours, theirs = f"model.layers.{layer}.self_attn", f"blk.{layer}"
    hidden, has_bias = config.hidden_size, config.attention_bias
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.architecture == "phi3":
        yield from _linear(f"{ours}.qkv_proj", f"{theirs}.attn_qkv", (q_size + 2 * kv_size, hidden), has_bias)
    else:
        is_permuted = config.architecture in _PERMUTED
        yield from _linear(f"{ours}.q_proj", f"{theirs}.attn_q", (q_size, hidden), has_bias, config.num_heads * is_permuted)
        yield from _linear(f"{ours}.k_proj", f"{theirs}.attn_k", (kv_size, hidden), has_bias, config.num_kv_heads * is_permuted)
        yield from _linear(f"{ours}.v_proj", f"{theirs}.attn_v", (kv_size, hidden), has_bias)
    yield from _linear(f"{ours}.o_proj", f"{theirs}.attn_output", (hidden, q_size), config.attention_output_bias)


def _gated_mlp(config: ModelConfig, layer: int) -> Iterator[ExpectedWeight]:
    ours, theirs = f"model.layers.{layer}.mlp", f"blk.{layer}"
    hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if config.architecture == "phi3":
        yield from _linear(f"{ours}.gate_up_proj", f"{theirs}.ffn_up", (2 * inner, hidden), has_bias)
    else:
        yield from _linear(f"{ours}.gate_proj", f"{theirs}.ffn_gate", (inner, hidden), has_bias)
        yield from _linear(f"{ours}.up_proj", f"{theirs}.ffn_up", (inner, hidden), has_bias)
    yield from _linear(f"{ours}.down_proj", f"{theirs}.ffn_down", (hidden, inner), has_bias)


def _experts(config: ModelConfig, layer: int) -> Iterator[ExpectedWeight]:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    is_mixtral = config.architecture == "mixtral"
    block = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield ExpectedWeight(f"{block}.gate.weight", f"blk.{layer}.ffn_gate_inp.weight", (experts.num_experts, hidden))
    shape = (experts.intermediate_size, hidden)
    for expert in range(experts.num_experts):
        for name, gguf_name, size in ((gate, "gate", shape), (up, "up", shape), (down, "down", shape[::-1])):
            yield ExpectedWeight(
                f"{block}.experts.{expert}.{name}.weight", f"blk.{layer}.ffn_{gguf_name}_exps.weight", size, gguf_expert=expert
            )
