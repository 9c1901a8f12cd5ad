"""Scheduler: budget, chunks, fairness, admission, preemption."""

from __future__ import annotations

import random

import pytest
from host_tier_cache import HostTierCache

from shared.batch import SchedulerOutput
from shared.block_hash import root_hash
from shared.cache.block_pool import BlockPool
from shared.cache.kv_cache_manager import KVCacheManager
from shared.request import Request, RequestStatus
from shared.sampling_params import SamplingParams
from shared.scheduler import MAX_BYPASSES, Scheduler, SchedulerLimits

BLOCK_SIZE = 16


def scheduler(budget: int = 64, num_blocks: int = 1000, threshold: int = 0, max_num_seqs: int = 64, max_step_s: float = 0.2) -> Scheduler:
    manager = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, root_hash("m", "float32", BLOCK_SIZE))
    return Scheduler(manager, SchedulerLimits(budget, max_num_seqs, threshold, max_step_s, BLOCK_SIZE))


def prompt(name: str, num_tokens: int, arrival_s: float = 0.0, generates: bool = False, priority: int = 0) -> Request:
    base = sum(map(ord, name)) * 10_000
    sampling = SamplingParams(max_tokens=1000) if generates else None
    tokens = [base + i for i in range(num_tokens)]
    return Request(name, tokens, arrival_s=arrival_s, deadline_at_s=1e9, sampling=sampling, priority=priority)


def chunks(output: SchedulerOutput | None) -> dict[str, int]:
    return {row.request.request_id: row.num_new_tokens for row in output.scheduled} if output else {}


def step(s: Scheduler, generate: bool = False, step_s: float = 0.0) -> dict[str, int]:
    """One step; with `generate`, completed requests get a token; without, they leave."""
    output = s.schedule()
    if output is None:
        return {}
    s.update(output, step_s)
    for row in output.scheduled:
        if row.request.num_uncomputed_tokens == 0:
            if generate:
                row.request.token_ids.append(7)
            else:
                s.remove(row.request.request_id)
    s.manager.check_invariants()
    return chunks(output)


def test_alone_a_long_prompt_takes_the_whole_budget_in_spite_of_the_threshold() -> None:
    s = scheduler(budget=512, threshold=64)
    s.add(prompt("long", 2048))
    assert [step(s)["long"] for _ in range(4)] == [512] * 4


def test_in_company_a_long_prompt_is_capped_by_the_threshold() -> None:
    s = scheduler(budget=512, threshold=64)
    s.add(prompt("long", 2048, arrival_s=0))
    s.add(prompt("other", 600, arrival_s=1))
    assert step(s)["long"] <= 64


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    s = scheduler(budget=64)
    s.add(prompt("a", 1000))
    sizes = []
    while len(s):
        sizes.append(step(s)["a"])
    assert sizes == [64] * 15 + [40]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_completes_exactly_once(length: int) -> None:
    s = scheduler(budget=16)
    s.add(prompt("a", length))
    completions = 0
    for _ in range(10):
        output = s.schedule()
        if output is None:
            break
        completions += sum(row.completes for row in output.scheduled)
        s.update(output, 0.0)
        if output.scheduled[0].completes:
            s.remove("a")
    assert completions == 1


def test_ten_short_prompts_pass_beside_a_long_one_within_three_steps() -> None:
    s = scheduler(budget=80)
    s.add(prompt("long", 4096, arrival_s=0))
    step(s)
    for i in range(10):
        s.add(prompt(f"short{i}", 20, arrival_s=1 + i))
    served: set[str] = set()
    for _ in range(3):
        rows = step(s)
        assert rows["long"] >= 80 // 8, "the long prompt must go on"
        served |= {name for name in rows if name.startswith("short")}
    assert len(served) == 10


