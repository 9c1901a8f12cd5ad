"""BlockPool: reference counts, LRU order, eviction, one block per hash."""

from __future__ import annotations

import random

import pytest

from shared.block_hash import BlockHash
from shared.cache.block_pool import BlockPool, KVCacheBlock

ROOT = BlockHash(b"r" * 16)


def h(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(16, b"."))


def filled_pool(names: list[str]) -> tuple[BlockPool, list[KVCacheBlock]]:
    pool = BlockPool(len(names))
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.cache(block, h(name), ROOT)
    return pool, blocks


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(3) or []) == 3


def test_evicted_block_is_no_longer_found() -> None:
    pool, blocks = filled_pool(["h1", "h2", "h3", "h4"])
    pool.free(blocks)
    assert len(pool.allocate(2) or []) == 2
    assert pool.get_cached(h("h1")) is None
    assert pool.get_cached(h("h2")) is None
    assert pool.get_cached(h("h3")) is blocks[2]
    pool.check_invariants(ROOT)


def test_eviction_is_told_to_the_index() -> None:
    evicted: list[BlockHash] = []
    pool = BlockPool(1, on_evicted=evicted.append)
    first = pool.allocate(1)
    assert first
    pool.cache(first[0], h("a"), ROOT)
    pool.free(first)
    assert evicted == []
    pool.allocate(1)
    assert evicted == [h("a")]


def test_touch_removes_block_from_free_queue() -> None:
    pool, blocks = filled_pool(["a", "b"])
    pool.free(blocks)
    pool.touch([blocks[0]])
    taken = pool.allocate(1)
    assert taken == [blocks[1]]
    assert pool.allocate(1) is None
    assert pool.get_cached(h("a")) is blocks[0]


def test_free_of_a_request_evicts_leaves_before_parents() -> None:
    pool, blocks = filled_pool(["parent", "child", "leaf"])
    pool.free(blocks[::-1])
    pool.allocate(1)
    assert pool.get_cached(h("leaf")) is None
    assert pool.get_cached(h("child")) is not None


def test_freed_twice_is_refused() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1)
    assert block
    pool.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block)


def test_second_block_with_a_known_hash_is_exchanged_for_the_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    assert pool.cache(first, h("same"), ROOT) is first
    assert pool.cache(second, h("same"), ROOT) is first
    assert (first.ref_cnt, second.ref_cnt) == (2, 0)
    pool.free([first])
    pool.free([first])
    pool.check_invariants(ROOT)


def test_duplicates_neither_leak_nor_grow_the_map() -> None:
    pool = BlockPool(8)
    for _ in range(10_000):
        first, second = pool.allocate(2) or []
        kept = pool.cache(first, h("x"), ROOT)
        other = pool.cache(second, h("x"), ROOT)
        pool.free([kept])
        pool.free([other])
        flushed = pool.allocate(8)
        assert flushed
        pool.free(flushed)
        assert pool.num_cached == 0
    pool.check_invariants(ROOT)


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_keep_the_invariants(seed: int) -> None:
    """Against a model: references per block, LRU order of the free queue, and the map."""
    rng = random.Random(seed)
    pool = BlockPool(32)
    references: dict[int, int] = {}
    lru = list(range(32))
    cached: dict[BlockHash, int] = {}
    held: list[KVCacheBlock] = []
    for step in range(70_000):
        operation = rng.random()
        if operation < 0.35:
            n = rng.randint(1, 4)
            taken = pool.allocate(n)
            assert (taken is None) == (n > len(lru))
            for block in taken or []:
                assert block.block_id == lru.pop(0)
                cached = {key: value for key, value in cached.items() if value != block.block_id}
                references[block.block_id] = 1
                held.append(block)
        elif operation < 0.5 and held:
            block = rng.choice(held)
            if block.block_hash is None:
                name = h(f"{rng.randint(0, 40)}")
                if name not in cached:
                    pool.cache(block, name, ROOT)
                    cached[name] = block.block_id
        elif operation < 0.6 and cached:
            name = rng.choice(list(cached))
            found = pool.get_cached(name)
            assert found is not None and found.block_id == cached[name]
            if found.ref_cnt == 0:
                lru.remove(found.block_id)
            pool.touch([found])
            references[found.block_id] = references.get(found.block_id, 0) + 1
            held.append(found)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            pool.free([block])
            references[block.block_id] -= 1
            if references[block.block_id] == 0:
                lru.append(block.block_id)
        assert pool.num_free == len(lru)
        assert pool.num_free + pool.num_used == 32
        if step % 500 == 0:
            pool.check_invariants()
