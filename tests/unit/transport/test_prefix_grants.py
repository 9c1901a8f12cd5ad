"""A receiver that wants a prefix is content with its beginning, and takes nothing else for it."""

import pytest
from kv_transfer_pairs import LAYOUT, TRANSFER, MemoryPair

from shared.transport.protocol import control

HASHES = [bytes([index]) * 16 for index in range(1, 9)]
NUM_WANTED = 6


def pull(num_offered: int, missing: list[int], hashes: list[bytes] | None = None, num_tokens: int | None = None) -> MemoryPair:
    pair = MemoryPair()
    pair.receiver.expect(
        TRANSFER, 0, [15 - index for index in range(NUM_WANTED)], missing, NUM_WANTED * LAYOUT.block_size, 60.0,
        block_hashes=HASHES[:NUM_WANTED], is_prefix=True,
    )  # fmt: skip
    num_tokens = num_offered * LAYOUT.block_size if num_tokens is None else num_tokens
    pair.offer(num_tokens, HASHES[:num_offered] if hashes is None else hashes)
    pair.send_all(num_tokens, hidden=b"")
    pair.run()
    return pair


@pytest.mark.parametrize("num_offered", range(NUM_WANTED + 1))
def test_as_many_blocks_as_the_holder_has_are_taken(num_offered):
    missing = list(range(2, NUM_WANTED))
    pair = pull(num_offered, missing)
    assert (pair.receiver_log.ended, pair.sender_log.ended) == ({TRANSFER: [None]}, {TRANSFER: [None]})
    info = pair.receiver_log.infos[TRANSFER]
    assert info.num_prompt_tokens == num_offered * LAYOUT.block_size
    assert info.num_blocks_missing == max(0, num_offered - 2)
    assert info.num_bytes == info.num_blocks_missing * LAYOUT.block_nbytes
    assert pair.is_copied([index for index in missing if index < num_offered])
    untouched = [index for index in range(NUM_WANTED) if index not in missing or index >= num_offered]
    assert all(pair.target.block(15 - index) == bytes(LAYOUT.block_nbytes) for index in untouched)


@pytest.mark.parametrize(
    ("num_offered", "hashes", "num_tokens"),
    [
        (3, [*HASHES[:2], b"x" * 16], None),
        (8, None, None),
        (3, None, 2 * LAYOUT.block_size),
        (3, None, 3 * LAYOUT.block_size - 1),
        (0, [], 1),
    ],
    ids=["another chain", "more than is wanted", "fewer tokens than hashes", "a block that is not full", "tokens without a hash"],
)
def test_anything_but_the_beginning_is_refused_and_nothing_is_written(num_offered, hashes, num_tokens):
    pair = pull(num_offered, list(range(NUM_WANTED)), hashes, num_tokens)
    (reason,) = pair.receiver_log.ended[TRANSFER]
    assert "block_hashes" in reason
    assert pair.sender_log.ended[TRANSFER][0] is not None
    assert all(pair.target.block(block_id) == bytes(LAYOUT.block_nbytes) for block_id in range(16))


def test_a_grant_is_not_made_shorter_by_a_second_offer():
    pair = MemoryPair()
    pair.receiver.expect(
        TRANSFER, 0, [15 - index for index in range(NUM_WANTED)], list(range(NUM_WANTED)), NUM_WANTED * LAYOUT.block_size, 60.0,
        block_hashes=HASHES[:NUM_WANTED], is_prefix=True,
    )  # fmt: skip
    pair.offer(4 * LAYOUT.block_size, HASHES[:4])
    pair.network.run(1.0, lambda: bool(pair.sender_log.granted))
    peer = next(iter(pair.receiver.peers()))[0]
    pair.receiver.on_control(peer, control.Offer(
        transfer_id=TRANSFER, src_incarnation=11, dst_incarnation=22, num_prompt_tokens=2 * LAYOUT.block_size,
        block_hashes=b"".join(HASHES[:2]).hex(), deadline_s=60.0,
    ))  # fmt: skip
    pair.run(1.0)
    assert pair.receiver_log.infos == {}
