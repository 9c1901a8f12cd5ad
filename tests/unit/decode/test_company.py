"""A batch whose members come, go and are preempted at random: each answer is the one that its request gets alone."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from decode_harness import DecodeHarness
from tiny_models import TINY_CONFIG, write_tiny_hf

from shared.model_files.model_source import ModelSource, resolve_model
from shared.sampling_params import BeamSearchParams

NUM_REQUESTS = 30
VOCAB = TINY_CONFIG.tokenizer_vocab_size


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


def random_request(rng: random.Random) -> dict[str, Any]:
    """Most parameters off, each sometimes on, so that what one row leaves behind would show in another."""
    fields: dict[str, Any] = {
        "prompt": [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))],
        "max_tokens": rng.randint(1, 15),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.5]),
        "seed": rng.randrange(2**40),
        "ignore_eos": rng.random() < 0.7,
    }
    few = [rng.randrange(VOCAB) for _ in range(3)]
    options: dict[str, Any] = {
        "top_k": rng.randint(1, 30),
        "top_p": rng.uniform(0.1, 1),
        "min_p": rng.uniform(0, 0.5),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {token: rng.uniform(-100, 100) for token in few},
        "allowed_token_ids": tuple(rng.sample(range(VOCAB), 40)),
        "bad_words": ("hello", "a"),
        "min_tokens": rng.randint(0, fields["max_tokens"]),
        "stop_token_ids": tuple(few),
        "num_logprobs": rng.randint(0, 5),
        "num_sequences": rng.randint(2, 4),
    }
    fields |= {name: value for name, value in options.items() if rng.random() < 0.2}
    if rng.random() < 0.1:
        fields["num_sequences"] = fields.get("num_sequences", 2)
        fields["beam_search"] = BeamSearchParams(width=fields["num_sequences"])
    return fields


def what_came(decode: DecodeHarness, request_id: str) -> list[list[tuple[int | None, str | None, int | None, Any]]]:
    answers: dict[int, list[tuple[int | None, str | None, int | None, Any]]] = {}
    for output in decode.outputs(request_id):
        logprobs = output.logprobs and (output.logprobs.rank, output.logprobs.top_token_ids)
        answers.setdefault(output.sequence_index, []).append((output.token_id, output.finish_reason, output.stop_token_id, logprobs))
    return [answers[index] for index in sorted(answers)]


def turn(decode: DecodeHarness) -> None:
    if not decode.turn():
        time.sleep(0.001)  # all that is left waits for its mask, which is computed beside the steps


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_answer_depends_on_the_others_in_the_batch(source: ModelSource, async_scheduling: bool) -> None:
    rng = random.Random(1)
    requests = {f"r{number}": random_request(rng) for number in range(NUM_REQUESTS)}
    aborted: set[str] = set()
    with DecodeHarness(source, num_blocks=14, max_num_seqs=12, async_scheduling=async_scheduling) as decode:
        waiting = list(requests)
        while waiting or decode.worker._jobs:
            while waiting and len(decode.worker._jobs) < 8 and rng.random() < 0.7:
                request_id = waiting.pop(0)
                decode.submit(request_id, **requests[request_id])
            if decode.worker._jobs and rng.random() < 0.05:
                request_id = rng.choice(list(decode.worker._jobs))
                aborted.add(request_id)
                decode.abort(request_id)
            turn(decode)
        num_preempted = sum(output.num_preemptions for request_id in requests for output in decode.outputs(request_id))
        assert decode.num_used == 0 and not decode.failures()
        together = {request_id: what_came(decode, request_id) for request_id in requests}
    with DecodeHarness(source, num_blocks=200) as decode:
        for request_id, fields in requests.items():
            decode.submit(request_id, **fields)
            while decode.worker._jobs:
                turn(decode)
            alone = what_came(decode, request_id)
            if request_id in aborted:
                for whole, part in zip(alone, together[request_id], strict=False):
                    assert whole[: len(part)] == part
            else:
                assert together[request_id] == alone, fields
    assert aborted and num_preempted, "the case shows less than it should"
