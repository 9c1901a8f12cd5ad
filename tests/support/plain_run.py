"""What the system is compared with: the same weights in one process, no paging, no chunks, no cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.model_files.model_source import resolve_model

LOGPROB_TOLERANCE = 1e-3


@functools.cache
def _model() -> tuple[dict[str, torch.Tensor], Any]:
    source = resolve_model("smollm2")
    return load_weights(source, torch.float32, "cpu"), source.config


def plain_logits(token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: the logits after each token."""
    weights, config = _model()
    with torch.inference_mode():
        return forward(weights, config, token_ids)


def assert_equals_plain_run(choice: dict[str, Any], tokenizer_top: bool = True) -> None:
    """`choice`: one greedy answer with return_token_ids, logprobs and return_tokens_as_token_ids.

    The plain run reads prompt and answer in one pass: at every position its most likely token must be the answer's (where two all but tie,
    either of them: another processor forms sums in another order), and the log-probabilities of all tokens the answer lists must agree.
    """
    prompt, answer = choice["prompt_token_ids"], choice["token_ids"]
    logprobs = plain_logits([*prompt, *answer[:-1]])[len(prompt) - 1 :].log_softmax(-1)
    behind = logprobs.amax(-1) - logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert behind.max() <= LOGPROB_TOLERANCE, f"prompt of {len(prompt)} tokens: {answer}, not {logprobs.argmax(-1).tolist()}"
    for position, top in enumerate(choice["logprobs"]["top_logprobs"]):
        for name, value in top.items():
            expected = float(logprobs[position, int(name.removeprefix("token_id:"))])
            assert abs(expected - value) <= LOGPROB_TOLERANCE, f"prompt of {len(prompt)} tokens, position {position}, {name}"
