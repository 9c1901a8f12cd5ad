"""Services that serve weights in FP8: they know each other, and answer as the plain model with the rounded weights does."""

from __future__ import annotations

from pathlib import Path

import torch
from local_stack import LocalStack
from tiny_models import write_tiny_hf

from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.model_files.model_source import resolve_model


def test_prefill_and_decode_with_fp8_weights_answer_as_the_model_with_those_weights(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    source = resolve_model(str(tmp_path))
    weights = load_weights(source, torch.float32, "cpu", quantization="fp8")
    rounded = {**weights, **{name: weight.expanded(torch.float32) for name, weight in weights.fp8.items()}}
    prompt = [(3 * i) % 200 for i in range(50)]
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(forward(rounded, source.config, tokens)[-1, : source.config.tokenizer_vocab_size].argmax()))
    with LocalStack("--model", str(tmp_path), "--quantization", "fp8", "--device", "cpu", num_blocks=64) as stack:
        assert stack.tokens(prompt, 6, ignore_eos=True) == tokens[50:]
        assert stack.devices == {"prefill-0": "cpu", "decode-0": "cpu"}
