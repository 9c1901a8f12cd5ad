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
    gaps: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        last_s = time.perf_counter()
        while not is_done.is_set():
            time.sleep(0.002)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.05)
    start_s = time.perf_counter()
    num_tokens = len(tokenizer.encode("a" * 1_000_000))
    took_s = time.perf_counter() - start_s
    is_done.set()
    ticker.join()
    assert num_tokens > 10_000
    assert max(gaps) < took_s / 3


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
