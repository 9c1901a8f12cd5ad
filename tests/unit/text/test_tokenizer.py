from __future__ import annotations

import threading
import time

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from shared.model_files.model_source import resolve_model
from shared.text.tokenizer import Tokenizer


def test_others_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer = resolve_model("smollm2").load_tokenizer()
    num_ticks, is_ticking, is_done = 0, threading.Event(), threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_done.is_set():
            time.sleep(0.002)
            num_ticks += 1
            is_ticking.set()

    ticker = threading.Thread(target=tick)
    ticker.start()
    assert is_ticking.wait(30)
    before = num_ticks
    num_tokens = len(tokenizer.encode("a" * 1_000_000))
    during = num_ticks - before
    is_done.set()
    ticker.join()
    assert num_tokens > 10_000
    assert during > 10, "hundreds on a machine that does nothing else, one or two if the encoder kept the GIL"


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Metaspace(prepend_scheme="always"), "a b"),
        (decoders.Metaspace(prepend_scheme="first"), "a b"),
        (decoders.Metaspace(prepend_scheme="never"), " a b"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), "a b"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), " a b"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 1, 0)]), " a b"),
    ],
)
def test_a_leading_space_goes_only_where_the_tokenizer_puts_one(decoder: decoders.Decoder, text: str) -> None:
    backend = tokenizers.Tokenizer(BPE({"▁a": 0, "▁b": 1}, [], byte_fallback=True))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, eos_token_ids=(), bos_token_id=None, add_bos=False)
    assert tokenizer.decode([0, 1]) == backend.decode([0, 1]) == text
