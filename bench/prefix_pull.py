"""What fetching a prefix from another worker costs, beside computing it and having it: TTFT of the same prompts on one decode worker.

PYTHONPATH=.:tests/support python bench/prefix_pull.py [--transport shm]
"""

from __future__ import annotations

import argparse
import statistics

from local_stack import LocalStack, ids
from worker_driver import WorkerDriver

BLOCK_SIZE = 16
TAIL = 8
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "ipc", "tcp"))
    transport = parser.parse_args().transport
    seeds = iter(range(1000, 40000))
    print("| blocks | computed, ms | pulled, ms | cached, ms | a pull costs, ms |\n|---|---|---|---|---|")
    with LocalStack("--prefill", "1", "--decode", "2", kv_transport=transport) as stack, WorkerDriver(stack) as driver:

        def ttft_ms(prompt: list[int], worker: str, pulled_blocks: int = 0) -> float:
            pull = driver.ask_for_prefix("decode-0", worker, prompt, pulled_blocks) if pulled_blocks else None
            answer = driver.finish(driver.start(prompt, None, worker, pull, max_tokens=1))
            assert answer.num_cached_tokens >= pulled_blocks * BLOCK_SIZE and answer.first_token_s is not None
            return 1000 * answer.first_token_s

        for num_blocks in (2, 8, 32, 128):
            rows = []
            for _ in range(REPEATS + 1):  # the first one opens connections
                prompt = ids(num_blocks * BLOCK_SIZE + TAIL, first=next(seeds))
                rows.append((ttft_ms(prompt, "decode-0"), ttft_ms(prompt, "decode-1", num_blocks), ttft_ms(prompt, "decode-1")))
            computed, pulled, cached = (statistics.median(row[column] for row in rows[1:]) for column in range(3))
            print(f"| {num_blocks} | {computed:.1f} | {pulled:.1f} | {cached:.1f} | {pulled - cached:.1f} |", flush=True)


if __name__ == "__main__":
    main()
