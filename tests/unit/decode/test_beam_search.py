"""Beam search on a decode worker against the plain definition, which recomputes every hypothesis at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decode_harness import DecodeHarness
from plain_beam_search import plain_beam_search
from tiny_models import write_tiny_hf

from services.decode.beam_search import BeamSearch
from shared.engine.reference_model import forward
from shared.engine.sampler import SamplingRow
from shared.engine.weights import load_weights
from shared.model_files.model_source import ModelSource, resolve_model
from shared.sampling_params import BeamSearchParams, SamplingParams

PROMPT = [5, 9, 7, 30, 31, 32, 33, 34, 35, 36]
EOS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


@pytest.fixture(scope="module")
def logits_of(source: ModelSource) -> Callable[[tuple[int, ...]], torch.Tensor]:
    weights = load_weights(source, torch.float32, "cpu")

    @functools.cache
    def last_row(token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return forward(weights, source.config, list(token_ids))[-1, : source.config.tokenizer_vocab_size]

    return last_row


@pytest.fixture(scope="module")
def roomy(source: ModelSource) -> Iterator[DecodeHarness]:
    with DecodeHarness(source) as decode:
        yield decode


def search(decode: DecodeHarness, width: int, num_sequences: int | None = None, **fields: Any) -> list[list[int]]:
    names = BeamSearchParams.model_fields
    params = BeamSearchParams(width=width, **{name: fields.pop(name) for name in list(fields) if name in names})
    request_id = f"r{len(decode.sent)}"
    decode.submit(request_id, PROMPT, num_sequences=num_sequences or width, beam_search=params, **fields)
    decode.run()
    assert decode.num_used == 0 and len(decode.worker._sequences) == 0
    assert not decode.failures()
    return decode.answers(request_id)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_equals_the_plain_search(roomy: DecodeHarness, logits_of: Any, width: int, length_penalty: float, early_stopping: bool) -> None:
    """A bias makes the stop token likely enough for hypotheses to end at different lengths."""
    bias = torch.zeros(len(logits_of((1,))))
    bias[EOS] = 4.0
    expected = plain_beam_search(lambda tokens: logits_of(tuple(tokens)) + bias, PROMPT, width, 7, (EOS,), length_penalty, early_stopping)
    found = search(roomy, width, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=7, logit_bias={EOS: 4.0})
    assert found == [tokens for _, tokens in expected]
    assert width == 1 or any(tokens[-1] == EOS for tokens in found), "no hypothesis ended early: the case shows nothing"


@pytest.mark.parametrize("settings", [{"num_blocks": 6}, {"max_num_seqs": 1}, {"num_blocks": 6, "enable_prefix_caching": False}])
def test_beams_that_do_not_fit_side_by_side_take_turns(source: ModelSource, roomy: DecodeHarness, settings: dict[str, int]) -> None:
    fields = {"max_tokens": 10, "ignore_eos": True}
    with DecodeHarness(source, **settings) as decode:
        assert search(decode, 4, **fields) == search(roomy, 4, **fields)


def test_ignored_eos_and_stop_ids_are_told_apart(roomy: DecodeHarness, logits_of: Any) -> None:
    expected = plain_beam_search(lambda tokens: logits_of(tuple(tokens)), PROMPT, 3, 6)
    found = search(roomy, 3, max_tokens=6, ignore_eos=True)
    assert found == [tokens for _, tokens in expected]
    stop = found[0][2]
    expected = plain_beam_search(lambda tokens: logits_of(tuple(tokens)), PROMPT, 3, 6, (stop,))
    assert search(roomy, 3, max_tokens=6, ignore_eos=True, stop_token_ids=(stop,)) == [tokens for _, tokens in expected]


def test_fewer_answers_than_beams_are_the_best_ones(roomy: DecodeHarness) -> None:
    assert search(roomy, 4, num_sequences=2, max_tokens=5) == search(roomy, 4, max_tokens=5)[:2]


def test_every_answer_has_its_logprobs_and_its_reason(source: ModelSource, logits_of: Any) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=2, beam_search=BeamSearchParams(width=2), max_tokens=4, num_logprobs=3, ignore_eos=True)
        decode.run()
        outputs = [output for output in decode.outputs("r") if output.sequence_index == 1]
    tokens = [output.token_id for output in outputs]
    for index, output in enumerate(outputs):
        logprobs = logits_of(tuple(PROMPT + tokens[:index])).log_softmax(-1)
        assert output.logprobs is not None
        assert output.logprobs.logprob == pytest.approx(float(logprobs[output.token_id]), abs=1e-4)
        assert output.logprobs.top_token_ids == tuple(logprobs.topk(3).indices.tolist())
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]


def test_blocks_are_shared_and_dropped_beams_give_theirs_back(source: ModelSource) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT * 4, num_sequences=4, beam_search=BeamSearchParams(width=4), max_tokens=30, ignore_eos=True)
        decode.run()
        # 10 full blocks of the prompt; each beam at most its 30 tokens and a tail.
        assert decode.peak_num_used <= 10 + 4 * (30 // 4 + 2)


def test_where_masks_leave_one_answer_it_is_repeated(roomy: DecodeHarness) -> None:
    assert search(roomy, 3, max_tokens=4, allowed_token_ids=(40,)) == [[40] * 4] * 3


def test_min_tokens_hold_the_end_back(roomy: DecodeHarness) -> None:
    found = search(roomy, 2, max_tokens=8, min_tokens=3, logit_bias={EOS: 50.0})
    assert min(map(len, found)) == 4 and all(tokens[-1] == EOS for tokens in found)


def test_the_search_goes_on_beside_other_requests_in_a_pool_too_small_for_all(source: ModelSource, roomy: DecodeHarness) -> None:
    alone = search(roomy, 3, max_tokens=10, ignore_eos=True)
    with DecodeHarness(source, num_blocks=12) as decode:
        decode.submit("a", PROMPT, num_sequences=3, beam_search=BeamSearchParams(width=3), max_tokens=10, ignore_eos=True)
        decode.submit("b", PROMPT, num_sequences=3, beam_search=BeamSearchParams(width=3), max_tokens=10, ignore_eos=True)
        decode.submit("c", [50, 51, 52], num_sequences=4, max_tokens=16, seed=1, ignore_eos=True)
        decode.run()
        assert decode.answers("a") == decode.answers("b") == alone
        assert [len(tokens) for tokens in decode.answers("c")] == [16] * 4
        assert decode.num_used == 0


@pytest.mark.parametrize("num_turns", [1, 2, 6])
def test_an_abort_ends_the_search(source: ModelSource, num_turns: int) -> None:
    with DecodeHarness(source, num_blocks=8) as decode:
        decode.submit("r", PROMPT, num_sequences=4, beam_search=BeamSearchParams(width=4), max_tokens=16)
        for _ in range(num_turns):
            decode.turn()
        decode.abort("r", 0)  # a sequence of a beam search is none of the client's
        decode.turn()
        assert "r" in decode.worker._jobs
        decode.abort("r")
        decode.turn()
        assert decode.num_used == 0 and len(decode.worker._sequences) == 0 and not decode.outputs("r")


def test_logits_that_are_not_numbers_are_an_error_not_an_answer() -> None:
    beams = BeamSearch(BeamSearchParams(width=2), 5, frozenset(), frozenset())
    beams.take_logits(0, torch.full((8,), float("nan")))
    with pytest.raises(ValueError, match="no token"):
        beams.advance({0: SamplingRow(SamplingParams(), 0, [1, 2], 2, frozenset())})
