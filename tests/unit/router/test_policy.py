from __future__ import annotations

import random
from dataclasses import replace

from services.router.policy import Candidate, RequestFacts, Route, prefill_cost_ms, select
from shared.transport.protocol.kv_format import KVFormat

FACTS = RequestFacts(num_prompt_tokens=512, local_prefill_max_tokens=16)
DECODE = [Candidate("d", 1, tokens_per_s=1000)]


def prefill_workers(loads: list[int], **fields: object) -> list[Candidate]:
    return [Candidate(f"p{index}", 1, num_requests=load, tokens_per_s=10_000, **fields) for index, load in enumerate(loads)]  # type: ignore[arg-type]


def chosen(route: Route | None) -> str:
    assert route is not None
    assert route.prefill is not None
    return route.prefill.worker_id


def test_holder_of_the_prefix_is_preferred() -> None:
    workers = prefill_workers([0, 0, 0])
    workers[1] = replace(workers[1], overlap_blocks=10)
    assert chosen(select(FACTS, workers, DECODE)) == "p1"


def test_blocks_in_the_cache_are_preferred_to_those_in_host_memory_and_those_to_none() -> None:
    workers = prefill_workers([0, 0, 0])
    workers[0] = replace(workers[0], overlap_blocks=20, num_host_blocks=20)
    assert chosen(select(FACTS, workers, DECODE)) == "p0"
    workers[1] = replace(workers[1], overlap_blocks=20, num_host_blocks=4)
    assert chosen(select(FACTS, workers, DECODE)) == "p1"
    workers[2] = replace(workers[2], overlap_blocks=20)
    assert chosen(select(FACTS, workers, DECODE)) == "p2"
    decode = [replace(DECODE[0], overlap_blocks=20, num_host_blocks=20), Candidate("e", 1, overlap_blocks=20, tokens_per_s=1000)]
    route = select(replace(FACTS, num_prompt_tokens=330), prefill_workers([0]), decode)
    assert route is not None and route.decode.worker_id == "e"


def test_a_prefix_is_pulled_from_the_cache_of_a_holder_rather_than_from_its_host_memory() -> None:
    facts = replace(FACTS, num_prompt_tokens=600)
    holders = [Candidate("on host", 1, overlap_blocks=31, num_host_blocks=31, tokens_per_s=1000, num_requests=50)]
    holders.append(replace(holders[0], worker_id="cached", num_host_blocks=0, num_requests=60))
    for others, expected in ((holders[:1], "on host"), (holders, "cached")):
        route = select(facts, [*others, Candidate("idle", 1, tokens_per_s=1000)], DECODE)
        assert route is not None and route.pull is not None
        assert (chosen(route), route.pull.holder.worker_id) == ("idle", expected)


def test_blocks_in_host_memory_that_the_prompt_cannot_use_cost_nothing() -> None:
    facts = replace(FACTS, num_prompt_tokens=64)
    holder = Candidate("p", 1, overlap_blocks=4, num_host_blocks=1, tokens_per_s=1000)
    assert facts.load_ms(holder, facts.saved_blocks(holder)) == 0


def test_busy_worker_does_not_switch_off_affinity_for_others() -> None:
    workers = prefill_workers([50, 1, 1, 1])
    workers[3] = replace(workers[3], overlap_blocks=20)
    assert chosen(select(FACTS, workers, DECODE)) == "p3"


def test_queue_at_the_holder_sends_the_prefix_elsewhere() -> None:
    workers = prefill_workers([10, 0])
    workers[0] = replace(workers[0], overlap_blocks=31)
    assert chosen(select(FACTS, workers, DECODE)) == "p1"


def test_waiting_tokens_count_by_the_workers_own_speed() -> None:
    fast = Candidate("fast", 1, num_waiting_tokens=10_000, tokens_per_s=100_000)
    slow = Candidate("slow", 1, num_waiting_tokens=1_000, tokens_per_s=1_000)
    assert chosen(select(FACTS, [slow, fast], DECODE)) == "fast"


def test_equal_workers_take_turns() -> None:
    workers = prefill_workers([0, 0, 0])
    counts = {worker.worker_id: 0 for worker in workers}
    for _ in range(30):
        winner = chosen(select(FACTS, workers, DECODE))
        counts[winner] += 1
        workers = [replace(worker, num_assigned=counts[worker.worker_id]) for worker in workers]
    assert set(counts.values()) == {10}


def test_block_with_the_last_token_is_of_no_use() -> None:
    facts = replace(FACTS, num_prompt_tokens=64)
    holder = Candidate("p", 1, overlap_blocks=4, tokens_per_s=1000)
    assert facts.usable_blocks(holder) == 3
    assert prefill_cost_ms(facts, holder) == 16.0
    assert replace(facts, num_prompt_tokens=65).usable_blocks(holder) == 4


