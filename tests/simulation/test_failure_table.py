"""The failure cases of KVX/1, one test for each, in the order of the protocol's table.

On the in-memory twin, so that seconds pass in milliseconds. What only real processes, sockets or a real decode worker show is in
tests/integration (test_kv_zmq, test_kv_proxy, test_kv_transports, test_kv_security, test_worker_failures, test_failure_table_on_workers);
each docstring here says where its case goes on.
"""

import json
import random
import struct
import time
import zlib
from dataclasses import replace

import pytest
from kv_transfer_pairs import LAYOUT, POISON, SETTINGS, TRACEPARENT, TRANSFER, MemoryPair, ReceiverLog, SenderLog, fill, random_memory
from tensor_parallel_pairs import HEADS, Ranks

from shared.messages import KVPeer
from shared.transport.protocol import control
from shared.transport.protocol.frames import DataHeader
from shared.transport.protocol.limits import MAX_WAITING_OFFERS_PER_PEER
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.sending.sender_state import SenderState
from shared.transport.simulated_network import BytesMemory, FaultPlan, MemoryReceiverWire, MemorySenderWire

DETECTION_S = 2.0
ALL = list(range(16))
NUM_TOKENS = 16 * LAYOUT.block_size
SLOW = FaultPlan(lane_bytes_per_s=50_000.0)
"""All sixteen blocks take two seconds."""


def start(pair: MemoryPair, missing: list[int] = ALL) -> None:
    pair.offer(NUM_TOKENS)
    pair.expect(NUM_TOKENS, missing)
    pair.send_all(NUM_TOKENS)


def poison_targets(pair: MemoryPair) -> None:
    """As if the receiver's owner had given the blocks to somebody else."""
    for block_id in range(16):
        fill(pair.target, block_id, POISON)


def is_untouched(pair: MemoryPair) -> bool:
    return all(set(pair.target.block(block_id)) == {POISON} for block_id in range(16))


def seconds_until(pair: MemoryPair, condition, limit_s: float = 60.0) -> float:
    start_s = pair.clock.now_s()
    pair.network.run(limit_s, condition)
    assert condition(), "it did not come true"
    return pair.clock.now_s() - start_s


def recorded_frames(pair: MemoryPair) -> list[tuple[DataHeader, memoryview]]:
    sent: list[tuple[DataHeader, memoryview]] = []
    post = pair.network.post_data

    def record(sender, endpoint, lane, header, payload):
        sent.append((header, payload))
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = record
    return sent


def restart_decode(pair: MemoryPair, incarnation: int = 23) -> tuple[ReceiverState, ReceiverLog]:
    """Another process at the same address."""
    pair.network.kill("decode-0")
    log = ReceiverLog()
    successor = ReceiverState(
        layout=LAYOUT, memory=pair.target, incarnation=incarnation, events=log, clock=pair.clock, settings=SETTINGS,
        wire=MemoryReceiverWire(pair.network), lanes=LaneAddresses(("lane-0", "lane-1")),
    )  # fmt: skip
    pair.network.add_receiver("decode-0", successor)
    return successor, log


def second_prefill(pair: MemoryPair) -> tuple[SenderState, SenderLog, BytesMemory]:
    log, memory = SenderLog(), random_memory(16, 9)
    sender = SenderState(
        layout=LAYOUT, memory=memory, incarnation=12, events=log, clock=pair.clock, settings=SETTINGS, worker_id="prefill-1",
        wire=MemorySenderWire(pair.network, "prefill-1", memory),
    )  # fmt: skip
    pair.network.add_sender("prefill-1", sender)
    return sender, log, memory


def test_case_01_decode_without_room_keeps_a_bounded_queue_and_says_when_to_come_back():
    """Whole workers: test_worker_failures, tests/integration/router (429)."""
    pair = MemoryPair()
    said = []
    post = pair.network.post_control
    pair.network.post_control = lambda connection, message, *rest: (said.append(message), post(connection, message, *rest))
    pair.offer(NUM_TOKENS)
    pair.network.run(10.0)
    assert not pair.sender_log.ended, "an offer waits for room"
    assert len(said) < 100, "and waits without asking all the time"
    for number in range(MAX_WAITING_OFFERS_PER_PEER):
        pair.sender.offer(f"{number:032x}", 0, [pair.peer], 4, [], 60.0, TRACEPARENT)
    pair.network.run(1.0)
    denied = [message for message in said if isinstance(message, control.Deny)]
    assert denied
    assert all(message.retry_ms > 0 for message in denied)
    assert any("retry in 100 ms" in ends[0] for ends in pair.sender_log.ended.values())
    pair.expect(NUM_TOKENS, ALL)
    pair.send_all(NUM_TOKENS)
    pair.network.run(2.0)
    assert pair.sender_log.ended[TRANSFER] == [None], "the one that waited is served"


