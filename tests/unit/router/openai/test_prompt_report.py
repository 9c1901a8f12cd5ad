"""Parts of a prompt's log-probabilities, put together; where its tokens stand in the echoed text."""

from __future__ import annotations

import itertools

import pytest

from services.router.openai.prompt_logprobs import PromptLogprobsAssembler, first_alternatives, text_offsets
from shared.messages import PromptLogprobs, TokenLogprobs
from shared.model_files.model_source import resolve_model
from shared.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model("smollm2").load_tokenizer()


def part(first: int, *logprobs: float) -> PromptLogprobs:
    entries = tuple(TokenLogprobs(logprob=value, rank=1, top_token_ids=(), top_logprobs=()) for value in logprobs)
    return PromptLogprobs(request_id="r", first_position=first, entries=entries)


PARTS = [part(1, -1, -2), part(3, -3), part(4, -4, -5)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_in_any_order_make_the_whole(order: tuple[int, ...]) -> None:
    assembler = PromptLogprobsAssembler(6)
    for index in order:
        assert not assembler.is_complete
        assembler.add(PARTS[index])
    assert assembler.is_complete
    assert [entry and entry.logprob for entry in assembler.entries] == [None, -1, -2, -3, -4, -5]


def test_parts_that_come_again_count_once() -> None:
    assembler = PromptLogprobsAssembler(6)
    for again in (PARTS[0], PARTS[1], PARTS[0], part(1, -1, -2, -3)):
        assembler.add(again)
        assert not assembler.is_complete
    assembler.add(part(2, -2, -3, -4, -5, -6, -7))  # more than there is
    assert assembler.is_complete
    assert len(assembler.entries) == 6


def test_one_token_has_nothing_to_wait_for() -> None:
    assert PromptLogprobsAssembler(1).is_complete


def test_alternatives_are_cut_to_what_was_asked_for() -> None:
    entry = TokenLogprobs(logprob=-3, rank=9, top_token_ids=(1, 2, 3), top_logprobs=(-1, -2, -2.5))
    assert first_alternatives(entry, 2) == TokenLogprobs(logprob=-3, rank=9, top_token_ids=(1, 2), top_logprobs=(-1, -2))
    assert first_alternatives(entry, 3) is entry
    assert first_alternatives(None, 3) is None


def test_offsets_are_where_the_tokens_stand_in_the_text(tokenizer: Tokenizer) -> None:
    text = "Hello, 世界 \U0001f999 world"
    token_ids = tokenizer.encode(text)
    offsets = text_offsets(tokenizer, token_ids, False, text)
    assert offsets == sorted(offsets)
    for token_id, offset in zip(token_ids, offsets, strict=True):
        piece = tokenizer.token_text(token_id)
        assert "�" in piece or text[offset:].startswith(piece)


def test_a_token_put_in_front_of_the_text_moves_no_offset(tokenizer: Tokenizer) -> None:
    text = "Hello world"
    plain = text_offsets(tokenizer, tokenizer.encode(text), False, text)
    assert text_offsets(tokenizer, [1, *tokenizer.encode(text)], False, text) == [0, *plain]


def test_skipped_tokens_take_no_room(tokenizer: Tokenizer) -> None:
    token_ids = [1, *tokenizer.encode("Hello"), 2, *tokenizer.encode(" world")]
    assert text_offsets(tokenizer, token_ids, True, tokenizer.decode(token_ids)) == [0, 0, 5, 5]
