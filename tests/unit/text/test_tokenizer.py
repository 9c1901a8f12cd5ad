from __future__ import annotations

import threading
import time

from shared.model_files.model_source import resolve_model


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
