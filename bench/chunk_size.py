"""What cutting a long prompt into steps costs: seconds to prefill one prompt for several time bounds and floors, in turn.

    python bench/chunk_size.py [--tokens 4096] [--repeats 3]

Justifies MIN_TIMED_BLOCKS in shared/scheduler.py: the loss against unbounded steps, measured side by side in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import shared.scheduler as scheduler_module
from shared.config import Settings
from shared.engine.engine_core import EngineCore
from shared.model_files.model_source import resolve_model
from shared.request import Request

CYCLE = [504, 3575, 282, 4649, 314, 7042, 30, 198]
VARIANTS = ((1e9, 8), (200.0, 4), (200.0, 8), (200.0, 16))
"""(max_step_ms, floor in blocks)"""


def prefill_s(engine: EngineCore, num_tokens: int, first: int, max_step_ms: float, floor: int) -> tuple[float, int]:
    scheduler_module.MIN_TIMED_BLOCKS = floor
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, max_step_s=max_step_ms / 1000)
    tokens = [first, *(CYCLE * (num_tokens // 8 + 1))[: num_tokens - 1]]
    engine.scheduler.add(Request(f"{first}", tokens, arrival_s=0.0, deadline_at_s=float("inf")))
    num_steps, start_s = 0, time.monotonic()
    while (output := engine.schedule()) is not None:
        for request in engine.run(output).completed():
            engine.scheduler.remove(request.request_id)
        num_steps += 1
    return time.monotonic() - start_s, num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    engine = EngineCore(resolve_model("smollm2"), Settings(max_num_batched_tokens=512), lambda *_: None, lambda *_: None)
    times: dict[tuple[float, int], list[float]] = {variant: [] for variant in VARIANTS}
    steps: dict[tuple[float, int], int] = {}
    first = 1000
    for _ in range(arguments.repeats):
        for variant in VARIANTS:
            seconds, steps[variant] = prefill_s(engine, arguments.tokens, first, *variant)
            times[variant].append(seconds)
            first += 1
    base = statistics.median(times[VARIANTS[0]])
    print("| max_step_ms | floor, tokens | steps | seconds (median) | speed against unbounded |\n|---|---|---|---|---|")
    for variant in VARIANTS:
        median = statistics.median(times[variant])
        print(f"| {variant[0]:g} | {variant[1] * 16} | {steps[variant]} | {median:.2f} | {base / median:.2f} |")


if __name__ == "__main__":
    main()
