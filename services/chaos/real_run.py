"""`pagewire chaos --real N`: a stack of real processes under N random faults and a steady load, round by round.

Each round makes faults while clients ask; then everything must come to rest: all clients answered, no block in use. Every fourth round is
gentle: its faults (one frame at a time damaged, lost, doubled, overtaken or late; slow wires; short stops) must fail no transfer at all.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

import httpx

from services.chaos.chaos_event import ChaosEvent
from services.chaos.client_load import ClientLoad
from services.chaos.fault_proxy import Fault, Flow, Link
from services.chaos.loop_lateness import LoopLateness
from services.chaos.stack_under_test import StackMetrics, StackUnderTest

DETECTION_S = 2.0
"""A dead or frozen worker is out of use within this, and whatever time this process was held up itself."""
REST_S = 5.0
"""After the last fault and the last answer no block may be in use for longer than this; held up itself, the stack was too."""
_OBSERVER_MARGIN_S = 0.3
_STATS_AGE_S = 1.0
"""What the router shows of a worker is as old as the worker's last renewal: less than this."""
_RESTART_S = 180.0
_FAULTS_PER_ROUND = 40
_NUM_CLIENTS = 5
_NUM_PROMPTS = 15
_STRIKE_WAIT_S = 3.0
_STRIKES = (Fault.FLIP, Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.LATE)
_WILD = {
    "abort": 20.0, "flip": 10.0, "drop": 10.0, "duplicate": 10.0, "reorder": 10.0, "late": 8.0, "flip-byte": 3.0, "drop-byte": 2.0,
    "throttle": 5.0, "delay": 5.0, "freeze": 3.0, "cut": 5.0, "stop": 4.0, "kill": 3.0,
}  # fmt: skip
"""How often each kind of fault is drawn, relative to the others."""
_GENTLE = {
    "flip": 3.0, "drop": 3.0, "duplicate": 3.0, "reorder": 3.0, "late": 2.0, "throttle": 1.0, "delay": 1.0, "stop": 1.0,
}  # fmt: skip


def run_real(num_faults: int, seed: int, num_prefill: int, num_decode: int) -> Iterator[ChaosEvent]:
    """Events as they happen; the last is "done". ConfigurationError when the stack cannot be started.

    SIGINT and SIGTERM end the run, and its stack with it, by KeyboardInterrupt.
    """
    loop = asyncio.new_event_loop()
    try:
        with StackUnderTest(num_prefill, num_decode, seed) as stack:
            events = RealRun(stack, num_faults, seed).run()
            try:
                while (event := _next_event(loop, events)) is not None:
                    yield event
            finally:
                loop.run_until_complete(events.aclose())
    finally:
        loop.close()


