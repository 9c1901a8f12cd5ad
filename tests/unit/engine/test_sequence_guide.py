"""Masks of real grammars over a real tokenizer, one token a byte and a few longer ones."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny_models import SPECIAL_TOKENS, TINY_TOKENS, tiny_tokenizer_json

from shared.engine import structured_output
from shared.engine.structured_output import Grammars, SequenceGuide, TokenMask, wait_until_ready, without
from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams, StructuredOutput
from shared.text.tokenizer import Tokenizer

EOS = 2
VOCAB_SIZE = len(TINY_TOKENS)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    return Tokenizer(backend, eos_token_ids=[EOS], bos_token_id=1, add_bos=False)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    running = Grammars(lambda: tokenizer, VOCAB_SIZE, [EOS])
    yield running
    running.close()


def params(lark: str | None = None, schema: Any = None, **others: Any) -> SamplingParams:
    grammar = lark if schema is None else json.dumps({"grammars": [{"json_schema": schema}]})
    return SamplingParams(structured_output=StructuredOutput(grammar=grammar, param="p") if grammar else None, **others)


def ready(guide: SequenceGuide | None) -> SequenceGuide:
    assert guide is not None
    wait_until_ready([guide], 10)
    assert guide.is_ready
    return guide


def allowed(mask: TokenMask) -> set[int]:
    assert len(mask) == -(-VOCAB_SIZE // 32)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def push(guide: SequenceGuide, *token_ids: int) -> SequenceGuide:
    for token_id in token_ids:
        guide.push(token_id)
        ready(guide)
    return guide


def test_a_random_walk_along_the_masks_ends_in_a_valid_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(20):
        guide = ready(grammars.guide(params(schema=OBJECT)))
        output: list[int] = []
        while EOS not in output:
            output.append(rng.choice(sorted(allowed(guide.mask))))
            if output[-1] != EOS:
                push(guide, output[-1])
        value = json.loads(tokenizer.decode(output))
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 4
        assert 0 <= value["age"] <= 99


def test_state_is_a_function_of_grammar_and_output(grammars: Grammars, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode('{"name":"he')
    stepped = push(ready(grammars.guide(params(schema=OBJECT))), *output)
    rebuilt = ready(grammars.guide(params(schema=OBJECT), output))
    assert (stepped.mask == rebuilt.mask).all()
    push(stepped, *tokenizer.encode("l"))
    assert (rebuilt.mask == ready(grammars.guide(params(schema=OBJECT), output)).mask).all(), "sequences share no state"


def test_forks_stand_where_their_parent_stood_and_then_go_their_own_ways(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    parent = push(ready(grammars.guide(params("start: /a(aa|bb|ab)x/"))), a)
    children = [parent.fork(), parent.fork()]
    assert all(child.is_ready and (child.mask == parent.mask).all() for child in children)
    push(children[0], b)
    assert allowed(parent.mask) == allowed(children[1].mask) == {a, b}
    push(parent, a, a)
    grandchild = children[1].fork()
    push(children[1], a, b)
    assert allowed(children[0].mask) == {b}
    assert allowed(parent.mask) == allowed(children[1].mask) == set(tokenizer.encode("x"))
    assert allowed(grandchild.mask) == {a, b}


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    before = grammars.num_compiled
    for _ in range(5):
        ready(grammars.guide(params('start: "once"')))
    assert grammars.num_compiled == before + 1


def test_the_least_used_grammars_are_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_NUM_COMPILED", 2)
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE, [EOS])
    for text in "abacab":  # c pushes b out, b then c
        ready(grammars.guide(params(f'start: "{text}"')))
    assert grammars.num_compiled == 4
    grammars.close()


def test_eos_comes_only_where_the_answer_is_complete(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = ready(grammars.guide(params("start: /[0-9]+/")))
    assert EOS not in allowed(guide.mask)
    assert EOS in allowed(push(guide, *tokenizer.encode("1")).mask)
    guide = ready(grammars.guide(params('start: "x"')))
    assert allowed(push(guide, *tokenizer.encode("x")).mask) == {EOS}


def test_who_ignores_eos_goes_on_while_the_grammar_does(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = ready(grammars.guide(params("start: /[0-9]{1,2}/", ignore_eos=True)))
    assert EOS not in allowed(push(guide, *tokenizer.encode("1")).mask)
    assert allowed(push(guide, *tokenizer.encode("2")).mask) == {EOS}


@pytest.mark.parametrize("text", ["hello", " world hello", "xhello", "hell no", "x" * 50])
def test_bad_words_never_occur_however_they_are_cut(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    """Token by token as well as by the tokenizer's own merges, up to the token that would complete the word."""
    for token_ids in (tokenizer.encode(text), [token for character in text for token in tokenizer.encode(character)]):
        guide = ready(grammars.guide(params(bad_words=("hello", "oo"))))
        output: list[int] = []
        for token_id in token_ids:
            completes = any(word in tokenizer.decode([*output, token_id]) for word in ("hello", "oo"))
            assert (token_id in allowed(guide.mask)) == (not completes)
            if completes:
                break
            output.append(token_id)
            push(guide, token_id)


def test_special_tokens_are_no_bad_words_and_hide_none(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = ready(grammars.guide(params(bad_words=("ab",))))
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    special = set(range(len(SPECIAL_TOKENS)))
    assert special <= allowed(guide.mask)
    assert b not in allowed(push(guide, a, 0, EOS).mask), "special tokens are not text"
    assert special <= allowed(guide.mask)


def test_grammar_and_bad_words_hold_together(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = ready(grammars.guide(params("start: /[ab]{3}/", bad_words=("aa",))))
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    assert allowed(guide.mask) == {a, b}
    assert allowed(push(guide, a).mask) == {b}


def test_a_grammar_that_admits_nothing_fails_its_own_sequence(grammars: Grammars) -> None:
    wrong = ready(grammars.guide(params("start: start")))
    with pytest.raises(InvalidRequestError):
        _ = wrong.mask
    assert allowed(ready(grammars.guide(params('start: "x"'))).mask)


def test_a_model_without_eos_has_no_structured_output(tokenizer: Tokenizer) -> None:
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE, [])
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        _ = ready(grammars.guide(params('start: "x"'))).mask
    grammars.close()


def test_a_late_mask_is_not_waited_for_and_tells_when_it_is_there(tokenizer: Tokenizer) -> None:
    may_load, is_there = threading.Event(), threading.Event()

    def load() -> Tokenizer:
        may_load.wait(60)
        return tokenizer

    grammars = Grammars(load, VOCAB_SIZE, [EOS])
    guide = grammars.guide(params('start: "x"'))
    assert guide is not None
    wait_until_ready([guide], 0.01)
    assert not guide.is_ready
    guide.when_ready(is_there.set)
    assert not is_there.is_set()
    may_load.set()
    assert is_there.wait(60)
    assert allowed(guide.mask) == set(tokenizer.encode("x"))
    grammars.close()


def test_plain_requests_have_no_guide(grammars: Grammars) -> None:
    assert grammars.guide(SamplingParams()) is None


def test_without_clears_only_its_bits() -> None:
    mask = np.full(2, 0xFFFFFFFF, np.uint32)
    assert allowed_bits(without(mask, [0, 31, 32, 63, 64, -1])) == set(range(64)) - {0, 31, 32, 63}
    assert mask.all()


def allowed_bits(mask: TokenMask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
