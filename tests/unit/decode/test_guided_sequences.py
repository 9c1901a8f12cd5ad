"""Answers held to a grammar on a decode worker: forks, beams, masks that are late, grammars that fail."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from decode_harness import DecodeHarness
from tiny_models import write_tiny_hf

from services.decode import worker as decode_worker
from shared.messages import RequestFailed
from shared.model_files.model_source import ModelSource, resolve_model
from shared.sampling_params import BeamSearchParams, StructuredOutput
from shared.text.tokenizer import Tokenizer

PROMPT = [5, 9, 7, 30, 31, 32, 33, 34, 35, 36]
PATTERN = r"[a-c]{2,6}(-[0-9]{1,3}){3}"
FREE = {"temperature": 1.5, "seed": 7, "max_tokens": 30}


def held(lark: str) -> dict[str, Any]:
    return {"structured_output": StructuredOutput(grammar=lark, param="guided_regex")}


MATCHING = held(f"start: /{PATTERN}/")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return source.load_tokenizer()


@pytest.fixture
def decode(source: ModelSource) -> Iterator[DecodeHarness]:
    with DecodeHarness(source) as running:
        yield running


@pytest.fixture
def always_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for a mask, so that nearly every one is late."""
    monkeypatch.setattr(decode_worker, "wait_until_ready", lambda guides, timeout_s: None)


def run(decode: DecodeHarness, until: Callable[[], object] | None = None) -> None:
    """Until nothing is left, or `until`; masks may be waited for between turns."""
    deadline_s = time.monotonic() + 60
    while decode.worker._jobs if until is None else not until():
        assert time.monotonic() < deadline_s, "it does not end"
        if not decode.turn():
            time.sleep(0.0005)


def texts(decode: DecodeHarness, tokenizer: Tokenizer, request_id: str = "r") -> list[str]:
    return [tokenizer.decode(tokens) for tokens in decode.answers(request_id)]


def answers(source: ModelSource, num_sequences: int = 4, **settings: Any) -> list[list[int]]:
    with DecodeHarness(source, **settings) as decode:
        decode.submit("r", PROMPT, num_sequences=num_sequences, **FREE, **MATCHING)
        run(decode)
        assert not decode.failures()
        assert decode.num_used == 0
        assert not decode.worker._late
        return decode.answers("r")


@pytest.fixture(scope="module")
def roomy(source: ModelSource) -> list[list[int]]:
    return answers(source)


def test_each_sequence_has_its_own_state(source: ModelSource, tokenizer: Tokenizer, roomy: list[list[int]]) -> None:
    found = [tokenizer.decode(tokens) for tokens in roomy]
    assert all(re.fullmatch(PATTERN, text) for text in found)
    assert len(set(found)) == 4
    assert answers(source, 1) == roomy[:1]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14}, {"num_blocks": 9}, {"max_num_seqs": 1}])
def test_late_masks_and_preemption_change_no_token_and_double_none(
    source: ModelSource, roomy: list[list[int]], always_late: None, settings: dict[str, int]
) -> None:
    assert answers(source, **settings) == roomy


def test_preemption_changes_no_token(source: ModelSource, roomy: list[list[int]]) -> None:
    assert answers(source, num_blocks=9) == roomy


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_beams_follow_the_grammar(source: ModelSource, tokenizer: Tokenizer, num_blocks: int) -> None:
    beams = {"num_sequences": 3, "beam_search": BeamSearchParams(width=3, length_penalty=1.0, early_stopping=False)}
    with DecodeHarness(source, num_blocks=num_blocks) as decode:
        decode.submit("r", PROMPT, **beams, max_tokens=30, **MATCHING)
        run(decode)
        found = texts(decode, tokenizer)
        assert all(re.fullmatch(PATTERN, text) for text in found)
        assert len(set(found)) == 3
        assert decode.num_used == 0


def test_beams_find_what_a_grammar_of_few_answers_leaves(decode: DecodeHarness, tokenizer: Tokenizer, always_late: None) -> None:
    choices = ["ab", "ba", "abc"]
    beams = {"num_sequences": 3, "beam_search": BeamSearchParams(width=4, length_penalty=1.0, early_stopping=False)}
    grammar = held("start: " + " | ".join(map(json.dumps, choices)))
    decode.submit("r", PROMPT, **beams, max_tokens=30, ignore_eos=True, **grammar)
    run(decode)
    assert set(texts(decode, tokenizer)) <= set(choices)
    assert {output.finish_reason for output in decode.outputs("r")} == {None, "stop"}