@pytest.mark.parametrize("when", ["before the grant", "during the transfer", "after the commit"])
def test_case_02_a_client_that_leaves_frees_the_grant_within_a_tenth_of_a_second(when):
    """Whole workers: test_disconnects."""
    pair = MemoryPair(SLOW)
    if when == "before the grant":
        pair.offer(NUM_TOKENS)
        pair.network.run(0.2)
        assert pair.receiver.abort(TRANSFER, "client left") is False, "nothing was expected yet"
    else:
        start(pair)
        pair.network.run(0.5 if when == "during the transfer" else 20.0)
        was_there = pair.receiver.abort(TRANSFER, "client left")
        assert was_there == (when == "during the transfer")
    poison_targets(pair)
    if when == "after the commit":
        assert pair.receiver_log.ended == {TRANSFER: [None]}
        return
    assert seconds_until(pair, lambda: bool(pair.sender_log.ended)) < 0.1
    assert "client left" in pair.sender_log.ended[TRANSFER][0]
    pair.network.run(10.0)
    assert is_untouched(pair), "what was on the way lands nowhere"
    assert pair.receiver_log.ended == {}


def test_case_03_a_request_that_decode_refuses_is_over_at_prefill_at_once():
    pair = MemoryPair()
    pair.offer(NUM_TOKENS)
    pair.network.run(0.2)
    pair.receiver.deny(TRANSFER, "the queue is full", 250)
    assert seconds_until(pair, lambda: bool(pair.sender_log.ended)) < 0.1
    assert "the queue is full" in pair.sender_log.ended[TRANSFER][0]
    assert pair.sender.num_transfers == pair.receiver.num_transfers == 0


def test_case_04_prefill_killed_in_mid_chunk_is_noticed_and_nothing_half_done_is_seen():
    """Real processes: test_kv_zmq, test_worker_failures."""
    pair = MemoryPair(SLOW)
    start(pair)
    pair.network.run(0.5)
    pair.network.kill("prefill-0")
    assert seconds_until(pair, lambda: bool(pair.receiver_log.ended)) < DETECTION_S
    assert pair.receiver_log.ended[TRANSFER] != [None]
    poison_targets(pair)
    pair.network.run(10.0)
    assert is_untouched(pair)


def test_case_05_frames_for_a_process_that_died_are_refused_by_its_successor_at_the_same_address():
    """Real processes: test_kv_zmq."""
    pair = MemoryPair(replace(SLOW, min_delay_s=0.2, max_delay_s=0.2))
    start(pair)
    pair.network.run(1.2)
    successor, log = restart_decode(pair)
    poison_targets(pair)
    successor.expect(TRANSFER, 0, ALL, ALL, NUM_TOKENS, 60.0, TRACEPARENT)
    assert seconds_until(pair, lambda: bool(pair.sender_log.ended)) < DETECTION_S
    assert "restarted" in pair.sender_log.ended[TRANSFER][0]
    pair.network.run(5.0)
    assert is_untouched(pair)
    assert successor.counters()["stale_frames"] > 0
    assert log.ended == {}, "what the successor expects is not touched by what was meant for another"


@pytest.mark.parametrize("frozen", ["prefill-0", "decode-0"])
def test_case_06_a_frozen_peer_is_as_good_as_dead_and_refused_when_it_thaws(frozen):
    """Real processes: test_kv_zmq, test_worker_failures."""
    pair = MemoryPair(SLOW)
    start(pair)
    pair.network.run(0.5)
    pair.network.stop(frozen, 6.0)
    survivor = pair.receiver_log if frozen == "prefill-0" else pair.sender_log
    assert seconds_until(pair, lambda: bool(survivor.ended)) < DETECTION_S
    assert survivor.ended[TRANSFER] != [None]
    if frozen == "prefill-0":
        poison_targets(pair)
    pair.network.run(20.0)
    assert pair.sender_log.ended[TRANSFER] != [None]
    assert pair.receiver_log.ended[TRANSFER] != [None]
    assert frozen == "decode-0" or is_untouched(pair), "after the thaw its frames land nowhere"
    assert pair.sender.num_transfers == pair.receiver.num_transfers == 0


