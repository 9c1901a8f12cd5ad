"""Both systems and all cases: `compare` says for each case in which respects they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from local_stack import LocalStack
from parity_answers import Answer, ask, differences
from parity_cases import CHUNK, Case, matrix, pressure

NUM_AT_ONCE = 16
NUM_DECODE_BLOCKS = 120
"""Enough for NUM_AT_ONCE cases of the matrix; far too few for all of `pressure`."""


@dataclass(frozen=True)
class Systems:
    apart: LocalStack
    """One prefill and one decode worker."""
    together: LocalStack
    """One worker that does both."""

    def both(self) -> tuple[LocalStack, LocalStack]:
        return self.apart, self.together


@dataclass(frozen=True)
class Comparison:
    case: Case
    differences: set[str]
    apart: Answer
    together: Answer


@contextlib.contextmanager
def running_systems() -> Iterator[Systems]:
    settings = {"max_num_batched_tokens": CHUNK, "num_blocks": NUM_DECODE_BLOCKS, "debug": "true"}
    # Prefill loses nothing of what a case has warmed, however long the case waits behind the others on a busy machine.
    with LocalStack(**settings, prefill_num_blocks=4 * NUM_DECODE_BLOCKS) as apart, LocalStack("--aggregated", **settings) as together:
        yield Systems(apart, together)


def answers(stack: LocalStack, step: int) -> dict[Case, Answer]:
    """Each `step`-th case of the matrix in company, then everything of `pressure` at once."""
    cases, pressed = matrix()[::step], pressure()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        found = dict(zip(cases, pool.map(lambda case: ask(stack, case), cases), strict=True))
    before = num_preemptions(stack)
    with ThreadPoolExecutor(len(pressed)) as pool:
        found |= dict(zip(pressed, pool.map(lambda case: ask(stack, case), pressed), strict=True))
    stack.wait_until_idle()
    assert num_preemptions(stack) > before, "the pool was not small enough to show anything"
    return found


def num_preemptions(stack: LocalStack) -> float:
    return stack.counter("decode-0", "preemptions")


def compare(systems: Systems, step: int = 1) -> list[Comparison]:
    apart, together = answers(systems.apart, step), answers(systems.together, step)
    return [Comparison(case, differences(apart[case], together[case]), apart[case], together[case]) for case in apart]
