"""KVCacheManager: hits, reservation, growth, forks, publication, giving back."""

from __future__ import annotations

import random

import pytest

from shared.block_hash import root_hash
from shared.cache.block_pool import BlockPool
from shared.cache.kv_cache_manager import KVCacheManager
from shared.request import Request

BLOCK_SIZE = 4
ROOT = root_hash("model", "float32", BLOCK_SIZE)


def manager(num_blocks: int = 16, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, ROOT, enable_prefix_caching)


def request(name: str, tokens: list[int], cache_salt: str | None = None) -> Request:
    return Request(name, list(tokens), arrival_s=0.0, deadline_at_s=0.0, cache_salt=cache_salt)


def compute_all(kv: KVCacheManager, r: Request) -> None:
    r.num_computed_tokens = r.num_tokens
    kv.publish_full_blocks(r)


def test_a_repeated_prompt_leaves_at_least_one_token_to_compute() -> None:
    kv = manager()
    for length, hit in ((4, 0), (5, 4), (8, 4), (9, 8)):
        tokens = [length * 100 + i for i in range(length)]
        first, second = request(f"a{length}", tokens), request(f"b{length}", tokens)
        assert kv.reserve(first)
        compute_all(kv, first)
        kv.free(first.request_id)
        reservation = kv.reserve(second)
        assert reservation is not None
        assert (reservation.num_cached_blocks * BLOCK_SIZE, second.num_cached_tokens) == (hit, hit)
        kv.free(second.request_id)
    kv.check_invariants()


def test_reserve_without_room_takes_nothing() -> None:
    kv = manager(num_blocks=3)
    assert kv.reserve(request("big", list(range(13)))) is None
    assert kv.num_used() == 0
    assert kv.reserve(request("fits", list(range(12))))
    assert kv.num_used() == 3


def test_headroom_is_left_for_others() -> None:
    kv = manager(num_blocks=4)
    assert kv.reserve(request("a", list(range(12))), num_headroom_blocks=2) is None
    assert kv.reserve(request("a", list(range(12))), num_headroom_blocks=1)


def test_hits_are_protected_before_fresh_blocks_are_taken() -> None:
    kv = manager(num_blocks=4)
    a = request("a", list(range(8)))
    kv.reserve(a)
    compute_all(kv, a)
    kv.free("a")
    longer = request("b", [*range(8), 50, 51, 52, 53, 54, 55, 56, 57])
    reservation = kv.reserve(longer)
    assert reservation is not None and reservation.num_cached_blocks == 2
    assert len(set(reservation.block_ids)) == 4
    kv.check_invariants()


def test_another_salt_does_not_hit() -> None:
    kv = manager()
    a = request("a", list(range(8)), cache_salt="tenant-a")
    kv.reserve(a)
    compute_all(kv, a)
    b, c = request("b", list(range(8)), cache_salt="tenant-b"), request("c", list(range(8)), cache_salt="tenant-a")
    kv.reserve(b)
    kv.reserve(c)
    assert (b.num_cached_tokens, c.num_cached_tokens) == (0, 4)


def test_unconfirmed_blocks_are_never_hit() -> None:
    kv = manager()
    kv.reserve(request("a", list(range(9))))
    b = request("b", list(range(9)))
    kv.reserve(b)
    assert b.num_cached_tokens == 0


def test_grow_adds_a_block_only_when_a_token_needs_one() -> None:
    kv = manager(num_blocks=2)
    r = request("a", [1, 2, 3])
    kv.reserve(r)
    r.token_ids.append(4)
    assert kv.grow(r) and len(kv.block_ids("a")) == 1
    r.token_ids.append(5)
    assert kv.grow(r) and len(kv.block_ids("a")) == 2
    r.token_ids.extend([6, 7, 8, 9])
    assert not kv.grow(r)
    assert len(kv.block_ids("a")) == 2


def test_two_requests_that_computed_the_same_block_share_one_afterwards() -> None:
    kv = manager()
    a, b = request("a", list(range(9))), request("b", list(range(9)))
    kv.reserve(a)
    kv.reserve(b)
    compute_all(kv, a)
    compute_all(kv, b)
    assert kv.block_ids("a")[:2] == kv.block_ids("b")[:2]
    kv.check_invariants()
    kv.free("a")
    kv.check_invariants()
    kv.free("b")
    assert kv.num_used() == 0
    kv.check_invariants()


