"""What a user waits for, on a running stack: TTFT cold and with a repeated prefix, ITL, and short prompts beside a long one.

pagewire up &   python bench/latency.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx

CYCLE = [504, 3575, 282, 4649, 314, 7042, 30, 198]


@dataclass(frozen=True)
class Answer:
    times_s: list[float]
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def itl_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.times_s) - 1)


def ask(url: str, prompt: list[int], max_tokens: int) -> Answer:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    times: list[float] = []
    cached = 0
    start_s = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times.append(time.monotonic() - start_s)
                else:
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(times, cached)


def together(url: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda p=p: answers.append(ask(url, p, max_tokens))) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url
    fresh = iter(random.Random(time.time_ns()).sample(range(1000, 40000), 2000))

    def prompt(num_tokens: int) -> list[int]:
        return [next(fresh), next(fresh), *(CYCLE * (num_tokens // 8 + 1))][:num_tokens]

    ask(url, prompt(20), 4)
    print("| prompt | TTFT cold, s | TTFT again, s | ratio | cached tokens |\n|---|---|---|---|---|")
    for length in (64, 512, 1024):
        rows = [(ask(url, tokens, 1), ask(url, tokens, 1)) for tokens in (prompt(length) for _ in range(3))]
        cold, warm = (statistics.median(pair[i].ttft_s for pair in rows) for i in (0, 1))
        print(f"| {length} | {cold:.3f} | {warm:.3f} | {warm / cold:.2f} | {rows[-1][1].cached_tokens} |")
    print(f"\nITL alone: {ask(url, prompt(20), 40).itl_s * 1000:.1f} ms")
    itl = statistics.mean(answer.itl_s for answer in together(url, [prompt(20) for _ in range(16)], 40))
    print(f"ITL of 16 streams: {itl * 1000:.1f} ms")
    alone = statistics.median(ask(url, prompt(20), 1).ttft_s for _ in range(3))
    long_alone = ask(url, prompt(4096), 1).ttft_s
    long: list[Answer] = []
    thread = threading.Thread(target=lambda: long.append(ask(url, prompt(4096), 1)))
    thread.start()
    time.sleep(1.0)
    shorts = sorted(answer.ttft_s for answer in together(url, [prompt(20) for _ in range(10)], 1))
    thread.join()
    print(f"20 tokens alone: {alone:.3f} s; ten of them beside 4096: median {statistics.median(shorts):.3f} s, worst {shorts[-1]:.3f} s")
    print(f"4096 tokens alone: {long_alone:.2f} s; with the ten beside: {long[0].ttft_s:.2f} s")


if __name__ == "__main__":
    main()