def test_no_prompt_starves_under_a_stream_of_shorter_ones() -> None:
    s = scheduler(budget=64)
    s.add(prompt("long", 1000, arrival_s=0))
    num_steps = 0
    while s.running or s.waiting:
        if not any(name == "long" for name in (*s.running, *s.waiting)):
            break
        for i in range(4):
            s.add(prompt(f"s{num_steps}-{i}", 20, arrival_s=1 + num_steps))
        step(s)
        num_steps += 1
        assert num_steps <= 1000 / (64 / 8) + 1, "the oldest is owed an eighth of every step"


def test_decode_rows_come_first_and_take_one_token() -> None:
    s = scheduler(budget=64)
    for name in ("a", "b"):
        s.add(prompt(name, 3, generates=True))
    step(s, generate=True)
    s.add(prompt("p", 100, arrival_s=5))
    output = s.schedule()
    assert output is not None
    assert [row.num_new_tokens for row in output.scheduled] == [1, 1, 48]  # 62 left, cut at a block boundary
    assert output.num_decode_rows == 2


def test_budget_follows_the_measured_speed() -> None:
    s = scheduler(budget=2048, max_step_s=0.2)
    s.step_time.calibrate((16, 0.056), (128, 0.168))  # 40 ms + 1 ms a token
    s.add(prompt("a", 10_000))
    assert step(s, step_s=0.2)["a"] == 160
    for _ in range(20):
        step(s, step_s=2 * (0.040 + 0.001 * s.token_budget()))  # the machine is half as fast now
    assert s.token_budget() == 128, "never below eight blocks"
    for _ in range(20):
        step(s, step_s=0.040 + 0.001 * s.token_budget())
    assert s.token_budget() == 144 or s.token_budget() == 160, "and back when it is fast again"


def test_max_num_seqs_bounds_a_step() -> None:
    s = scheduler(budget=1000, max_num_seqs=3)
    for i in range(6):
        s.add(prompt(f"p{i}", 10, arrival_s=i))
    assert len(step(s)) == 3


def test_out_of_blocks_preempts_the_latest_and_it_resumes() -> None:
    s = scheduler(budget=64, num_blocks=5)
    for i in range(2):
        s.add(prompt(f"r{i}", 30, arrival_s=i, generates=True))
    step(s, generate=True)
    requests = {**s.running}
    preempted = []
    for _ in range(8):
        output = s.schedule()
        assert output is not None
        preempted += [request.request_id for request in output.preempted]
        s.update(output, 0.0)
        for row in output.scheduled:
            if row.request.num_uncomputed_tokens == 0:
                row.request.token_ids.append(7)
        s.manager.check_invariants()
    assert preempted == ["r1"]
    assert requests["r1"].status is RequestStatus.PREEMPTED
    assert requests["r1"].num_preemptions == 1
    s.remove("r0")
    resumed = step(s, generate=True)
    assert list(resumed) == ["r1"]
    assert requests["r1"].num_uncomputed_tokens == 1, "it goes on where it was"


def test_lower_priority_is_preempted_first_whoever_came_first() -> None:
    s = scheduler(budget=64, num_blocks=5)
    s.add(prompt("background", 30, arrival_s=0, generates=True, priority=5))
    s.add(prompt("urgent", 30, arrival_s=1, generates=True, priority=0))
    step(s, generate=True)
    for _ in range(4):
        step(s, generate=True)
    assert "urgent" in s.running and "background" in s.waiting


