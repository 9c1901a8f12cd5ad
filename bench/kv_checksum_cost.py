"""What checksums cost a request: the time to take those of all KV of a prompt, at both ends, as a share of its TTFT on a real stack.

    PYTHONPATH=.:tests/support python bench/kv_checksum_cost.py [--tokens 1024] [--repeat 5]

Counted as if nothing of it ran beside the computation, which is more than it costs: only what belongs to the last chunk is not hidden.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from local_stack import LocalStack, ids

from shared.transport.protocol.frames import checksum

BLOCK_SIZE, TOKEN_NBYTES = 16, 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in fp32: layers, K and V, KV heads, head size, bytes."""


def seconds_of_checksums(num_tokens: int) -> float:
    """Of every block once at each end; the blocks stand in memory as they do in a KV cache, not in the processor's cache."""
    blocks = np.ones((-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE * TOKEN_NBYTES), np.uint8)
    start_s = time.perf_counter()
    for _end in range(2):
        for block in blocks:
            checksum(block.data)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with LocalStack() as stack:
        stack.stream(ids(options.tokens, first=1), 2)
        ttfts = [stack.stream(ids(options.tokens, first=2 + number), 2).ttft_s for number in range(options.repeat)]
    sums = [seconds_of_checksums(options.tokens) for _ in range(options.repeat)]
    ttft_s, sum_s = statistics.median(ttfts), statistics.median(sums)
    print(f"{options.tokens} tokens: TTFT {1000 * ttft_s:.0f} ms, checksums {1000 * sum_s:.1f} ms: {100 * sum_s / ttft_s:.2f} % of it")


if __name__ == "__main__":
    main()
