from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from services.router.openai.choice import ChoiceAssembler, TextOptions, TokenPiece
from shared.messages import RequestOutput
from shared.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte: ids are the ranks of the sorted byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=[], bos_token_id=None, add_bos=False)


def run(tokenizer: Tokenizer, text: str, options: TextOptions, ends_with_stop_token: bool = False) -> list[TokenPiece]:
    token_ids = tokenizer.encode(text)
    assembler = ChoiceAssembler(tokenizer, options)
    pieces: list[TokenPiece] = []
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        reason = ("stop" if ends_with_stop_token else "length") if is_last else None
        pieces.append(assembler.push(RequestOutput(request_id="r", token_id=token_id, index=index, finish_reason=reason)))
        if pieces[-1].finish_reason:
            break
    return pieces


def text_of(pieces: list[TokenPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_one_piece_a_token_even_when_its_text_is_held_back(tokenizer: Tokenizer) -> None:
    pieces = run(tokenizer, "aé€b", TextOptions())
    assert [piece.text for piece in pieces] == ["a", "", "é", "", "", "€", "b"]
    assert [piece.text_offset for piece in pieces] == [0, 1, 1, 2, 2, 2, 3]
    assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    pieces = run(tokenizer, "xWXY", TextOptions(stops=["WXYZ!"]))
    assert [piece.text for piece in pieces] == ["x", "", "", "WXY"]


def test_stop_string_wins_over_length_at_the_same_token(tokenizer: Tokenizer) -> None:
    pieces = run(tokenizer, "abcd", TextOptions(stops=["cd"]))
    assert text_of(pieces) == "ab"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "cd")


def test_included_stop_string_is_part_of_the_text(tokenizer: Tokenizer) -> None:
    assert text_of(run(tokenizer, "abcdef", TextOptions(stops=["cd"], include_stop=True))) == "abcd"


def test_stop_strings_do_not_end_before_min_tokens(tokenizer: Tokenizer) -> None:
    assert text_of(run(tokenizer, "a.b.c.d", TextOptions(stops=["."], min_tokens=3))) == "a.b"


def test_stop_token_is_no_text(tokenizer: Tokenizer) -> None:
    pieces = run(tokenizer, "ab!", TextOptions(), ends_with_stop_token=True)
    assert text_of(pieces) == "ab"
    assert [piece.is_text for piece in pieces] == [True, True, False]
    pieces = run(tokenizer, "ab!", TextOptions(include_stop=True), ends_with_stop_token=True)
    assert text_of(pieces) == "ab!"
    assert pieces[-1].is_text