def test_case_07_a_slow_receiver_that_lives_is_waited_for():
    """Real sockets: test_kv_zmq, test_kv_proxy."""
    pair = MemoryPair(FaultPlan(lane_bytes_per_s=2_000.0))
    pair.offer(NUM_TOKENS, deadline_s=600.0)
    pair.expect(NUM_TOKENS, ALL, deadline_s=600.0)
    pair.send_all(NUM_TOKENS)
    took_s = seconds_until(pair, lambda: bool(pair.sender_log.ended and pair.receiver_log.ended), 300.0)
    assert took_s > 20.0
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)
    assert pair.sender.counters()["chunks_resent"] == 0, "slow is not lost"


def test_case_08_a_lane_that_drops_is_gone_on_from_and_the_other_lane_never_stops():
    """Real sockets: test_kv_proxy."""
    pair = MemoryPair(SLOW)
    post, is_broken = pair.network.post_data, False

    def drop_on_broken(sender, endpoint, lane, header, payload):
        if not (is_broken and lane == 0):
            post(sender, endpoint, lane, header, payload)

    pair.network.post_data = drop_on_broken
    peer = f"decode-0#{22:x}"
    start(pair)
    pair.network.run(0.3)
    is_broken = True
    pair.sender.on_lane(peer, 0, is_connected=False)
    assert seconds_until(pair, lambda: bool(pair.receiver_log.ended)) < 4.0
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)
    assert pair.sender.counters()["lanes_given_up"] == 1
    assert pair.sender.counters()["chunks_resent"] <= SETTINGS.kv_credits, "only what was on it travels again"


@pytest.mark.parametrize("away_s", [0.6, 5.0])
def test_case_09_control_that_drops_is_resumed_within_its_grace_and_ends_the_transfer_after_it(away_s):
    """Real sockets: test_kv_proxy."""
    pair = MemoryPair(SLOW)
    peer = f"decode-0#{22:x}"
    post, is_away = pair.network.post_control, False
    pair.network.post_control = lambda *arguments: None if is_away else post(*arguments)
    start(pair)
    pair.network.run(0.3)
    is_away = True
    pair.network.run(away_s)
    is_away = False
    pair.sender.on_reconnected(peer)
    pair.network.run(20.0)
    if away_s < 1.0:
        assert pair.receiver_log.ended == {TRANSFER: [None]} == pair.sender_log.ended
        assert pair.sender.counters()["resumes"] == 1
        assert pair.sender.counters()["chunks_resent"] == 0
        assert pair.is_copied(ALL)
    else:
        assert pair.receiver_log.ended[TRANSFER] != [None] != pair.sender_log.ended[TRANSFER]


def test_case_10_duplicated_reordered_and_late_chunks_change_nothing():
    """Real sockets: test_kv_proxy."""
    pair = MemoryPair(FaultPlan(data_duplicate=0.5, control_duplicate=0.5, min_delay_s=0.0001, max_delay_s=0.3))
    sent = recorded_frames(pair)
    start(pair)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]} == pair.sender_log.ended
    assert pair.is_copied(ALL)
    assert pair.receiver.counters()["chunks_duplicate"] > 0
    poison_targets(pair)
    for header, payload in sent:
        pair.receiver.on_data(0, header.pack(), payload)
    assert is_untouched(pair), "a chunk of a transfer that has ended lands nowhere"


@pytest.mark.parametrize("num_times", [1, 2])
def test_case_11_a_damaged_chunk_is_sent_again_once_and_the_second_time_fails(num_times):
    pair = MemoryPair()
    post, num_struck = pair.network.post_data, 0

    def damage(sender, endpoint, lane, header, payload):
        nonlocal num_struck
        if header.chunk_seq == 3 and header.payload_nbytes and num_struck < num_times:
            num_struck += 1
            payload = memoryview(bytes(len(payload)))
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = damage
    start(pair)
    pair.run()
    assert pair.receiver.counters()["bad_checksums"] == num_times
    if num_times == 1:
        assert pair.receiver_log.ended == {TRANSFER: [None]}
        assert pair.is_copied(ALL)
        assert pair.sender.counters()["chunks_resent"] == 1
    else:
        assert "damaged 2 times" in pair.receiver_log.ended[TRANSFER][0]
        assert "damaged 2 times" in pair.sender_log.ended[TRANSFER][0]


