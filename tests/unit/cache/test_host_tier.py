"""HostTier under KVCacheManager: evicted blocks come back by hash with their bytes, and nobody gets a block that is being filled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from host_tier_cache import BLOCK_SIZE, HostTierCache, StepByStepExecutor, content
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.cache.prefix_index import Tier
from shared.request import Request

A = list(range(17))  # four full blocks and the tail of one token
B = [100 + token for token in A]
C = [200 + token for token in A]


def test_an_evicted_prefix_comes_back_from_host_memory_with_its_bytes() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    first = cache.serve("a", A)
    cache.serve("b", B)
    assert [cache.index[block_hash] for block_hash in first.block_hashes] == [Tier.HOST] * 4
    again = cache.request("again", A)
    reservation = cache.manager.reserve(again)
    assert reservation is not None
    assert (reservation.num_cached_blocks, again.num_computed_tokens, again.num_cached_tokens) == (4, 16, 16)
    assert not cache.manager.is_ready("again")
    cache.run_loads()
    assert cache.manager.is_ready("again")
    cache.check_contents(again)
    assert [cache.index[block_hash] for block_hash in first.block_hashes] == [Tier.DEVICE] * 4
    assert cache.manager.num_host_hit_tokens == cache.manager.num_hit_tokens == 16
    load = cache.manager.take_load("again")
    assert load is not None and len(load.blocks) == 4
    assert cache.manager.take_load("again") is None
    cache.check()
    cache.manager.free("again")
    assert cache.manager.num_used() == 0


def test_the_chain_goes_on_from_the_cache_into_host_memory() -> None:
    cache = HostTierCache(num_blocks=8, num_slots=8)
    cache.serve("a", A)
    cache.serve("short", [300, 301, 302, 303, 304, 305, 306, 307, 308, 309])  # takes 3 free ones, and 3 of what follows
    cache.serve("b", B[:14])  # evicts the last blocks of A first
    again = cache.request("again", A)
    hits = [cache.pool.get_cached(block_hash) is not None for block_hash in again.block_hashes]
    assert any(hits) and not all(hits)
    reservation = cache.manager.reserve(again)
    assert reservation is not None and reservation.num_cached_blocks == 4
    cache.run_loads()
    cache.check_contents(again)
    assert cache.manager.num_host_hit_tokens == hits.count(False) * BLOCK_SIZE
    cache.check()


def test_blocks_that_stayed_in_host_memory_are_not_stored_twice() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=12)
    for name in ("a", "b", "a2", "b2"):
        cache.serve(name, A if name.startswith("a") else B)
    assert cache.tier.counters["kv_host_stored_blocks"] == 8
    assert cache.tier.counters["kv_host_loaded_blocks"] == 8
    cache.check()


def test_host_memory_forgets_the_least_recently_used_and_tells_the_index() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=4)
    first = cache.serve("a", A)
    second = cache.serve("b", B)
    cache.serve("c", C)
    assert not any(block_hash in cache.index for block_hash in first.block_hashes)
    assert all(cache.index[block_hash] is Tier.HOST for block_hash in second.block_hashes)
    assert cache.tier.counters["kv_host_evicted_blocks"] == 4
    cache.check()


def test_what_a_request_is_about_to_load_is_not_pushed_out_by_what_it_evicts() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=4)
    cache.serve("a", A)
    cache.serve("b", B)  # host memory is full of A
    again = cache.request("again", A)
    reservation = cache.manager.reserve(again)  # B has to go for it, and finds no room
    assert reservation is not None and reservation.num_cached_blocks == 4
    assert cache.tier.counters["kv_host_dropped_blocks"] == 4
    cache.run_loads()
    cache.check_contents(again)
    cache.check()


def test_a_burst_of_evictions_is_cut_at_the_leaves() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8, max_blocks_per_step=2)
    first = cache.serve("a", A)
    cache.serve("b", B)
    assert [block_hash in cache.tier for block_hash in first.block_hashes] == [True, True, False, False]
    assert cache.tier.counters["kv_host_dropped_blocks"] == 2
    cache.manager.begin_step()
    second = cache.serve("c", C)
    assert second is not None and cache.tier.num_cached == 4
    cache.check()


def test_blocks_of_an_aborted_request_belong_to_the_copy_until_it_has_ended() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    cache.serve("a", A)
    cache.serve("b", B)
    again = cache.request("again", A)
    assert cache.manager.reserve(again)
    cache.manager.free("again")
    other = cache.request("other", C)
    assert cache.manager.reserve(other) is None  # only the block of the tail is free
    assert cache.manager.num_used() == 4
    cache.run_loads()
    assert cache.manager.num_used() == 0
    assert cache.manager.reserve(other)
    for block_id in cache.manager.block_ids("other"):
        cache.scribble(block_id)
    cache.compute(other)
    cache.check()


def test_a_second_request_waits_for_the_copy_that_is_under_way() -> None:
    cache = HostTierCache(num_blocks=8, num_slots=8)
    cache.serve("a", A)
    cache.serve("b", B)
    cache.serve("c", C[:14])
    first, second = cache.request("first", A), cache.request("second", A)
    assert cache.manager.reserve(first)
    reservation = cache.manager.reserve(second)
    assert reservation is not None and reservation.num_cached_blocks == 4
    assert reservation.block_ids[:4] == cache.manager.block_ids("first")[:4]
    assert not cache.manager.is_ready("second")
    cache.run_loads()
    assert cache.manager.is_ready("first") and cache.manager.is_ready("second")
    cache.check_contents(second)
    assert cache.tier.counters["kv_host_loaded_blocks"] <= 4
    cache.check()


def test_a_fork_waits_as_its_parent_does() -> None:
    cache = HostTierCache(num_blocks=6, num_slots=8)
    cache.serve("a", A)
    cache.serve("b", B[:21])
    parent = cache.request("parent", A)
    assert cache.manager.reserve(parent)
    cache.manager.fork("parent", "child")
    assert not cache.manager.is_ready("child")
    cache.run_loads()
    assert cache.manager.is_ready("child")
    cache.check()


def test_a_copy_that_failed_leaves_nothing_in_the_cache_and_all_who_waited_give_back() -> None:
    cache = HostTierCache(num_blocks=6, num_slots=8)
    cache.serve("a", A)
    cache.serve("b", [*B, *C[:7]])
    request = cache.request("again", A)
    assert cache.manager.reserve(request)
    cache.store.is_failing = True
    cache.run_loads()
    cache.store.is_failing = False
    assert cache.manager.has_failed("again") and not cache.manager.is_ready("again")
    assert not any(block_hash in cache.index for block_hash in request.block_hashes)
    cache.check()
    cache.manager.free("again")
    assert cache.manager.num_used() == 0
    assert cache.tier.counters["kv_host_load_failures"] == 1
    cache.serve("once more", A)
    cache.check()


def test_a_copy_behind_one_that_failed_is_of_no_use_either() -> None:
    cache = HostTierCache(num_blocks=8, num_slots=16)
    cache.serve("a", A)
    cache.serve("b", [*B, *C[:15]])
    assert cache.manager.reserve(cache.request("short", A[:9]))  # two blocks of A are on their way
    reservation = cache.manager.reserve(cache.request("long", A))  # and two more
    assert reservation is not None and reservation.num_cached_blocks == 4
    assert isinstance(cache.executor, StepByStepExecutor) and len(cache.executor.jobs) == 2
    cache.store.is_failing = True
    cache.executor.run_next()
    cache.store.is_failing = False
    assert cache.manager.has_failed("short") and cache.manager.has_failed("long")
    cache.check()
    cache.run_loads()
    assert cache.manager.has_failed("long")
    cache.check()
    for name in ("short", "long"):
        cache.manager.free(name)
    assert cache.manager.num_used() == 0


def test_what_came_behind_blocks_that_are_awaited_is_published_when_they_are_there() -> None:
    cache = HostTierCache(num_blocks=6, num_slots=8)
    cache.serve("a", A[:9])
    cache.serve("b", [*B, *C[:7]])
    request = cache.request("again", A)
    assert cache.manager.reserve(request)
    request.num_computed_tokens = 16  # as when a transfer has brought the rest
    cache.manager.publish_full_blocks(request)
    assert [block_hash in cache.index for block_hash in request.block_hashes] == [True, True, False, False]
    cache.run_loads()
    cache.manager.publish_full_blocks(request)
    assert [cache.index[block_hash] for block_hash in request.block_hashes] == [Tier.DEVICE] * 4
    cache.check()


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_computed_block_is_not_exchanged_for_one_that_is_being_filled(is_failing: bool) -> None:
    """It was admitted before the same blocks were computed by another, evicted, and asked back by a third."""
    cache = HostTierCache(num_blocks=10, num_slots=16)
    slow = cache.request("slow", A[:9])
    assert cache.manager.reserve(slow)
    cache.serve("a", A[:9])
    cache.serve("b", [*B, *C[:11]])
    assert cache.manager.reserve(cache.request("again", A[:9]))
    assert not cache.manager.is_ready("again")
    cache.compute(slow)
    cache.check_contents(slow)
    cache.store.is_failing = is_failing
    cache.run_loads()
    cache.check_contents(slow)
    cache.manager.publish_full_blocks(slow)
    cache.check_contents(slow)
    assert [cache.index[block_hash] for block_hash in slow.block_hashes] == [Tier.DEVICE] * 2
    cache.check()
    for name in ("slow", "again"):
        cache.manager.free(name)
    assert cache.manager.num_used() == 0


def test_corrupt_bytes_are_found_and_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    first = cache.serve("a", A)
    cache.serve("b", B)
    slot = cache.tier._entries[first.block_hashes[2]].slot
    cache.store._slots[slot][5] ^= 1
    again = cache.request("again", A)
    reservation = cache.manager.reserve(again)
    assert reservation is not None and reservation.num_cached_blocks == 2
    assert cache.tier.counters["kv_host_corrupt_blocks"] == 1
    assert "not what was put there" in caplog.text
    assert first.block_hashes[2] not in cache.index
    cache.run_loads()
    cache.compute(again)
    cache.check()


def test_what_is_not_worth_copying_is_computed() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8, is_worth_loading=lambda num_blocks: num_blocks > 4)
    cache.serve("a", A)
    cache.serve("b", B)
    again = cache.request("again", A)
    reservation = cache.manager.reserve(again)
    assert reservation is not None and reservation.num_cached_blocks == 0
    assert cache.manager.is_ready("again")
    cache.check()


def test_a_pin_brings_blocks_back_and_says_when_they_are_there() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    hashes = cache.serve("a", A).block_hashes
    cache.serve("b", B)
    calls: list[str] = []
    assert len(cache.manager.pin("pull", hashes)) == 4
    cache.manager.when_ready("pull", lambda: calls.append("ready"))
    assert calls == []
    cache.run_loads()
    assert calls == ["ready"]
    for block_id, block_hash in zip(cache.manager.block_ids("pull"), hashes, strict=True):
        assert bytes(cache.memory[block_id].numpy()) == bytes(content(block_hash).numpy())
    cache.manager.free("pull")
    cache.check()


def test_a_pin_leaves_headroom_to_requests() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    hashes = cache.serve("a", A).block_hashes
    cache.serve("b", B)
    assert len(cache.manager.pin("pull", hashes, num_headroom_blocks=2)) == 3
    assert cache.pool.num_free == 2
    cache.run_loads()
    cache.check()


def test_a_pin_that_was_released_is_not_told() -> None:
    cache = HostTierCache(num_blocks=5, num_slots=8)
    hashes = cache.serve("a", A).block_hashes
    cache.serve("b", B)
    cache.manager.pin("pull", hashes)
    cache.manager.when_ready("pull", lambda: pytest.fail("it gave its blocks back"))
    cache.manager.free("pull")
    cache.run_loads()
    assert cache.manager.num_used() == 0
    cache.check()


def test_closing_ends_the_copies_under_way_and_their_blocks_go_back() -> None:
    executor = ThreadPoolExecutor(1)
    woken: list[bool] = []
    cache = HostTierCache(num_blocks=5, num_slots=8, executor=executor, on_loaded=lambda: woken.append(True))
    for name, tokens in (("a", A), ("b", B)):
        request = cache.request(name, tokens)
        assert cache.manager.reserve(request)
        cache.compute(request)
        cache.manager.free(name)
    assert cache.manager.reserve(cache.request("again", A))
    cache.manager.free("again")
    cache.manager.close()
    assert woken == [True]
    assert cache.manager.num_used() == 0
    cache.check()


PROMPTS = [[*A[:4], *A[:4]], A[:9], A, [*A[:8], *C[:9]], B, C[:13]]
"""Some of which share their beginnings."""


class RandomUse(RuleBasedStateMachine):
    """Any order of reservations, steps, aborts, pins and copies, some of which fail or find corrupt bytes: whoever is ready reads the bytes
    that its hashes stand for, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HostTierCache(num_blocks=7, num_slots=6, max_blocks_per_step=4)
        self.requests: dict[str, Request] = {}
        self.pins: list[str] = []
        self.num_names = 0

    def _name(self) -> str:
        self.num_names += 1
        return f"r{self.num_names}"

    @rule(tokens=st.sampled_from(PROMPTS))
    def serve(self, tokens: list[int]) -> None:
        """Others come and go, which evicts."""
        request = self.reserve(tokens)
        if request is not None and self.cache.manager.is_ready(request.request_id):
            self.cache.compute(request)
        if request is not None:
            self.cache.manager.free(self.requests.pop(request.request_id).request_id)

    @rule(tokens=st.sampled_from(PROMPTS))
    def start(self, tokens: list[int]) -> None:
        self.reserve(tokens)

    def reserve(self, tokens: list[int]) -> Request | None:
        self.cache.manager.begin_step()
        request = self.cache.request(self._name(), tokens)
        reservation = self.cache.manager.reserve(request)
        if reservation is None:
            return None
        self.requests[request.request_id] = request
        for block_id in reservation.block_ids[reservation.num_cached_blocks :]:
            self.cache.scribble(block_id)
        return request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if self.cache.manager.has_failed(request.request_id):
            self.cache.manager.free(self.requests.pop(request.request_id).request_id)
        elif self.cache.manager.is_ready(request.request_id):
            self.cache.compute(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.cache.manager.free(self.requests.pop(name).request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        child = parent.fork(self._name(), 1)
        self.cache.manager.fork(parent.request_id, child.request_id)
        child.num_computed_tokens = parent.num_computed_tokens
        if child.num_computed_tokens % BLOCK_SIZE == 0:  # it would write into the shared blocks behind these
            self.cache.manager.free(child.request_id)
        else:
            self.requests[child.request_id] = child

    @rule(tokens=st.sampled_from(PROMPTS))
    def pin(self, tokens: list[int]) -> None:
        request = self.cache.request(self._name(), tokens)
        self.cache.manager.pin(request.request_id, request.block_hashes, num_headroom_blocks=2)
        self.pins.append(request.request_id)

    @precondition(lambda self: self.pins)
    @rule()
    def release(self) -> None:
        self.cache.manager.free(self.pins.pop(0))

    @precondition(lambda self: self.cache.executor.jobs)
    @rule(is_failing=st.sampled_from([False, False, True]))
    def copy(self, is_failing: bool) -> None:
        assert isinstance(self.cache.executor, StepByStepExecutor)
        self.cache.store.is_failing = is_failing
        self.cache.executor.run_next()
        self.cache.store.is_failing = False

    @precondition(lambda self: any(entry.num_readers == 0 for entry in self.cache.tier._entries.values()))
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        entries = self.cache.tier._entries
        slots = [entry.slot for entry in entries.values() if entry.num_readers == 0]
        self.cache.store._slots[data.draw(st.sampled_from(slots))][3] ^= 0x40

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()
        for request in self.requests.values():
            if self.cache.manager.is_ready(request.request_id):
                self.cache.check_contents(request)

    def teardown(self) -> None:
        for name in [*self.requests, *self.pins]:
            self.cache.manager.free(name)
        self.cache.manager.close()
        assert self.cache.manager.num_used() == 0
        self.cache.check()


RandomUse.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestRandomUse = RandomUse.TestCase
