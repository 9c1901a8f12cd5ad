from __future__ import annotations

import threading
import time

from shared.model_files.model_source import resolve_model


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
