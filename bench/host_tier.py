"""What a prompt costs whose blocks come back from host memory, beside computing it and having it: TTFT of the same prompts on one decode
worker, and what storing and loading a block takes.

PYTHONPATH=.:tests/support python bench/host_tier.py
"""

from __future__ import annotations

import argparse
import statistics
import time

from local_stack import LocalStack, ids
from worker_driver import WorkerDriver

BLOCK_SIZE = 16
TAIL = 8
NUM_BLOCKS = 140
WORKER = "decode-0"
STATS_DELAY_S = 0.6
"""Statistics travel with the lease."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8, 32, 128], help=f"of the prompts; below {NUM_BLOCKS}")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    seeds = iter(range(1000, 40000))
    print("| blocks | computed, ms | from host memory, ms | cached, ms | store, ms a block | load, ms a block |\n|---|---|---|---|---|---|")
    with LocalStack("--aggregated", kv_host_cache_gib=1, num_blocks=NUM_BLOCKS) as stack, WorkerDriver(stack) as driver:

        def ttft_ms(prompt: list[int], num_cached_blocks: int = 0) -> float:
            answer = driver.finish(driver.start(prompt, None, WORKER, max_tokens=1))
            assert answer.num_cached_tokens == num_cached_blocks * BLOCK_SIZE and answer.first_token_s is not None
            return 1000 * answer.first_token_s

        def counters(names: tuple[str, ...]) -> list[float]:
            time.sleep(STATS_DELAY_S)
            return [driver.counter(WORKER, f"kv_host_{name}") for name in names]

        names = ("store_seconds", "stored_blocks", "load_seconds", "loaded_blocks")
        filler = ids(NUM_BLOCKS * BLOCK_SIZE - 1, first=9)
        for num_blocks in options.blocks:
            rows = []
            before = counters(names)
            for _ in range(options.repeat):
                prompt = ids(num_blocks * BLOCK_SIZE + TAIL, first=next(seeds))
                computed_ms = ttft_ms(prompt)
                driver.finish(driver.start(filler, None, WORKER, max_tokens=1))
                rows.append((computed_ms, ttft_ms(prompt, num_blocks), ttft_ms(prompt, num_blocks)))
            store_s, num_stored, load_s, num_loaded = (after - start for after, start in zip(counters(names), before, strict=True))
            computed, loaded, cached = (statistics.median(row[column] for row in rows) for column in range(3))
            copies = f"{1000 * store_s / max(1, num_stored):.2f} | {1000 * load_s / max(1, num_loaded):.2f}"
            print(f"| {num_blocks} | {computed:.1f} | {loaded:.1f} | {cached:.1f} | {copies} |", flush=True)


if __name__ == "__main__":
    main()