def test_each_worker_is_priced_in_blocks_of_its_own_size() -> None:
    small = Candidate("small", 1, overlap_blocks=8, tokens_per_s=1000, kv_format=KVFormat("float32", 8))
    large = Candidate("large", 1, overlap_blocks=4, tokens_per_s=1000, kv_format=KVFormat("float32", 32))
    route = select(FACTS, [small, large], DECODE)
    assert route is not None
    assert chosen(route) == "large"
    assert route.num_saved_tokens == 128


def test_only_workers_that_can_exchange_kv_are_paired() -> None:
    odd, half = replace(DECODE[0], worker_id="odd", kv_format=KVFormat("float32", 24)), KVFormat("float16", 16)
    cheap = Candidate("cheap", 1, tokens_per_s=100_000, kv_format=KVFormat("float32", 16, "fp8"))
    fits = Candidate("fits", 1, tokens_per_s=1000, kv_format=half)
    route = select(FACTS, [cheap, fits], [odd, DECODE[0]])
    assert route is not None
    assert (chosen(route), route.decode.worker_id) == ("fits", "d")
    assert select(FACTS, prefill_workers([0]), [odd]) is None
    assert select(FACTS, prefill_workers([0]), [replace(DECODE[0], kv_format=half)]) is None, "fp32 would be rounded"


def test_a_prefix_is_fetched_only_from_a_worker_of_the_same_format() -> None:
    holder = Candidate("holder", 1, overlap_blocks=31, num_requests=50, kv_format=KVFormat("float32", 8))
    route = select(FACTS, [holder, Candidate("idle", 1, tokens_per_s=1000)], DECODE)
    assert route is not None
    assert route.pull is None


def test_short_tail_behind_a_cached_prefix_stays_on_decode_even_without_prefill_workers() -> None:
    holder = replace(DECODE[0], overlap_blocks=31)
    for prefill in ([], prefill_workers([0])):
        route = select(FACTS, prefill, [holder])
        assert route is not None
        assert route.is_local
        assert route.decode_overlap_blocks == 31
    assert not select(replace(FACTS, num_prompt_tokens=513), prefill_workers([0]), [holder]).is_local  # type: ignore[union-attr]


def test_prompt_shorter_than_a_block_never_stays_on_decode() -> None:
    route = select(replace(FACTS, num_prompt_tokens=10), prefill_workers([0]), DECODE)
    assert route is not None
    assert not route.is_local


def test_decode_pool_without_room_is_avoided() -> None:
    full = Candidate("a-full", 1, num_blocks_total=100, num_blocks_used=90)
    free = Candidate("b-free", 1, num_blocks_total=100, num_blocks_used=10, num_requests=8)
    route = select(FACTS, prefill_workers([0]), [full, free])
    assert route is not None
    assert route.decode.worker_id == "b-free"


def test_no_pair_is_none() -> None:
    assert select(FACTS, [], DECODE) is None
    assert select(FACTS, prefill_workers([0]), []) is None


def test_popular_prefix_spreads_over_the_workers() -> None:
    """200 requests that share 512 tokens, arriving at twice the speed of one worker (50 ms a request)."""
    generator = random.Random(7)
    service_ms, num_workers = 50.0, 4
    free_at_ms = [0.0] * num_workers
    ends: list[list[float]] = [[] for _ in range(num_workers)]
    holds = [False] * num_workers
    counts = [0] * num_workers
    waits_ms = []
    now_ms = 0.0
    for _ in range(200):
        now_ms += generator.expovariate(1 / (service_ms / 2))
        workers = [
            Candidate(
                f"p{index}", 1, overlap_blocks=31 if holds[index] else 0, num_requests=sum(end > now_ms for end in ends[index]),
                tokens_per_s=10_000, num_assigned=counts[index],
            )
            for index in range(num_workers)
        ]  # fmt: skip
        index = int(chosen(select(FACTS, workers, [replace(DECODE[0], can_pull=False)]))[1:])
        free_at_ms[index] = max(now_ms, free_at_ms[index]) + service_ms
        ends[index].append(free_at_ms[index])
        waits_ms.append(free_at_ms[index] - now_ms)
        holds[index] = True
        counts[index] += 1
    assert max(counts[:]) <= 0.45 * 200
    assert sorted(waits_ms)[190] < 4 * service_ms