def test_case_11_a_size_that_is_not_the_headers_is_not_taken():
    pair = MemoryPair()
    sent = recorded_frames(pair)
    pair.offer(NUM_TOKENS)
    pair.expect(NUM_TOKENS, ALL)
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.network.run(0.5)
    poison_targets(pair)
    header, payload = sent[0]
    another = replace(header, block_index=1, chunk_seq=9)
    pair.receiver.on_data(0, another.pack(), payload[:-1])
    assert is_untouched(pair)
    assert pair.receiver.counters()["bad_headers"] == 1


def test_case_12_a_hole_at_commit_is_asked_for_and_nothing_is_told_before_it_is_filled():
    pair = MemoryPair()
    post, is_lost = pair.network.post_data, False

    def lose(sender, endpoint, lane, header, payload):
        nonlocal is_lost
        if header.chunk_seq == 5 and header.payload_nbytes and not is_lost:
            is_lost = True
            return
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = lose
    start(pair)
    pair.run()
    assert is_lost
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)
    assert pair.receiver.counters()["chunks_nacked"] == pair.sender.counters()["chunks_resent"] == 1


def test_case_13_blocks_that_prefill_has_given_back_are_never_read_for_a_transfer():
    """Its blocks are prefill's until on_committed or on_failed, and after that no lane reads them."""
    pair = MemoryPair(replace(SLOW, min_delay_s=0.3, max_delay_s=0.3))
    reads, read = [], pair.source.read
    pair.source.read = lambda regions: (reads.append(bool(pair.sender_log.ended)), read(regions))[1]
    start(pair)
    pair.network.run(1.0)
    pair.sender.abort(TRANSFER, "its lease expired")
    for block_id in range(16):
        fill(pair.source, block_id, 0xAB)
    poison_targets(pair)
    pair.network.run(20.0)
    assert not any(reads), "read after the end"
    assert "its lease expired" in pair.receiver_log.ended[TRANSFER][0]
    for block_id in range(16):
        assert 0xAB not in pair.target.block(block_id), "another request's bytes would have been published"


def test_case_14_what_decode_holds_is_matched_by_its_place_in_the_chain():
    """Pinning against eviction: test_failure_table_on_workers."""
    for missing in ([0], [15], [3, 7, 8], ALL):
        pair = MemoryPair()
        poison_targets(pair)
        start(pair, missing)
        pair.run()
        assert pair.receiver_log.ended == {TRANSFER: [None]}
        assert pair.is_copied(missing)
        assert all(set(pair.target.block(15 - index)) == {POISON} for index in ALL if index not in missing)


def test_case_15_two_prefill_workers_with_one_transfer_have_one_grant():
    """Two requests of one prefix: test_failure_table_on_workers."""
    pair = MemoryPair(SLOW)
    other, other_log, _ = second_prefill(pair)
    start(pair)
    pair.network.run(0.3)
    other.offer(TRANSFER, 0, [pair.peer], NUM_TOKENS, [], 60.0, TRACEPARENT)
    other.send_blocks(TRANSFER, [(index, index) for index in ALL])
    pair.network.run(20.0)
    assert "another prefill worker" in other_log.ended[TRANSFER][0]
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)


def test_case_16_prefill_that_gives_up_says_why_and_decode_starts_on_nothing():
    pair = MemoryPair(SLOW)
    pair.offer(NUM_TOKENS)
    pair.expect(NUM_TOKENS, ALL)
    pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(10)])
    pair.network.run(0.5)
    pair.sender.abort(TRANSFER, "out of memory")
    assert seconds_until(pair, lambda: bool(pair.receiver_log.ended)) < 0.2
    assert pair.receiver_log.ended[TRANSFER] == ["aborted by the prefill worker: out of memory"]
    assert pair.receiver_log.hidden == {}


def test_case_17_when_one_rank_of_prefill_fails_no_rank_commits():
    ranks = Ranks(16, 4, 4, 4, 2, FaultPlan(min_delay_s=0.1, max_delay_s=0.1))
    ranks.network.at(0.35, lambda: ranks.senders[3][0].abort(TRANSFER, "rank 3 broke"))
    ranks.start()
    ranks.run()
    assert "rank 3 broke" in ranks.log.ended[TRANSFER][0]
    assert all(log.ended[TRANSFER] != [None] for log in ranks.sender_logs)
    assert all(receiver.num_transfers == 0 for receiver in ranks.receivers)