def test_a_complete_answer_ends_with_stop_even_where_eos_is_ignored(decode: DecodeHarness, tokenizer: Tokenizer) -> None:
    decode.submit("r", PROMPT, **FREE, ignore_eos=True, min_tokens=20, **held('start: "ab"'))
    run(decode)
    assert texts(decode, tokenizer) == ["ab"]
    assert decode.outputs("r")[-1].finish_reason == "stop"


def failed(decode: DecodeHarness) -> RequestFailed:
    [failure] = decode.failures()
    assert decode.num_used == 0
    assert not decode.worker._late
    assert (failure.error_type, failure.retryable) == ("invalid_request", False)
    return failure


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (held("start: start"), "guided_regex"),
        ({**held('start: "ab"'), "allowed_token_ids": (3,)}, "guided_regex"),
        ({**held('start: "ab"'), "bad_words": ("ab",)}, "guided_regex"),
        ({"allowed_token_ids": tuple(range(3, 10)), "bad_words": tuple("!\"#$%&'()*+")}, "bad_words"),
    ],
)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_grammar_that_leaves_nothing_ends_its_own_request(
    decode: DecodeHarness, fields: dict[str, Any], param: str, num_sequences: int
) -> None:
    decode.submit("r", PROMPT, num_sequences=num_sequences, **FREE, **fields)
    decode.submit("other", PROMPT, temperature=0.0, max_tokens=6)
    run(decode)
    assert failed(decode).param == param
    assert len(decode.answers("other")[0]) == 6


@pytest.fixture
def blocked(source: ModelSource, tokenizer: Tokenizer) -> Iterator[DecodeHarness]:
    """A worker whose grammars wait for a tokenizer that does not come before the fixture ends."""
    may_load = threading.Event()

    def load() -> Tokenizer:
        may_load.wait(120)
        return tokenizer

    with DecodeHarness(source) as running:
        running.worker._grammars._load_tokenizer = load
        running.submit("r", PROMPT, num_sequences=3, **FREE, **MATCHING)
        running.submit("other", PROMPT, temperature=0.0, max_tokens=6)
        run(running, lambda: "other" not in running.worker._jobs)
        assert len(running.answers("other")[0]) == 6, "others do not wait"
        assert not running.outputs("r")
        yield running
        may_load.set()


def test_who_waits_for_a_grammar_can_be_aborted(blocked: DecodeHarness) -> None:
    assert blocked.num_used > 0
    blocked.abort("r")
    run(blocked)
    assert blocked.num_used == 0
    assert not blocked.worker._late
    assert not blocked.failures()


def test_who_waits_too_long_for_a_grammar_is_told(blocked: DecodeHarness) -> None:
    [(key, (sequence, hidden, _))] = blocked.worker._late.items()
    blocked.worker._late[key] = (sequence, hidden, 0.0)
    run(blocked)
    assert "took longer" in failed(blocked).message


def test_a_mask_that_comes_while_its_sequence_is_computed_again_fails_no_step(source: ModelSource, tokenizer: Tokenizer) -> None:
    """32 tokens fill their blocks; 12 of them a step, the last chunk would take a token drawn meanwhile along, and its block is missing."""
    with DecodeHarness(source, max_num_batched_tokens=12, enable_prefix_caching=False) as decode:
        worker, may_compile = decode.worker, threading.Event()
        worker._grammars._compiler.submit(may_compile.wait, 120)
        decode.submit("r", (PROMPT * 4)[:32], **FREE, **MATCHING)
        run(decode, lambda: worker._late)
        request = worker._sequences["r"].request
        worker.engine.scheduler._preempt(request)
        run(decode, lambda: request.num_computed_tokens == 24)
        may_compile.set()
        deadline_s = time.monotonic() + 60
        while worker._inbox.empty():
            assert time.monotonic() < deadline_s, "the mask does not come"
            time.sleep(0.001)
        run(decode)
        assert not decode.failures()
        assert re.fullmatch(PATTERN, texts(decode, tokenizer)[0])
        assert decode.num_used == 0