def _next_event(loop: asyncio.AbstractEventLoop, events: AsyncGenerator[ChaosEvent, None]) -> ChaosEvent | None:
    async def next_event() -> ChaosEvent | None:
        # By cancelling: an exception raised from a signal handler would leave the run in the middle, its tasks pending.
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await anext(events, None)

    try:
        return loop.run_until_complete(next_event())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class RealRun:
    def __init__(self, stack: StackUnderTest, num_faults: int, seed: int) -> None:
        self._stack = stack
        self._num_wanted = num_faults
        self._seed = seed
        self._random = random.Random(seed)
        self._load = ClientLoad(stack.url, seed, _NUM_CLIENTS)
        self._observer = httpx.AsyncClient()
        self._made: Counter[str] = Counter()
        self._start_s = time.monotonic()
        self._news: list[ChaosEvent] = []
        self._violations: list[str] = []
        self._num_violations = 0
        self._lasting: set[asyncio.Task[None]] = set()
        self._down: set[str] = set()
        """Workers that were killed or stopped for long and are not back in use."""
        self._is_gentle = False
        self._lateness = LoopLateness()
        self._detections_s: list[float] = []
        self._rests_s: list[float] = []

    async def run(self) -> AsyncGenerator[ChaosEvent, None]:
        watching = asyncio.create_task(self._lateness.watch())
        try:
            await self._load.learn(self._seed, num_prompts=min(_NUM_PROMPTS, 3 + self._num_wanted // 5))
            yield {"event": "stage", "what": f"{self._load.num_known} prompts with known answers; log of the stack: {self._stack.log_path}"}
            num_rounds = 0
            while self._made.total() < self._num_wanted:
                self._is_gentle = num_rounds % 4 == 3
                num_rounds += 1
                async for event in self._round(min(self._made.total() + _FAULTS_PER_ROUND, self._num_wanted)):
                    yield event
                for what in self._take_violations():
                    again = f"pagewire chaos --real {self._num_wanted} --seed {self._seed}"
                    yield {"event": "violation", "what": what, "seed": self._seed, "at_s": self._now_s(), "again": again}
        finally:
            for task in (watching, *self._lasting):
                task.cancel()
            await asyncio.gather(watching, *self._lasting, return_exceptions=True)
            await self._load.close()
            await self._observer.aclose()
        yield self._summary(num_rounds)

    def _take_news(self) -> list[ChaosEvent]:
        news, self._news = self._news, []
        return news

    def _take_violations(self) -> list[str]:
        found = [*self._violations, *self._load.violations]
        self._num_violations += len(found)
        self._violations.clear()
        self._load.violations.clear()
        return found

    def _summary(self, num_rounds: int) -> ChaosEvent:
        latencies = sorted(self._load.latencies_s) or [0.0]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            "event": "done",
            "is_ok": self._num_violations == 0,
            "seed": self._seed,
            "num_faults": self._made.total(),
            "faults": dict(sorted(self._made.items())),
            "num_rounds": num_rounds,
            "num_right": self._load.num_right,
            "errors": dict(self._load.errors),
            "num_hung_up": self._load.num_hung_up,
            "num_kv_messages": sum(link.forward.num_messages for link in self._stack.lanes),
            "kv_mib": sum(link.forward.num_bytes for link in self._stack.lanes) >> 20,
            "latency_s": {name: round(latencies[int(share * (len(latencies) - 1))], 2) for name, share in shares.items()},
            "max_detection_s": round(max(self._detections_s, default=0.0), 2),
            "max_rest_s": round(max(self._rests_s, default=0.0), 2),
            "took_s": self._now_s(),
            "num_violations": self._num_violations,
        }

    # ---- a round ------------------------------------------------------------------------------------------------------
    async def _round(self, until: int) -> AsyncGenerator[ChaosEvent, None]:
        before = await self._metrics()
        num_errors = self._load.errors.total()
        load = asyncio.create_task(self._load.run())
        try:
            while self._made.total() < until:
                await self._make_fault(self._draw_kind())
                for event in self._take_news():
                    yield event
                await asyncio.sleep(self._random.expovariate(1 / 0.15))
            if self._lasting:
                await asyncio.wait(set(self._lasting))
        finally:
            for link in self._stack.proxy.links:
                link.reset()
            self._load.stop()
            await load
        for event in self._take_news():
            yield event
        await self._come_to_rest()
        if self._is_gentle and before is not None:
            await self._check_gentle(before, num_errors)

    async def _come_to_rest(self) -> None:
        """No block in use soon; then all workers back, with none in use either."""
        start_s, late_s = time.monotonic(), self._lateness.total_s
        await asyncio.sleep(_STATS_AGE_S)
        metrics = await self._metrics()
        while (metrics is None or metrics.num_used) and time.monotonic() - start_s < REST_S + self._lateness.total_s - late_s:
            await asyncio.sleep(0.1)
            metrics = await self._metrics()
        self._rests_s.append(time.monotonic() - start_s)
        if metrics is None or metrics.num_used:
            used = "unknown" if metrics is None else metrics.used_blocks
            self._violations.append(f"blocks in use {REST_S:g} s after the last fault and the last answer: {used}")
        start_s = time.monotonic()
        while metrics is None or set(metrics.used_blocks) != set(self._stack.workers):
            if time.monotonic() - start_s > _RESTART_S:
                self._violations.append(f"not all workers are back after {_RESTART_S:g} s: {metrics and metrics.used_blocks}")
                return
            await asyncio.sleep(0.2)
            metrics = await self._metrics()
        self._down.clear()

    async def _check_gentle(self, before: StackMetrics, num_errors: int) -> None:
        after = await self._metrics()
        if after is not None and after.num_fallbacks > before.num_fallbacks:
            num_failed = int(after.num_fallbacks - before.num_fallbacks)
            self._violations.append(f"{num_failed} transfers failed in a round of faults that must fail none")
        if self._load.errors.total() > num_errors:
            self._violations.append(f"clients got errors in a round of faults that must fail nothing: {dict(self._load.errors)} in all")

    async def _metrics(self) -> StackMetrics | None:
        try:
            return await self._stack.read_metrics(self._observer)
        except httpx.HTTPError:
            return None

    # ---- faults -------------------------------------------------------------------------------------------------------
    def _draw_kind(self) -> str:
        weights = _GENTLE if self._is_gentle else _WILD
        return self._random.choices(list(weights), list(weights.values()))[0]

    async def _make_fault(self, kind: str) -> None:
        """Make it, if it can be made now, and count it."""
        if kind in {fault.value for fault in _STRIKES}:
            await self._strike(kind)
        elif kind == "abort":
            self._count(kind, "client", self._load.hang_up())
        elif kind in (Fault.FLIP_BYTE.value, Fault.DROP_BYTE.value):
            link = self._random.choice(self._stack.proxy.links)
            self._for_a_while(self._wait_for_strike(kind, link, self._random.choice((link.forward, link.back)), 0.0))
        elif kind == "cut":
            link = self._random.choice(self._stack.proxy.links)
            num_cut = self._stack.proxy.cut(link, abruptly=self._random.random() < 0.5)
            self._count(kind, self._stack.name_of(link), num_cut > 0)
        elif kind in ("throttle", "delay", "freeze"):
            self._hamper(kind)
        elif kind == "stop":
            self._stop_worker()
        elif kind == "kill":
            self._kill_worker()

    def _count(self, kind: str, where: str, is_made: bool = True) -> None:
        if is_made:
            self._made[kind] += 1
            self._news.append({"event": "fault", "kind": kind, "where": where, "at_s": self._now_s(), "num_faults": self._made.total()})

    def _now_s(self) -> float:
        return round(time.monotonic() - self._start_s, 2)

    async def _strike(self, kind: str) -> None:
        link = self._random.choice(self._stack.lanes)
        if self._is_gentle:
            # One at a time: what repairs it is not to be struck too, for a chunk that is damaged twice fails its transfer.
            await self._wait_for_strike(kind, link, link.forward, self._random.uniform(0.05, 0.5))
            await asyncio.sleep(0.2)
        else:
            self._for_a_while(self._wait_for_strike(kind, link, link.forward, self._random.uniform(0.05, 3.0)))

    async def _wait_for_strike(self, kind: str, link: Link, flow: Flow, delay_s: float) -> None:
        strike = flow.strike(Fault(kind), delay_s)
        deadline_s = time.monotonic() + _STRIKE_WAIT_S
        while not strike.is_struck and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        self._count(kind, self._stack.name_of(link), not flow.withdraw(strike))

    def _hamper(self, kind: str) -> None:
        link: Link = self._random.choice(self._stack.lanes if self._is_gentle else self._stack.proxy.links)
        flow = link.forward if self._is_gentle or self._random.random() < 0.7 else link.back
        duration_s = self._random.uniform(0.3, 1.5 if self._is_gentle else 2.5)
        rate, delay_s = self._random.uniform(0.5e6, 3e6), self._random.uniform(0.02, 0.3)

        async def hamper() -> None:
            if kind == "throttle":
                flow.bytes_per_s = rate
            elif kind == "delay":
                flow.delay_s = delay_s
            else:
                flow.is_frozen = True
            await asyncio.sleep(duration_s)
            flow.bytes_per_s, flow.delay_s, flow.is_frozen = None, 0.0, False

        self._count(kind, f"{self._stack.name_of(link)} for {duration_s:.1f} s")
        self._for_a_while(hamper())

    def _stop_worker(self) -> None:
        is_short = self._is_gentle or self._random.random() < 0.5
        worker = self._random.choice(self._stack.workers)
        # One of each kind at the most is out of use, so that the load goes on.
        if worker in self._down or (not is_short and any(_role(worker) == _role(other) for other in self._down)):
            return
        pid = self._stack.signal(worker, signal.SIGSTOP)
        if pid is None:
            return
        stopped_s = time.monotonic()
        duration_s = self._random.uniform(0.1, 0.5) if is_short else self._random.uniform(2.6, 4.0)
        self._count("stop", f"{worker} for {duration_s:.1f} s")

        async def go_on() -> None:
            try:
                if not is_short:
                    self._down.add(worker)
                    await self._watch_detection(worker, stopped_s, "stopped")
                await asyncio.sleep(max(0.0, stopped_s + duration_s - time.monotonic()))
            finally:
                self._stack.signal(worker, signal.SIGCONT)
            if not is_short:
                await self._watch_return(worker)

        self._for_a_while(go_on())

    def _kill_worker(self) -> None:
        worker = self._random.choice(self._stack.workers)
        if self._down or self._stack.signal(worker, signal.SIGKILL) is None:
            return
        killed_s = time.monotonic()
        self._down.add(worker)
        self._count("kill", worker)

        async def watch() -> None:
            await self._watch_detection(worker, killed_s, "killed")
            await self._watch_return(worker)

        self._for_a_while(watch())

    async def _watch_detection(self, worker: str, since_s: float, what: str) -> None:
        """Until the router has the worker out of use."""
        late_s = self._lateness.total_s
        while True:
            metrics = await self._metrics()
            took_s = time.monotonic() - since_s
            is_late = took_s > DETECTION_S + _OBSERVER_MARGIN_S + self._lateness.total_s - late_s
            if metrics is not None and worker not in metrics.used_blocks:
                self._detections_s.append(took_s)
                break
            if is_late:
                break
            await asyncio.sleep(0.05)
        if is_late:
            self._violations.append(f"{worker} was {what} and still in use after {took_s:.1f} s")

    async def _watch_return(self, worker: str) -> None:
        deadline_s = time.monotonic() + _RESTART_S
        while time.monotonic() < deadline_s:
            metrics = await self._metrics()
            if metrics is not None and worker in metrics.used_blocks:
                self._down.discard(worker)
                return
            await asyncio.sleep(0.2)

    def _for_a_while(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)


def _role(worker: str) -> str:
    return worker.partition("-")[0]
