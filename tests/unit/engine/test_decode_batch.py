"""Block tables of requests that generate, kept from step to step: always those that the manager has now."""

from __future__ import annotations

from shared.block_hash import root_hash
from shared.cache.block_pool import BlockPool
from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.decode_batch import BlockTableRows
from shared.request import Request

BLOCK_SIZE = 4


def new_manager(num_blocks: int = 32) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, root_hash("model", "float32", BLOCK_SIZE))


def held(manager: KVCacheManager, name: str, num_tokens: int) -> Request:
    request = Request(name, [ord(name[0])] * num_tokens, arrival_s=0.0, deadline_at_s=0.0)
    assert manager.reserve(request) is not None
    return request


def assert_current(tables: BlockTableRows, manager: KVCacheManager, names: list[str]) -> None:
    rows = tables.rows_of(names)
    assert len(set(rows.tolist())) == len(names)
    for name, row in zip(names, rows.tolist(), strict=True):
        block_ids = manager.block_ids(name)
        assert tables.matrix[row, : len(block_ids)].tolist() == block_ids


def test_requests_that_hold_blocks_but_are_in_no_step_do_not_keep_rows_from_others() -> None:
    manager = new_manager()
    requests = {name: held(manager, name, 5) for name in "abc"}
    tables = BlockTableRows(manager, max_num_rows=2, max_num_blocks=8)
    for names in (["a", "b"], ["c", "b"], ["a"], ["c", "a"], ["b", "c"]):
        for name in names:
            requests[name].token_ids += [1] * BLOCK_SIZE
            assert manager.grow(requests[name])
        assert_current(tables, manager, names)


def test_a_request_of_the_same_name_has_its_own_table() -> None:
    manager = new_manager()
    held(manager, "a", 14)
    tables = BlockTableRows(manager, max_num_rows=2, max_num_blocks=8)
    assert_current(tables, manager, ["a"])
    manager.free("a")
    held(manager, "b", 9)
    held(manager, "a", 6)
    assert_current(tables, manager, ["b", "a"])