def test_free_is_idempotent_and_keeps_the_cache() -> None:
    kv = manager()
    a = request("a", list(range(9)))
    kv.reserve(a)
    compute_all(kv, a)
    kv.free("a")
    kv.free("a")
    assert (kv.num_used(), kv.pool.num_cached) == (0, 2)


def test_without_prefix_caching_nothing_is_published_or_hit() -> None:
    kv = manager(enable_prefix_caching=False)
    a = request("a", list(range(9)))
    kv.reserve(a)
    compute_all(kv, a)
    kv.free("a")
    b = request("b", list(range(9)))
    kv.reserve(b)
    assert (kv.pool.num_cached, b.num_cached_tokens) == (0, 0)


def test_resent_prompt_hits_in_a_pool_that_was_never_overcommitted() -> None:
    kv = KVCacheManager(BlockPool(200), 16, root_hash("m", "float32", 16))
    prompts = [[base * 1000 + i for i in range(161)] for base in range(6)]
    for index, tokens in enumerate(prompts):
        r = request(f"r{index}", tokens)
        kv.reserve(r)
        compute_all(kv, r)
        kv.free(r.request_id)
    again = request("again", prompts[0])
    kv.reserve(again)
    assert again.num_cached_tokens == 160


def test_resumed_request_reports_its_hits_once() -> None:
    kv = manager()
    a = request("a", list(range(9)))
    kv.reserve(a)
    compute_all(kv, a)
    kv.free("a")
    a.num_computed_tokens = 0
    kv.reserve(a)
    assert (a.num_cached_tokens, a.num_computed_tokens) == (0, 8)


def fork(kv: KVCacheManager, parent: Request, name: str, index: int) -> Request:
    child = parent.fork(name, index)
    kv.fork(parent.request_id, name)
    child.num_computed_tokens = parent.num_computed_tokens
    return child


def test_a_fork_costs_nothing_and_the_last_holder_of_the_tail_keeps_it() -> None:
    copies: list[tuple[int, int]] = []
    kv = KVCacheManager(BlockPool(16), BLOCK_SIZE, ROOT, copy_block=lambda source, target: copies.append((source, target)))
    a = request("a", list(range(10)))
    kv.reserve(a)
    compute_all(kv, a)
    forks = [a, fork(kv, a, "b", 1), fork(kv, a, "c", 2)]
    assert kv.num_used() == 3
    original = kv.block_ids("a")[2]
    for r in forks:
        r.token_ids.append(50 + r.sequence_index)
        assert kv.grow(r)
        kv.check_invariants()
    tails = [kv.block_ids(r.request_id)[2] for r in forks]
    assert copies == [(original, tails[0]), (original, tails[1])] and tails[2] == original
    assert len({tuple(kv.block_ids(r.request_id)[:2]) for r in forks}) == 1
    assert kv.num_used() == 5
    for r in forks:
        kv.free(r.request_id)
    assert kv.num_used() == 0


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    copies: list[tuple[int, int]] = []
    kv = KVCacheManager(BlockPool(16), BLOCK_SIZE, ROOT, copy_block=lambda source, target: copies.append((source, target)))
    a = request("a", list(range(8)))
    kv.reserve(a)
    compute_all(kv, a)
    b = fork(kv, a, "b", 1)
    for r in (a, b):
        r.token_ids.append(9)
        assert kv.grow(r)
    assert not copies and kv.num_used() == 4


