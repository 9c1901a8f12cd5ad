"""Prefill and decode apart answer exactly as one worker that does both, for every parameter, prompt, cache state and load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from parity_answers import Answer, answer_to, differences
from parity_cases import DEFAULTS, PARAMETERS, SEEDED, SHAPES, matrix, pressure
from parity_run import Comparison, Systems, compare, num_preemptions, running_systems
from parity_table import TABLE, render

pytestmark = pytest.mark.timeout(600)
NUM_COMPANIONS = 32
STEP = 14
"""Of the cases that are tried each time. Not a multiple of three: the states of the cache go round."""


@pytest.fixture(scope="module")
def systems() -> Iterator[Systems]:
    with running_systems() as running:
        yield running


@pytest.fixture(scope="module", params=[STEP, pytest.param(1, marks=pytest.mark.long)])
def comparisons(systems: Systems, request: pytest.FixtureRequest) -> list[Comparison]:
    return compare(systems, request.param)


def test_the_matrix_has_every_set_with_every_kind_of_prompt() -> None:
    cases = [*matrix(), *pressure()]
    assert len(cases) >= 250
    assert len(set(cases)) == len(cases)
    assert {case.parameters for case in cases} == set(PARAMETERS)
    assert {case.shape for case in cases} == set(SHAPES)
    for name in PARAMETERS:
        assert {case.cache_state for case in cases if case.parameters == name} == {"cold", "warm", "half warm"}


def test_both_systems_answer_alike(comparisons: list[Comparison]) -> None:
    assert {comparison.case.name: sorted(comparison.differences) for comparison in comparisons if comparison.differences} == {}


def test_streamed_or_not_and_cached_or_not_the_answer_is_the_same(comparisons: list[Comparison]) -> None:
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for comparison in comparisons:
        if not comparison.case.is_under_pressure:
            groups[comparison.case.parameters, comparison.case.shape] += [comparison.apart, comparison.together]
    different = {key for key, (first, *others) in groups.items() for other in others if differences(first, other) - {"usage"}}
    assert different == set()


@pytest.mark.long
@pytest.mark.parametrize("comparisons", [1], indirect=True)
def test_the_published_table_is_what_was_found(comparisons: list[Comparison]) -> None:
    assert TABLE.read_text() == render(comparisons), "run tests/parity/parity_table.py"


def test_seeded_text_is_the_same_alone_in_company_elsewhere_and_streamed(systems: Systems) -> None:
    body = {**DEFAULTS, **SEEDED}
    alone = answer_to(systems.apart, "/v1/completions", body)
    for stack in systems.both():
        assert not differences(alone, answer_to(stack, "/v1/completions", {**body, "cache_salt": "elsewhere"}))
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "streamed"}
        assert not differences(alone, answer_to(stack, "/v1/completions", streamed))
        with ThreadPoolExecutor(NUM_COMPANIONS + 1) as pool:
            unseeded = {**body, "seed": None, "prompt": "The capital of Germany is"}
            companions = [pool.submit(answer_to, stack, "/v1/completions", unseeded) for _ in range(NUM_COMPANIONS)]
            assert not differences(alone, answer_to(stack, "/v1/completions", body))
            assert all(companion.result().choices for companion in companions)


@pytest.mark.long
def test_seeded_text_survives_preemption(systems: Systems) -> None:
    """The latest request is the one that gives way."""
    body = {**DEFAULTS, **SEEDED, "max_tokens": 90}
    alone = answer_to(systems.apart, "/v1/completions", body)
    for stack in systems.both():
        before = num_preemptions(stack)
        with ThreadPoolExecutor(29) as pool:
            unseeded = {**body, "seed": None, "prompt": "The capital of Germany is"}
            companions = [pool.submit(answer_to, stack, "/v1/completions", unseeded) for _ in range(28)]
            stack.wait_until(lambda stack=stack: stack.metric("pagewire:kv_blocks_used", "decode-0") >= 20, 30)
            assert not differences(alone, answer_to(stack, "/v1/completions", body))
            assert all(companion.result().choices for companion in companions)
        stack.wait_until_idle()
        assert num_preemptions(stack) > before, "the pool was not small enough to show anything"
