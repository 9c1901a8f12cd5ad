"""What a user waits for: a repeated prefix is quick, and short prompts pass beside a long one. Ratios within one run."""

from __future__ import annotations

import threading
import time

import pytest
from local_stack import LocalStack, Streamed, ids


def test_repeated_prefix_of_1024_tokens_is_not_computed_again(stack: LocalStack) -> None:
    prompt = ids(1024, first=2000)
    cold_s = stack.stream(prompt, 1).ttft_s
    warm_s = []
    for _ in range(4):
        again = stack.stream(prompt, 1)
        assert again.usage is not None and again.usage["prompt_tokens_details"]["cached_tokens"] >= 1008
        warm_s.append(again.ttft_s)
    # Others may hold one up; computed again, all would take as long as the first.
    assert min(warm_s) <= 0.35 * cold_s, (cold_s, warm_s)


@pytest.mark.long
def test_short_prompts_pass_beside_a_long_one_that_loses_little(stack: LocalStack) -> None:
    """Ten 20-token prompts while 4096 tokens are being computed: each within three steps plus its time alone."""
    alone_s = max(stack.stream(ids(20, first=3000 + i), 1).ttft_s for i in range(3))
    start_s = time.monotonic()
    stack.stream(ids(4096, first=3100), 1)
    long_alone_s = time.monotonic() - start_s

    long_s: list[float] = []

    def run_long() -> None:
        begin_s = time.monotonic()
        stack.stream(ids(4096, first=3101), 1)
        long_s.append(time.monotonic() - begin_s)

    steps_before = stack.metric("pagewire:steps_total", "prefill-0")
    shorts: list[Streamed] = []
    threads = [threading.Thread(target=run_long)]
    threads += [threading.Thread(target=lambda i=i: shorts.append(stack.stream(ids(20, first=3200 + i), 1))) for i in range(10)]
    threads[0].start()
    time.sleep(1.0)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.0)  # the counters of the workers are at most a lease renewal old
    num_steps = stack.metric("pagewire:steps_total", "prefill-0") - steps_before
    step_s = long_s[0] / num_steps
    worst_s = max(short.ttft_s for short in shorts)
    print(f"alone {alone_s:.3f} s, step {step_s:.3f} s, worst of ten {worst_s:.3f} s; long {long_alone_s:.2f} -> {long_s[0]:.2f} s")
    # A step in the test is the mean one; steps beside a late part of the long prompt are up to half as long again.
    assert worst_s <= 3 * 1.5 * step_s + alone_s
    assert worst_s < 0.25 * long_s[0], "in other servers they wait for nearly the whole long prompt"
    assert long_s[0] <= 1.35 * long_alone_s + 10 * alone_s