def test_one_that_waits_for_blocks_is_not_passed_for_ever() -> None:
    s = scheduler(budget=1000, num_blocks=32)
    s.add(prompt("holder", 400, arrival_s=0, generates=True))
    step(s, generate=True)
    s.add(prompt("big", 150, arrival_s=1))
    num_passed = 0
    for i in range(100):
        s.add(prompt(f"tiny{i}", 5, arrival_s=2 + i))
        rows = step(s, generate=True)
        num_passed += any(name.startswith("tiny") for name in rows)
        s.remove(f"tiny{i}")
    assert 0 < num_passed <= MAX_BYPASSES
    assert "big" in s.waiting
    s.remove("holder")
    assert "big" in step(s)


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_ends_with_every_request_done_and_no_block_held(seed: int) -> None:
    rng = random.Random(seed)
    s = scheduler(budget=rng.choice([16, 48, 100]), num_blocks=24, max_num_seqs=rng.choice([2, 5, 64]))
    limits: dict[str, int] = {}
    finished: set[str] = set()
    for turn in range(3000):
        if turn < 300 and rng.random() < 0.3:
            name = f"r{turn}"
            r = prompt(name, rng.randint(1, 120), arrival_s=turn, generates=True, priority=rng.choice([0, 0, 1]))
            limits[name] = r.num_prompt_tokens + rng.randint(1, 40)
            s.add(r)
        if rng.random() < 0.02 and (s.running or s.waiting):
            name = rng.choice([*s.running, *s.waiting])
            s.remove(name)
            finished.add(name)
        output = s.schedule()
        if output is None:
            if turn > 300:
                break
            continue
        s.update(output, rng.random() * 0.05)
        for row in output.scheduled:
            r = row.request
            if r.num_uncomputed_tokens == 0:
                r.token_ids.append(rng.randrange(50))
                if r.num_tokens >= limits[r.request_id]:
                    s.remove(r.request_id)
                    finished.add(r.request_id)
        s.manager.check_invariants()
    assert finished == set(limits)
    assert s.manager.num_used() == 0


def test_with_one_place_an_urgent_newcomer_does_not_stop_everything() -> None:
    s = scheduler(budget=16, max_num_seqs=1)
    s.add(prompt("long", 64, arrival_s=1))
    step(s)
    s.add(prompt("urgent", 16, arrival_s=2, priority=-1))
    names = [next(iter(step(s)), None) for _ in range(4)]
    assert names == ["long", "long", "long", "urgent"]


def with_host_tier(num_blocks: int) -> tuple[HostTierCache, Scheduler]:
    """Where the prompts A and B, four blocks each, have been computed; A has been evicted to host memory since."""
    cache = HostTierCache(num_blocks, 8)
    cache.serve("a", HOST_A)
    cache.serve("b", HOST_B)
    return cache, Scheduler(cache.manager, SchedulerLimits(64, 8, 0, 0.2, cache.manager.block_size))


HOST_A, HOST_B = list(range(17)), list(range(100, 125))


def test_a_request_runs_when_its_blocks_have_come_from_host_memory_and_others_run_meanwhile() -> None:
    cache, s = with_host_tier(num_blocks=7)
    s.add(Request("again", HOST_A, arrival_s=0.0, deadline_at_s=1e9))
    s.add(Request("other", [500, 501], arrival_s=1.0, deadline_at_s=1e9))
    assert step(s) == {"other": 2}
    assert step(s) == {}
    cache.run_loads()
    assert step(s) == {"again": 1}
    cache.check()
    assert cache.manager.num_used() == 0


def test_a_generating_request_takes_no_step_before_its_blocks_are_there() -> None:
    cache, s = with_host_tier(num_blocks=7)
    request = Request("again", list(HOST_A), arrival_s=0.0, deadline_at_s=1e9, sampling=SamplingParams(max_tokens=9))
    assert cache.manager.reserve(request)
    request.num_computed_tokens = 17  # the rest, and the first token, have come from a prefill worker
    request.token_ids.append(7)
    s.add_running(request)
    assert s.schedule() is None
    cache.run_loads()
    assert step(s) == {"again": 1}


def test_a_request_whose_blocks_did_not_come_from_host_memory_is_computed_from_the_start() -> None:
    cache, s = with_host_tier(num_blocks=7)
    request = Request("again", HOST_A, arrival_s=0.0, deadline_at_s=1e9)
    s.add(request)
    assert step(s) == {}
    assert request.num_cached_tokens == 16
    cache.store.is_failing = True
    cache.run_loads()
    assert step(s) == {}
    assert request.status is RequestStatus.PREEMPTED
    assert step(s) == {"again": 17}
    assert request.num_cached_tokens == 0
    assert cache.manager.num_used() == 0
