"""What the sender makes chunks of: groups of layers as they come, blocks put together, what a slow peer may hold."""

from collections import Counter

from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, MemoryPair

from shared.transport.protocol.limits import MAX_CHUNKS_PER_PEER
from shared.transport.simulated_network import FaultPlan


def _chunks(pair: MemoryPair) -> list:
    sent = []
    post = pair.network.post_data

    def record(sender, endpoint, lane, header, payload):
        if header.payload_nbytes:
            sent.append(header)
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = record
    return sent


def test_layers_leave_group_by_group_and_only_the_last_group_waits_for_the_end():
    pair = MemoryPair()
    sent = _chunks(pair)
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.network.run(0.5)
    for first in (0, 2, 4):
        pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(4)], (first, 2))
        pair.network.run(0.5)
        assert {(header.layer_start, header.layer_count) for header in sent} == {(start, 2) for start in range(0, first + 1, 2)}
    pair.sender.commit(TRANSFER, b"hidden", 0)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied([0, 1, 2, 3])
    assert len(sent) == 12


def test_a_layer_that_was_handed_over_twice_is_sent_once():
    pair = MemoryPair()
    sent = _chunks(pair)
    pair.offer(4)
    pair.sender.send_blocks(TRANSFER, [(0, 0)], (1, 3))
    pair.expect(4, [0])
    pair.network.run(0.5)
    pair.sender.send_blocks(TRANSFER, [(0, 0)], (0, 2))
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.sender.commit(TRANSFER, b"hidden", 0)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied([0])
    layers = Counter(layer for header in sent for layer in range(header.layer_start, header.layer_start + header.layer_count))
    assert layers == dict.fromkeys(range(LAYOUT.num_layers), 1)


def test_commit_without_one_layer_of_a_missing_block_is_refused():
    pair = MemoryPair()
    pair.offer(8)
    pair.expect(8, [0, 1])
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.sender.send_blocks(TRANSFER, [(1, 1)], (0, 5))
    pair.sender.commit(TRANSFER, b"hidden", 0)
    pair.run()
    assert "commit without the missing blocks [1]" in pair.sender_log.ended[TRANSFER][0]
    assert "commit without" in pair.receiver_log.ended[TRANSFER][0]


def test_memory_that_prefers_large_chunks_gets_blocks_put_together():
    pair = MemoryPair(settings=SETTINGS.model_copy(update={"kv_max_chunk_bytes": 1 << 20, "kv_credits": 16}))
    pair.source.preferred_chunk_bytes = 4 * LAYOUT.block_nbytes
    sent = _chunks(pair)
    pair.offer(38)
    pair.expect(38, [0, 1, 2, 4, 5, 6, 7, 8, 9])
    pair.network.run(0.5)
    pair.send_all(38)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied_up_to(38, [0, 1, 2, 4, 5, 6, 7, 8, 9])
    shapes = [(header.block_index, header.block_count, header.block_tokens) for header in sent]
    assert shapes == [(0, 3, 4), (4, 4, 4), (8, 1, 4), (9, 1, 2)], "neighbours only, and the last, shorter unit by itself"


def test_large_chunks_of_layer_groups_keep_groups_apart():
    pair = MemoryPair(settings=SETTINGS.model_copy(update={"kv_max_chunk_bytes": 2 * LAYOUT.layer_nbytes * 4, "kv_credits": 16}))
    pair.source.preferred_chunk_bytes = 2 * LAYOUT.layer_nbytes * 4
    sent = _chunks(pair)
    pair.offer(32)
    pair.expect(32, list(range(8)))
    pair.network.run(0.5)
    for first in (0, 2, 4):
        pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(8)], (first, 2))
    pair.sender.commit(TRANSFER, b"hidden", 0)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(list(range(8)))
    assert [header.block_count for header in sent] == [4] * 6


def test_a_peer_that_takes_nothing_holds_a_bounded_number_of_chunks():
    pair = MemoryPair(FaultPlan(data_loss=1.0), num_blocks=64, settings=SETTINGS.model_copy(update={"kv_credits": 16}))
    for number in range(10):
        transfer_id = f"{number:032x}"
        pair.sender.offer(transfer_id, 0, [pair.peer], 64, [], 60.0, "")
        pair.receiver.expect(transfer_id, 0, range(16), range(16), 64, 60.0)
        pair.sender.send_blocks(transfer_id, [(index, index) for index in range(16)])
    pair.network.run(1.0)
    connection = next(iter(pair.sender._connections.values()))
    assert sum(lane.num_in_flight for lane in connection.lanes) == MAX_CHUNKS_PER_PEER


def test_transfers_that_waited_for_room_at_a_peer_go_on_when_others_leave():
    pair = MemoryPair(FaultPlan(lane_bytes_per_s=2e6), num_blocks=64, settings=SETTINGS.model_copy(update={"kv_credits": 16}))
    for number in range(10):
        transfer_id = f"{number:032x}"
        pair.sender.offer(transfer_id, 0, [pair.peer], 64, [], 60.0, "")
        pair.receiver.expect(transfer_id, 0, range(16), range(16), 64, 60.0)
        pair.sender.send_blocks(transfer_id, [(index, index) for index in range(16)])
        pair.sender.commit(transfer_id, b"", 0)
    pair.network.run(20.0)
    assert list(pair.receiver_log.ended.values()) == [[None]] * 10


def test_blocks_of_several_layer_ranges_are_put_together_range_by_range():
    """More blocks at once than are looked at ahead."""
    num_blocks = 600
    pair = MemoryPair(num_blocks=num_blocks, settings=SETTINGS.model_copy(update={"kv_credits": 64}))
    pair.source.preferred_chunk_bytes = SETTINGS.kv_max_chunk_bytes
    sent = _chunks(pair)
    num_tokens = num_blocks * LAYOUT.block_size
    pair.offer(num_tokens)
    pair.receiver.expect(TRANSFER, 0, range(num_blocks), range(num_blocks), num_tokens, 60.0)
    pair.network.run(0.5)
    pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(num_blocks)])
    pair.sender.commit(TRANSFER, b"", 0)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert all(pair.source.block(index) == pair.target.block(index) for index in range(num_blocks))
    assert {(header.layer_start, header.layer_count, header.block_count) for header in sent} == {(0, 4, 1), (4, 2, 2)}
