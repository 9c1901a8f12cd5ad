"""The checks of a chaos run on real processes, tried on a stack that is only told to be one."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.chaos import real_run
from services.chaos.chaos_event import show
from services.chaos.fault_proxy import Link
from services.chaos.real_run import RealRun
from services.chaos.stack_under_test import StackMetrics


class _Stack:
    """Its metrics are what a test says."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:9"
        self.workers = ["prefill-0", "decode-0"]
        self.lanes = [Link(0, 0, "127.0.0.1", 0)]
        self.used = {"prefill-0": 0.0, "decode-0": 0.0}
        self.num_fallbacks = 0.0

    async def read_metrics(self, client: object) -> StackMetrics:
        return StackMetrics(dict(self.used), self.num_fallbacks)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RealRun:
    for name, value in (("REST_S", 0.3), ("_STATS_AGE_S", 0.0), ("_RESTART_S", 0.5), ("DETECTION_S", 1.0), ("_OBSERVER_MARGIN_S", 0.1)):
        monkeypatch.setattr(real_run, name, value)
    return RealRun(_Stack(), 10, 0)  # type: ignore[arg-type]


def test_stack_at_rest_is_fine(run):
    asyncio.run(run._come_to_rest())
    assert run._violations == []


def test_block_that_stays_in_use_is_a_violation(run):
    run._stack.used["decode-0"] = 3.0
    asyncio.run(run._come_to_rest())
    assert "blocks in use" in run._violations[0] and "decode-0" in run._violations[0]


def test_worker_that_never_comes_back_is_a_violation(run):
    del run._stack.used["prefill-0"]
    asyncio.run(run._come_to_rest())
    assert "not all workers are back" in run._violations[0]


def test_worker_in_use_too_long_after_its_death_is_a_violation(run):
    asyncio.run(run._watch_detection("decode-0", time.monotonic(), "killed"))
    assert "still in use" in run._violations[0]
    del run._stack.used["decode-0"]
    asyncio.run(run._watch_detection("decode-0", time.monotonic(), "killed"))
    assert len(run._violations) == 1 and run._detections_s[-1] < 1.0


def test_observer_that_was_held_up_itself_allows_for_it(run):
    async def check() -> None:
        watching = asyncio.create_task(run._lateness.watch())
        await asyncio.sleep(0.1)
        watched = asyncio.create_task(run._watch_detection("decode-0", time.monotonic(), "killed"))
        await asyncio.sleep(0.1)
        time.sleep(1.5)  # longer than it may take; the router had no more of the machine than we
        del run._stack.used["decode-0"]
        await watched
        watching.cancel()

    asyncio.run(check())
    assert run._violations == [] and run._detections_s[-1] > 1.5


def test_transfer_that_fails_in_a_gentle_round_is_a_violation(run):
    async def check() -> None:
        before = await run._metrics()
        run._stack.num_fallbacks = 2.0
        await run._check_gentle(before, 0)

    asyncio.run(check())
    assert "2 transfers failed" in run._violations[0]


def test_failed_check_is_shown_with_what_to_run_again(capsys):
    events = [
        {"event": "fault", "kind": "loss", "num_faults": 3},
        {"event": "violation", "what": "a block leaked", "seed": 5, "again": "pagewire chaos --simulated 1 --seed 5"},
        {"event": "done", "is_ok": False, "seed": 5, "num_faults": 3, "faults": {"loss": 3}},
    ]
    assert show(iter(events), 3, as_json=False) is False
    text = capsys.readouterr().out
    assert "a block leaked" in text and "pagewire chaos --simulated 1 --seed 5" in text and "loss 3" in text
    assert show(iter(events[2:]), 3, as_json=True) is False
    assert capsys.readouterr().out.startswith('{"event": "done"')