def test_a_tail_that_cannot_be_copied_stays_shared() -> None:
    kv = manager(num_blocks=2)
    a = request("a", list(range(6)))
    kv.reserve(a)
    compute_all(kv, a)
    b = fork(kv, a, "b", 1)
    b.token_ids.append(9)
    assert not kv.grow(b)
    assert kv.block_ids("a") == kv.block_ids("b")
    kv.free("a")
    assert kv.grow(b)
    kv.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_forks_that_write_grow_and_end_in_any_order_never_see_each_others_tokens(seed: int) -> None:
    """A model of the cache's memory: what a request reads through its block table is its own history, always."""
    rng = random.Random(seed)
    memory: dict[int, list[int]] = {block_id: [-1] * BLOCK_SIZE for block_id in range(24)}

    def copy_block(source: int, target: int) -> None:
        memory[target] = list(memory[source])

    kv = KVCacheManager(BlockPool(24), BLOCK_SIZE, ROOT, copy_block=copy_block)
    live: dict[str, Request] = {}

    def compute(r: Request) -> None:
        table = kv.block_ids(r.request_id)
        for position in range(r.num_computed_tokens, r.num_tokens):
            memory[table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = r.token_ids[position]
        compute_all(kv, r)

    num_forks = 0
    for number in range(1500):
        action = rng.random()
        if action < 0.15:
            r = request(f"r{number}", [rng.randrange(3) for _ in range(rng.randint(1, 12))])
            if kv.reserve(r) is not None:
                live[r.request_id] = r
                compute(r)
        elif action < 0.35 and live and len(live) < 12:
            parent = rng.choice(list(live.values()))
            live[f"f{number}"] = fork(kv, parent, f"f{number}", number)
            num_forks += 1
        elif action < 0.85 and live:
            r = rng.choice(list(live.values()))
            r.token_ids.append(rng.randrange(3))
            if kv.grow(r):
                compute(r)
            else:
                r.token_ids.pop()
        elif live:
            kv.free(live.pop(rng.choice(list(live))).request_id)
        kv.check_invariants()
        for r in live.values():
            table = kv.block_ids(r.request_id)
            assert [memory[table[i // BLOCK_SIZE]][i % BLOCK_SIZE] for i in range(r.num_tokens)] == r.token_ids
    assert num_forks > 50
    for name in live:
        kv.free(name)
    assert kv.num_used() == 0


def test_pinned_blocks_are_not_evicted_and_cost_none() -> None:
    kv = manager(num_blocks=4)
    first = request("a", list(range(9)))
    assert kv.reserve(first)
    compute_all(kv, first)
    kv.free(first.request_id)
    hashes = list(first.block_hashes)
    unknown = request("b", list(range(100, 108)))
    unknown.update_block_hashes(ROOT, BLOCK_SIZE)
    assert kv.pin("nothing", unknown.block_hashes) == []
    block_ids = kv.pin("pin", [*hashes, *unknown.block_hashes])
    assert len(block_ids) == 2 and kv.num_used() == 2
    kv.check_invariants()
    assert kv.reserve(request("c", list(range(200, 212)))) is None, "it would need a pinned block"
    assert kv.reserve(request("d", list(range(300, 308))))
    assert [kv.pool.get_cached(block_hash).block_id for block_hash in hashes] == block_ids  # type: ignore[union-attr]
    kv.free("pin")
    kv.free("pin")
    assert kv.reserve(request("e", list(range(400, 408))))
    assert all(kv.pool.get_cached(block_hash) is None for block_hash in hashes)
    kv.check_invariants()


def test_what_continues_an_evicted_block_leaves_the_cache_with_it() -> None:
    """A transfer holds its own copy of the first block, not the one in the cache, which another request entered: that one may be evicted
    while the second, which nobody else had, is still being sent."""
    withdrawn: list[object] = []
    kv = KVCacheManager(BlockPool(6, on_evicted=withdrawn.append), BLOCK_SIZE, ROOT)
    beginning = [1, 2, 3, 4]
    other, sent = request("other", [*beginning, 9]), request("sent", [*beginning, 5, 6, 7, 8, 9])
    assert kv.reserve(other) and kv.reserve(sent)
    kept = kv.keep("transfer", "sent", 0, 2)
    compute_all(kv, other)
    compute_all(kv, sent)
    assert kv.block_ids("sent")[0] != kept[0]
    kv.free("other")
    kv.free("sent")
    assert kv.reserve(request("all the rest", list(range(100, 116))))
    kv.check_invariants()
    assert set(withdrawn) == set(sent.block_hashes[:2])
    kv.free("transfer")
    kv.free("all the rest")
    again = request("again", [*beginning, 5, 6, 7, 8, 9])
    reservation = kv.reserve(again)
    assert reservation is not None and reservation.num_cached_blocks == 0
    compute_all(kv, again)
    kv.check_invariants()
