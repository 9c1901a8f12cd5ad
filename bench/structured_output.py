"""What a JSON schema costs a token: ITL of streams held to one against the ITL of the same streams without, in turns, on a running stack.

pagewire up &   python bench/structured_output.py [--url http://127.0.0.1:8000] [--streams 8] [--rounds 8]

With --decode-pid also the CPU time of the decode worker a token, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import httpx
import psutil

NUM_TOKENS = 64
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["red", "green", "blue"]},
        "size": {"type": "number", "minimum": 0, "maximum": 100},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    },
    "required": ["name", "kind", "size", "code"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 50}
"""Long enough that every stream is inside of it until its last token."""


def itl_s(url: str, seed: int, held: bool) -> float:
    body: dict[str, Any] = {"prompt": "A list of things as JSON:", "max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": seed}
    body |= {"stream": True, "ignore_eos": True} | ({"guided_json": SCHEMA} if held else {})
    times: list[float] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        times.extend(time.monotonic() for line in response.iter_lines() if line.startswith("data: {"))
    assert len(times) == NUM_TOKENS
    return (times[-1] - times[0]) / (len(times) - 1)


def together(url: str, num_streams: int, held: bool) -> float:
    """Mean ITL in ms of streams that start at once."""
    found: list[float] = []
    threads = [threading.Thread(target=lambda seed=seed: found.append(itl_s(url, seed, held))) for seed in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.mean(found) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--decode-pid", type=int)
    arguments = parser.parse_args()
    decode = psutil.Process(arguments.decode_pid) if arguments.decode_pid else None
    cpu_s: dict[bool, list[float]] = {False: [], True: []}

    def measure(held: bool) -> float:
        before = sum(decode.cpu_times()[:2]) if decode else 0.0
        result = together(arguments.url, arguments.streams, held)
        cpu_s[held].append((sum(decode.cpu_times()[:2]) if decode else 0.0) - before)
        return result

    for held in (False, True):  # caches, tokenizer, compilation
        together(arguments.url, arguments.streams, held)
    rounds = [[measure(held) for held in (False, True)] for _ in range(arguments.rounds)]
    plain, held = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print("| streams | ITL without, ms | ITL with a schema, ms | ratio, median of the rounds | rounds |\n|---|---|---|---|---|")
    print(f"| {arguments.streams} | {plain:.1f} | {held:.1f} | {ratio:.3f} | {' '.join(f'{b / a:.2f}' for a, b in rounds)} |")
    if decode:
        without, with_schema = (statistics.median(cpu_s[held]) / arguments.streams / NUM_TOKENS * 1000 for held in (False, True))
        print(f"CPU of decode a token: {without:.2f} ms without, {with_schema:.2f} ms with a schema, ratio {with_schema / without:.3f}")


if __name__ == "__main__":
    main()
