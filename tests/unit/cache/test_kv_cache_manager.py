"""KVCacheManager: hits, reservation, growth, publication, giving back."""

from __future__ import annotations

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
