"""A model whose layers differ, in their windows and rotary bases, served by prefill and decode apart."""

from __future__ import annotations

from pathlib import Path

from family_models import CASES, logits_of, make_model, write_model
from local_stack import LocalStack
from tiny_models import TINY_TOKENS

NUM_ANSWERED = 12


def test_windows_survive_chunks_transfer_and_prefix_hits(tmp_path: Path) -> None:
    """Of blocks of 16 tokens a window of 6 sees one or two; all of them travel, since other layers see all."""
    model = make_model(CASES["gemma3"])
    write_model(model, tmp_path)
    short, middle, long = ([(31 * i + i * i) % len(TINY_TOKENS) for i in range(length)] for length in (5, 60, 200))
    cached = {}
    settings = {"max_num_batched_tokens": 48, "local_prefill_max_tokens": 0, "kv_failure_policy": "fail"}
    with LocalStack("--model", str(tmp_path), **settings) as stack:
        for name, prompt in {"short": short, "middle": middle, "long": long, "branch": [*long[:150], *middle], "again": long}.items():
            expected = list(prompt)
            for _ in range(NUM_ANSWERED):
                expected.append(int(logits_of(model, expected)[-1].argmax()))
            answer = stack.complete(prompt, NUM_ANSWERED, ignore_eos=True)
            assert answer["choices"][0]["token_ids"] == expected[len(prompt) :]
            cached[name] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached["branch"] >= 144 and cached["again"] >= 192