def test_aggregated_decode_computes_every_prompt() -> None:
    route = select(replace(FACTS, is_aggregated=True), [], [*DECODE, Candidate("e", 1, overlap_blocks=10, tokens_per_s=1000)])
    assert route is not None and route.is_local
    assert (route.decode.worker_id, route.decode_overlap_blocks) == ("e", 10)


def test_a_scored_prompt_gains_nothing_from_a_cached_prefix_where_it_is_computed() -> None:
    facts = replace(FACTS, is_scored=True)
    workers = prefill_workers([1, 0])
    workers[0] = replace(workers[0], overlap_blocks=31)
    assert chosen(select(facts, workers, DECODE)) == "p1"
    # Decode holds all but a tail: it would have to compute everything, so prefill does; but the blocks need not be sent again.
    route = select(facts, workers, [replace(DECODE[0], overlap_blocks=31)])
    assert route is not None and not route.is_local
    assert (route.prefill_overlap_blocks, route.decode_overlap_blocks) == (0, 31)


def test_prefix_is_pulled_where_that_costs_less_than_computing_it() -> None:
    busy, idle = replace(prefill_workers([10])[0], overlap_blocks=31, tokens_per_s=1000), Candidate("idle", 1, tokens_per_s=1000)
    route = select(FACTS, [busy, idle], DECODE)
    assert route is not None and route.pull is not None
    assert (route.pull.holder.worker_id, route.pull.num_blocks, route.num_saved_tokens) == ("p0", 31, 496)
    # The decode worker itself, then the tail is one block: a hop less.
    assert route.is_local
    route = select(replace(FACTS, num_prompt_tokens=600), [busy, idle], DECODE)
    assert route is not None and route.pull is not None
    assert (chosen(route), route.pull.holder.worker_id, route.num_saved_tokens) == ("idle", "p0", 496)


def test_prefix_is_computed_where_that_costs_less_than_pulling_it() -> None:
    holder = Candidate("holder", 1, overlap_blocks=31, num_requests=50, tokens_per_s=100_000)
    route = select(FACTS, [holder, Candidate("fast", 1, tokens_per_s=100_000)], [replace(DECODE[0], tokens_per_s=100_000)])
    assert chosen(route) == "fast"
    assert route is not None and route.pull is None


def test_a_few_blocks_are_not_worth_a_pull_and_an_own_prefix_needs_none() -> None:
    for own, there in ((0, 1), (30, 31), (31, 31), (31, 10)):
        prefill = Candidate("p", 1, overlap_blocks=own, tokens_per_s=2000)
        decode = Candidate("d", 1, overlap_blocks=there, tokens_per_s=2000)
        route = select(replace(FACTS, num_prompt_tokens=600), [prefill], [decode])
        assert route is not None and route.pull is None, (own, there)


def test_prefill_pulls_from_decode_what_decode_has_generated() -> None:
    facts = replace(FACTS, num_prompt_tokens=600)
    route = select(facts, [Candidate("p", 1, overlap_blocks=10, tokens_per_s=1000)], [replace(DECODE[0], overlap_blocks=31)])
    assert route is not None and route.pull is not None
    assert (chosen(route), route.pull.holder.worker_id, route.pull.num_blocks) == ("p", "d", 31)
    assert (route.prefill_overlap_blocks, route.decode_overlap_blocks) == (10, 31)


def test_nothing_is_pulled_for_a_scored_prompt_or_by_a_worker_that_cannot() -> None:
    facts = replace(FACTS, num_prompt_tokens=600)
    prefill, decode = [Candidate("p", 1, tokens_per_s=1000)], [replace(DECODE[0], overlap_blocks=31)]
    for route in (select(replace(facts, is_scored=True), prefill, decode), select(facts, [replace(prefill[0], can_pull=False)], decode)):
        assert route is not None and route.pull is None


def test_aggregated_workers_pull_from_each_other() -> None:
    busy = Candidate("busy", 1, overlap_blocks=31, num_waiting_tokens=5000, tokens_per_s=1000)
    route = select(replace(FACTS, is_aggregated=True), [], [busy, *DECODE])
    assert route is not None and route.pull is not None and route.is_local
    assert (route.decode.worker_id, route.pull.holder.worker_id, route.num_saved_tokens) == ("d", "busy", 496)


def test_a_pull_may_be_late_by_half_a_second_and_what_it_saves_but_never_by_much_more() -> None:
    for speed, timeout_s in ((1000, 0.996), (100, 1.5)):
        route = select(
            replace(FACTS, num_prompt_tokens=600), [Candidate("p", 1, tokens_per_s=speed)], [replace(DECODE[0], overlap_blocks=31)]
        )
        assert route is not None and route.pull is not None
        assert route.pull.timeout_s == timeout_s
