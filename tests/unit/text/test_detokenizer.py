from __future__ import annotations

import random
import time

import pytest

from shared.model_files.model_source import resolve_model
from shared.text.detokenizer import IncrementalDetokenizer
from shared.text.tokenizer import Tokenizer

LLAMA = [10813, 116, 243]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model("smollm2").load_tokenizer()


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["    .", "a , b !", "do n't", "x  ?", "I am testing 🦙 ok", "世界世界", "  \n\n\t x", "é́", "👩‍👩‍👧‍👦"])
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, LLAMA + LLAMA) == ["", "", "🦙", "", "", "🦙", ""]


@pytest.mark.parametrize(("num_tokens", "text"), [(1, "�"), (2, "�"), (3, "🦙"), (4, "🦙�")])
def test_text_cut_in_a_character_ends_in_one_replacement(tokenizer: Tokenizer, num_tokens: int, text: str) -> None:
    ids = (LLAMA * 2)[:num_tokens]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert all("�" not in piece for piece in pieces[:-1])


def test_any_ids_stream_to_their_decoding(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        # Low ids are special tokens and single bytes: mostly broken UTF-8.
        ids = [rng.randrange(rng.choice([20, 300, 49152])) for _ in range(rng.randint(1, 30))]
        for skip in (True, False):
            text = "".join(stream(tokenizer, ids, skip))
            assert text == tokenizer.decode(ids, skip)
            assert text == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [7042, 2]) == [" Paris", "", ""]
    assert stream(tokenizer, [7042, 2], skip_special_tokens=False) == [" Paris", "<|im_end|>", ""]


def test_time_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    started = time.process_time()
    for _ in range(40_000):
        detokenizer.push(7042)
    assert time.process_time() - started < 1.0