def test_case_17_when_one_rank_of_decode_fails_no_rank_starts():
    ranks = Ranks(16, 4, 4, 1, 4, FaultPlan(min_delay_s=0.1, max_delay_s=0.1))
    ranks.start()
    ranks.network.run(0.45)
    ranks.network.kill("decode-2")
    ranks.receivers[2].on_peer_lost(ranks.receivers[2].peers()[0][0], "its connection broke")
    ranks.receivers[2].deliver_events()
    ranks.run()
    assert "connection broke" in ranks.log.ended[TRANSFER][0]
    assert ranks.sender_logs[0].ended[TRANSFER] != [None]


@pytest.mark.parametrize("field, value", [("model_fingerprint", "other"), ("block_size", 6), ("num_layers", 7), ("head_dim", 8)])
def test_case_18_a_mismatch_is_refused_at_hello_by_its_name(field, value):
    pair = MemoryPair(receiver_layout=LAYOUT.model_copy(update={field: value}))
    pair.offer(NUM_TOKENS)
    assert seconds_until(pair, lambda: bool(pair.sender_log.ended)) < 0.1
    assert field in pair.sender_log.ended[TRANSFER][0]


def test_case_18_another_version_is_refused_at_hello():
    pair = MemoryPair()
    answers = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": answers.append(message)
    hello = control.Hello(
        src_incarnation=11, dst_incarnation=22, worker_id="p", layout=LAYOUT, num_lanes=1, max_chunk_bytes=1 << 20,
        protocol_min=control.PROTOCOL_VERSION + 1, protocol_max=control.PROTOCOL_VERSION + 3,
    )  # fmt: skip
    pair.receiver.on_control("prefill-9>decode-0", hello)
    assert [(type(answer), answer.field) for answer in answers] == [(control.Deny, "protocol")]


def test_case_18_a_later_version_that_says_more_is_refused_at_hello_too():
    later = {
        "kind": "HELLO", "src_incarnation": 77, "dst_incarnation": 22, "protocol_min": 9, "protocol_max": 9, "what_we_do_not_know": [1]
    }  # fmt: skip
    body = json.dumps(later).encode()
    with pytest.raises(control.OtherVersionError) as caught:
        control.decode(struct.pack("<4sI", b"KVXC", zlib.crc32(body)) + body)
    pair = MemoryPair()
    answers = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": answers.append(message)
    pair.receiver.refuse_version("prefill-9>decode-0", caught.value)
    assert [(type(answer), answer.field, answer.dst_incarnation) for answer in answers] == [(control.Deny, "protocol", 77)]


@pytest.mark.parametrize("src_tp, dst_tp", [(4, 2), (2, 4), (1, 8), (8, 1)])
def test_case_19_unequal_ranks_cover_every_head_exactly_once(src_tp, dst_tp):
    """All pairs, and other block sizes with them: tests/unit/transport/test_unequal_pairs.py."""
    ranks = Ranks(21, 4, 4, src_tp, dst_tp)
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    num_copies = max(1, dst_tp // HEADS)
    assert sum(receiver.counters()["bytes_received"] for receiver in ranks.receivers) == num_copies * ranks.truth.nbytes


def test_case_20_what_was_complete_before_an_abort_is_not_undone_by_it():
    """A waiting request that is preempted: test_failure_table_on_workers."""
    pair = MemoryPair()
    start(pair)
    pair.run()
    assert pair.receiver.abort(TRANSFER, "preempted") is False
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)


def test_case_21_malformed_frames_are_counted_and_cost_nothing():
    """Sizes and keys, by real sockets: test_kv_zmq, test_kv_security; a million frames: tests/fuzz."""
    pair = MemoryPair()
    start(pair, [0])
    draw = random.Random(3)
    pair.network.run(0.0002)
    for size in (0, 1, 191, 192, 193, 4096):
        pair.receiver.on_data(0, draw.randbytes(size), memoryview(draw.randbytes(size)))
    assert pair.receiver.counters()["bad_headers"] == 6
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}


