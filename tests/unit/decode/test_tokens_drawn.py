"""Which tokens a decode worker may draw: none that the tokenizer does not know, and no end token too early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from decode_harness import DecodeHarness
from tiny_models import TINY_CONFIG, tiny_weights, with_changes, write_tiny_hf

from shared.model_files.model_source import resolve_model
from shared.sampling_params import BeamSearchParams

PROMPT = [5, 9, 7, 30, 31]
SECOND_EOS = 0


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeHarness]:
    """A model whose configuration names two end tokens, 2 and 0."""
    directory = tmp_path_factory.mktemp("two_ends")
    write_tiny_hf(directory, with_changes(eos_token_ids=(2, SECOND_EOS)))
    with DecodeHarness(resolve_model(str(directory))) as decode:
        yield decode


def answer(decode: DecodeHarness, **fields: object) -> tuple[list[int], str | None, int | None]:
    request_id = f"r{len(decode.sent)}"
    decode.submit(request_id, PROMPT, **{"temperature": 0.0, **fields})
    decode.run()
    assert not decode.failures()
    last = decode.outputs(request_id)[-1]
    return decode.answers(request_id)[0], last.finish_reason, last.stop_token_id


@pytest.mark.parametrize("min_tokens", [0, 1, 8])
@pytest.mark.parametrize("eos", [2, SECOND_EOS])
def test_every_end_token_of_the_model_is_held_back_until_min_tokens(two_ends: DecodeHarness, eos: int, min_tokens: int) -> None:
    tokens, reason, stop_token_id = answer(two_ends, min_tokens=min_tokens, max_tokens=20, logit_bias={eos: 100})
    assert (len(tokens), tokens[-1], reason, stop_token_id) == (min_tokens + 1, eos, "stop", None)
    assert not {2, SECOND_EOS} & set(tokens[:-1])


def test_an_ignored_end_token_stops_only_whom_it_was_named_by(two_ends: DecodeHarness) -> None:
    biased = {"max_tokens": 12, "ignore_eos": True, "logit_bias": {SECOND_EOS: 100}}
    assert answer(two_ends, **biased) == ([SECOND_EOS] * 12, "length", None)
    assert answer(two_ends, **biased, stop_token_ids=(SECOND_EOS,)) == ([SECOND_EOS], "stop", SECOND_EOS)
    tokens, reason, _ = answer(two_ends, **biased, stop_token_ids=(SECOND_EOS,), min_tokens=4)
    assert (len(tokens), tokens[-1], reason) == (5, SECOND_EOS, "stop")
    assert answer(two_ends, **biased, stop_token_ids=(2,))[1] == "length"


def test_padding_of_the_head_is_never_drawn_and_takes_no_probability(tmp_path: Path) -> None:
    """One of its rows or the other is by far the largest logit, whatever the hidden state."""
    num_tokens = TINY_CONFIG.tokenizer_vocab_size
    weights = tiny_weights()
    direction = np.random.default_rng(1).normal(0, 50, TINY_CONFIG.hidden_size).astype(np.float32)
    head = weights["lm_head.weight"]
    head[num_tokens::2], head[num_tokens + 1 :: 2] = direction, -direction
    write_tiny_hf(tmp_path, weights=weights)
    fields = {"ignore_eos": True, "max_tokens": 30}
    with DecodeHarness(resolve_model(str(tmp_path))) as decode:
        decode.submit("random", PROMPT, num_sequences=10, temperature=1.0, **fields)
        decode.submit("logprobs", PROMPT, temperature=1.0, num_logprobs=num_tokens, **fields)
        decode.submit("greedy", PROMPT, temperature=0.0, **fields)
        decode.submit("beams", PROMPT, num_sequences=3, beam_search=BeamSearchParams(width=3), **fields)
        decode.run()
        drawn = [token for name in ("random", "logprobs", "greedy", "beams") for tokens in decode.answers(name) for token in tokens]
        assert len(drawn) == 15 * 30 and max(drawn) < num_tokens
        for output in decode.outputs("logprobs")[::10]:
            assert output.logprobs is not None
            assert sum(map(math.exp, output.logprobs.top_logprobs)) == pytest.approx(1, abs=1e-4)
            assert max(output.logprobs.top_token_ids) < num_tokens


def test_a_model_whose_logits_are_no_numbers_answers_with_an_error(tmp_path: Path) -> None:
    """Not with the first token of the vocabulary, over and over."""
    weights = tiny_weights()
    weights["model.norm.weight"][3] = np.nan
    write_tiny_hf(tmp_path, weights=weights)
    with DecodeHarness(resolve_model(str(tmp_path))) as decode:
        decode.submit("greedy", PROMPT, temperature=0.0, max_tokens=4)
        decode.submit("random", PROMPT, temperature=1.0, num_sequences=2, max_tokens=4)
        decode.submit("beams", PROMPT, num_sequences=2, beam_search=BeamSearchParams(width=2), max_tokens=4)
        decode.run()
        assert {failed.request_id: failed.error_type for failed in decode.failures()} == dict.fromkeys(
            ("greedy", "random", "beams"), "internal"
        )
        assert decode.num_used == 0
