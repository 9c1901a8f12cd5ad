"""Blocks on the way for one request are not sent again for another."""

from services.decode.awaited_blocks import AwaitedBlocks
from shared.block_hash import BlockHash, hash_full_blocks, root_hash

A, B, C = hash_full_blocks(root_hash("m", "float32", 4), list(range(12)), 4)


def test_blocks_are_awaited_until_their_transfer_has_ended():
    awaited = AwaitedBlocks()
    awaited.add("first", [A, B])
    assert A in awaited and B in awaited and C not in awaited and None not in awaited
    awaited.remove("first")
    awaited.remove("first")
    assert A not in awaited and not awaited


def test_a_block_belongs_to_the_first_that_brings_it():
    awaited = AwaitedBlocks()
    awaited.add("first", [A])
    awaited.add("second", [A, B])
    awaited.remove("second")
    assert A in awaited and B not in awaited


def test_hashes_are_bytes_that_compare_by_value():
    awaited = AwaitedBlocks()
    awaited.add("first", [A])
    assert BlockHash(bytes(A)) in awaited