def test_case_22_a_segment_that_is_not_there_is_no_obstacle():
    """Memory once mapped cannot vanish (memfd, sealed). Real segments: test_kv_transports, tests/unit/transport/test_shared_segment.py."""
    pair = MemoryPair()
    pair.source.segment = SegmentOffer(pid=(1 << 22) - 1, fd=5, size_bytes=1 << 20, nonce="00" * 32)
    start(pair)
    pair.run()
    assert pair.receiver_log.infos[TRANSFER].transport == "tcp"
    assert pair.is_copied(ALL)


def test_case_23_one_slow_peer_does_not_hold_up_another():
    pair = MemoryPair()
    slow = KVPeer(worker_id="decode-1", ctrl_endpoint="decode-1", incarnation=33)
    slow_log, slow_memory = ReceiverLog(), BytesMemory(16, LAYOUT)
    receiver = ReceiverState(
        layout=LAYOUT, memory=slow_memory, incarnation=33, events=slow_log, clock=pair.clock, settings=SETTINGS,
        wire=MemoryReceiverWire(pair.network), lanes=LaneAddresses(("lane-0", "lane-1")),
    )  # fmt: skip
    pair.network.add_receiver("decode-1", receiver)
    post = pair.network.post_data
    pair.network.post_data = lambda sender, endpoint, *rest: None if endpoint == "decode-1" else post(sender, endpoint, *rest)
    for number in range(40):
        transfer_id = f"{number:032x}"
        receiver.expect(transfer_id, 0, ALL, ALL, NUM_TOKENS, 60.0)
        pair.sender.offer(transfer_id, 0, [slow], NUM_TOKENS, [], 60.0, TRACEPARENT)
        pair.sender.send_blocks(transfer_id, [(index, index) for index in ALL])
    pair.network.run(0.5)
    start(pair)
    assert seconds_until(pair, lambda: bool(pair.receiver_log.ended)) < 0.5
    assert pair.receiver_log.ended == {TRANSFER: [None]}


@pytest.mark.parametrize("missing", [[], [3], ALL])
def test_case_24_what_travels_is_what_decode_misses_whatever_anybody_believes(missing):
    """An index that is out of date, with real workers: test_failure_table_on_workers."""
    pair = MemoryPair()
    start(pair, missing)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.receiver.counters()["bytes_received"] == len(missing) * LAYOUT.block_nbytes


def test_case_25_deadlines_do_not_look_at_the_wall_clock(monkeypatch):
    pair = MemoryPair(SLOW)
    start(pair)
    pair.network.run(0.3)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    monkeypatch.setattr(time, "time_ns", lambda: 4 * 10**18)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}


def test_case_26_a_receiver_that_shuts_down_finishes_what_it_granted_and_says_goodbye():
    pair = MemoryPair(SLOW)
    start(pair)
    pair.network.run(0.3)
    pair.receiver.drain()
    pair.sender.offer("cd" * 16, 0, [pair.peer], 4, [], 60.0, TRACEPARENT)
    pair.network.run(10.0)
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert "draining" in pair.sender_log.ended["cd" * 16][0]
    pair.receiver.close()
    pair.sender.offer("ef" * 16, 0, [pair.peer], 4, [], 60.0, TRACEPARENT)
    assert seconds_until(pair, lambda: "ef" * 16 in pair.sender_log.ended) < 0.5


def test_case_27_staging_memory_is_kept_until_the_receiver_has_the_chunk():
    """The ring of a GPU worker: tests/unit/engine/test_staging_ring.py, test_device_blocks_on_gpu.py."""
    pair = MemoryPair(replace(SLOW, data_loss=0.2))
    reads = []
    read = pair.source.read

    def read_staged(regions):
        stored = read(regions)
        staged = bytearray(stored.view)
        reads.append(staged)
        return replace(stored, view=memoryview(staged))

    pair.source.read = read_staged
    start(pair)
    pair.network.run(0.5)
    transfer = pair.sender._parts(TRANSFER)[0]
    held = [chunk.stored.view.obj for chunk in transfer.sent if chunk.stored is not None and chunk.stored.view.nbytes]
    in_flight = [transfer.sent[seq] for seq in transfer.in_flight]
    assert all(chunk.stored is not None and chunk.stored.view.obj in reads for chunk in in_flight)
    assert len(held) == len(in_flight), "a slot goes back when its chunk is credited, not before and not later"
    pair.run(60.0)
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.is_copied(ALL)
