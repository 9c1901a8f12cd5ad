"""One transfer at a time through both state machines on the in-memory twin: the rules of KVX/1, one by one."""

import logging
import threading
from dataclasses import replace

import pytest
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, MemoryPair, fill, tokens_of

from shared.errors import TransferError
from shared.transport.protocol import control
from shared.transport.protocol.frames import DataHeader, checksum
from shared.transport.protocol.limits import DEAD_WIRE_S
from shared.transport.protocol.wire_plan import WirePlan
from shared.transport.simulated_network import BytesMemory, FaultPlan
from shared.transport.wires.wire_speed import probe_messages

PLAN = WirePlan.between(LAYOUT, LAYOUT, "auto")


def _incoming(pair: MemoryPair):
    return pair.receiver._incoming[TRANSFER]


def _headers(pair: MemoryPair) -> list[DataHeader]:
    """Let the pair record every data message it sends."""
    sent: list[DataHeader] = []
    post = pair.network.post_data

    def record(sender, endpoint, lane, header, payload):
        sent.append(header)
        post(sender, endpoint, lane, header, payload)

    pair.network.post_data = record
    return sent


def test_blocks_arrive_whole_and_by_index():
    pair = MemoryPair()
    hashes = [bytes([index]) * 16 for index in range(7)]
    pair.offer(30, hashes)
    pair.expect(30, [2, 3, 4, 5, 6, 7], hashes)
    pair.send_all(30)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.sender_log.ended == {TRANSFER: [None]}
    assert pair.is_copied_up_to(30, [2, 3, 4, 5, 6, 7])
    assert pair.target.block(15) == bytes(LAYOUT.block_nbytes), "a block the receiver holds is not written"
    info = pair.receiver_log.infos[TRANSFER]
    assert (info.num_blocks_missing, info.num_bytes, info.num_chunks) == (6, 5 * LAYOUT.block_nbytes + LAYOUT.block_nbytes // 2, 12)
    assert info.expected_s <= info.granted_s <= info.first_chunk_s <= info.last_chunk_s <= info.committed_s
    assert pair.receiver_log.hidden[TRANSFER] == b"hidden"
    assert pair.sender.counters()["bytes_deduped"] == 2 * LAYOUT.block_nbytes


def test_nothing_is_sent_before_the_grant():
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(16)
    pair.send_all(16)
    pair.network.run(2.0)
    assert sent == [] and pair.sender_log.granted == []
    pair.expect(16, [0, 1, 2, 3])
    pair.run()
    assert pair.is_copied([0, 1, 2, 3])


def test_only_missing_blocks_are_sent_and_of_the_last_only_what_is_valid():
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(13)
    pair.expect(13, [1, 3])
    pair.send_all(13)
    pair.run()
    chunks = [header for header in sent if header.payload_nbytes]
    assert {header.block_index for header in chunks} == {1, 3}
    assert {header.block_tokens for header in chunks if header.block_index == 3} == {1}
    assert {header.block_tokens for header in chunks if header.block_index == 1} == {4}
    assert pair.is_copied([1])
    assert tokens_of(pair.target.block(12), 1) == tokens_of(pair.source.block(3), 1)
    assert set(tokens_of(pair.target.block(12), -3)) == {0}, "what means nothing does not travel"


def test_with_nothing_missing_the_commit_alone_completes():
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(16)
    pair.expect(16, [])
    pair.send_all(16, b"only this")
    pair.run()
    assert pair.receiver_log.hidden == {TRANSFER: b"only this"} and sent == []


def test_in_flight_chunks_never_exceed_the_credits():
    pair = MemoryPair(FaultPlan(lane_bytes_per_s=1e5))
    peak = 0
    post = pair.network.post_data

    def watch(*args):
        nonlocal peak
        peak = max(peak, len(pair.sender._parts(TRANSFER)[0].in_flight))
        post(*args)

    pair.network.post_data = watch
    pair.offer(64)
    pair.expect(64, list(range(16)))
    pair.send_all(64)
    pair.run(60)
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert peak == SETTINGS.kv_credits


def test_slow_prefill_that_renews_is_not_cut():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.network.run(40.0)
    assert pair.receiver_log.ended == {} and pair.sender_log.ended == {}
    pair.send_all(16)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}


def test_slow_wire_that_lives_is_not_cut():
    pair = MemoryPair(FaultPlan(lane_bytes_per_s=LAYOUT.layer_nbytes / 4))
    pair.offer(8, deadline_s=300)
    pair.expect(8, [0, 1], deadline_s=300)
    pair.send_all(8)
    pair.run(290)
    assert pair.receiver_log.ended == {TRANSFER: [None]}
    assert pair.receiver.counters()["chunks_nacked"] == 0


def test_announced_offer_waits_longer_than_an_unknown_one():
    pair = MemoryPair()
    pair.offer(16, deadline_s=300)
    pair.network.run(32.0)
    assert "did not reserve" in pair.sender_log.ended[TRANSFER][0]
    pair = MemoryPair()
    pair.receiver.announce(TRANSFER, 200)
    pair.offer(16, deadline_s=300)
    pair.network.run(60.0)
    assert pair.sender_log.ended == {}


def test_denied_offer_fails_with_the_reason_whichever_comes_first():
    for is_denied_first in (True, False):
        pair = MemoryPair()
        if is_denied_first:
            pair.receiver.deny(TRANSFER, "no room", 250)
        pair.offer(16)
        pair.network.run(0.5)
        pair.receiver.deny(TRANSFER, "no room", 250)
        pair.network.run(1.0)
        assert "no room" in pair.sender_log.ended[TRANSFER][0]


@pytest.mark.parametrize("field, value", [("num_kv_heads", 1), ("model_fingerprint", "other"), ("block_size", 6)])
def test_incompatible_layout_is_refused_at_hello_with_the_field_named(field, value):
    pair = MemoryPair(receiver_layout=LAYOUT.model_copy(update={field: value}))
    pair.offer(16)
    pair.network.run(0.5)
    assert field in pair.sender_log.ended[TRANSFER][0]


def test_offer_of_other_hashes_is_refused():
    pair = MemoryPair()
    pair.offer(16, [b"a" * 16])
    pair.expect(16, [0], [b"b" * 16])
    pair.run()
    assert "block_hashes" in pair.sender_log.ended[TRANSFER][0] and "block_hashes" in pair.receiver_log.ended[TRANSFER][0]


def test_restarted_decode_worker_is_noticed_at_hello():
    pair = MemoryPair(receiver_incarnation=23)
    pair.offer(16)
    pair.network.run(0.5)
    assert "restarted" in pair.sender_log.ended[TRANSFER][0]


def test_peer_that_never_answers_hello_fails_within_its_deadline():
    pair = MemoryPair()
    pair.network.kill("decode-0")
    pair.offer(16)
    pair.network.run(2.2)
    assert "HELLO" in pair.sender_log.ended[TRANSFER][0]


def test_silent_sender_fails_the_transfer_within_two_seconds():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.network.run(0.5)
    pair.network.kill("prefill-0")
    pair.network.run(2.0)
    assert "silent" in pair.receiver_log.ended[TRANSFER][0]


def test_expected_transfer_that_is_never_offered_fails():
    pair = MemoryPair()
    pair.expect(16, [0, 1])
    pair.network.run(SETTINGS.kv_progress_timeout_s + 0.2)
    assert "offered nothing" in pair.receiver_log.ended[TRANSFER][0]


def test_deadline_ends_both_sides():
    pair = MemoryPair()
    pair.offer(16, deadline_s=5)
    pair.expect(16, [0, 1], deadline_s=5)
    pair.network.run(5.5)
    assert len(pair.sender_log.ended[TRANSFER]) == 1 and len(pair.receiver_log.ended[TRANSFER]) == 1


def test_damaged_chunk_is_asked_for_again_and_only_that():
    pair = MemoryPair()
    on_data, damaged = pair.receiver.on_data, []

    def damage_once(lane, header, payload):
        parsed = DataHeader.unpack(header, 1 << 20)
        if parsed.payload_nbytes and parsed.chunk_seq == 2 and not damaged:
            damaged.append(parsed)
            payload = memoryview(b"\xff" + bytes(payload[1:]))
        on_data(lane, header, payload)

    pair.receiver.on_data = damage_once
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.send_all(16)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied([0, 1, 2, 3])
    assert pair.receiver.counters()["bad_checksums"] == 1 and pair.sender.counters()["chunks_resent"] == 1


@pytest.mark.parametrize("lost", [0, 4, 7])
def test_lost_chunk_is_found_at_the_fence_and_sent_again(lost):
    pair = MemoryPair()
    on_data, dropped = pair.receiver.on_data, []

    def drop_once(lane, header, payload):
        parsed = DataHeader.unpack(header, 1 << 20)
        if parsed.payload_nbytes and parsed.chunk_seq == lost and not dropped:
            dropped.append(parsed)
            return
        on_data(lane, header, payload)

    pair.receiver.on_data = drop_once
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.send_all(16)
    pair.run(0.5)
    assert pair.receiver_log.ended == {TRANSFER: [None]} and pair.is_copied([0, 1, 2, 3])
    assert pair.sender.counters()["chunks_resent"] == 1


def test_chunk_that_comes_damaged_twice_fails_the_transfer():
    pair = MemoryPair(FaultPlan(data_flip=1.0))
    pair.offer(16)
    pair.expect(16, [0])
    pair.send_all(16)
    pair.run(2.0)
    assert "damaged 2 times" in pair.receiver_log.ended[TRANSFER][0] and len(pair.sender_log.ended[TRANSFER]) == 1


def test_commit_without_all_blocks_fails_both_sides_at_once():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.sender.send_blocks(TRANSFER, [(0, 0), (1, 1)])
    pair.sender.commit(TRANSFER, b"", 0)
    pair.run(0.5)
    assert "missing blocks [2, 3]" in pair.sender_log.ended[TRANSFER][0]
    assert "missing blocks" in pair.receiver_log.ended[TRANSFER][0]


def test_sender_that_cannot_read_a_block_tells_the_receiver():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.sender.send_blocks(TRANSFER, [(0, 0), (1, 999)])
    pair.run(0.5)
    assert "cannot read" in pair.sender_log.ended[TRANSFER][0] and "cannot read" in pair.receiver_log.ended[TRANSFER][0]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_abort_ends_both_sides_and_late_chunks_are_discarded(side):
    pair = MemoryPair(FaultPlan(min_delay_s=0.3, max_delay_s=0.3))
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.send_all(16)
    pair.network.run(1.1)  # HELLO, ACK, OFFER are through; the GRANT is on its way
    pair.network.run(0.2)  # chunks are on their way
    if side == "sender":
        pair.sender.abort(TRANSFER, "client left")
        pair.network.run(0.1)
        assert "client left" in pair.sender_log.ended[TRANSFER][0]
    else:
        assert pair.receiver.abort(TRANSFER, "client left")
        for block_id in range(16):
            fill(pair.target, block_id, 7)
        pair.network.run(2.0)
        assert pair.receiver_log.ended == {}, "the caller knows; no event follows"
        assert all(set(pair.target.block(block_id)) == {7} for block_id in range(16))
        assert pair.receiver.counters()["stale_frames"] > 0
    pair.network.run(2.0)
    assert "client left" in (pair.receiver_log if side == "sender" else pair.sender_log).ended[TRANSFER][0]
    assert not pair.receiver.abort(TRANSFER, "again")


def test_abort_before_the_offer_refuses_it():
    pair = MemoryPair()
    pair.receiver.abort(TRANSFER, "client left")
    pair.offer(16)
    pair.network.run(0.5)
    assert "client left" in pair.sender_log.ended[TRANSFER][0]


def test_prefill_that_aborts_before_the_reservation_fails_it_at_once():
    pair = MemoryPair()
    pair.offer(16)
    pair.network.run(0.5)
    pair.sender.abort(TRANSFER, "out of memory")
    pair.network.run(0.5)
    pair.expect(16, [0])
    pair.network.run(0.1)
    assert "out of memory" in pair.receiver_log.ended[TRANSFER][0]


@pytest.mark.parametrize("num_first", [0, 2])
def test_what_prefill_takes_to_compute_is_not_taken_for_a_wire_that_is_dead(num_first):
    """A request may wait for its turn, or for its next chunk, for longer than a wire may be silent."""
    pair = MemoryPair(FaultPlan(min_delay_s=0.1, max_delay_s=0.1))
    pair.offer(16)
    pair.expect(16, [0, 1, 2, 3])
    pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(num_first)])
    pair.network.run(DEAD_WIRE_S + 5)
    assert not pair.sender_log.ended
    pair.sender.send_blocks(TRANSFER, [(index, index) for index in range(num_first, 4)])
    pair.network.run(0.15)  # on the way
    pair.sender.commit(TRANSFER, b"", 0)
    pair.network.run(2.0)
    assert pair.sender_log.ended == pair.receiver_log.ended == {TRANSFER: [None]}


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("stage", ["before the reservation", "while it waits for room", "under way"])
def test_the_receiver_learns_whether_a_transfer_broke_or_nobody_wants_it_any_more(stage, is_cancelled):
    pair = MemoryPair(FaultPlan(max_delay_s=0.02))
    pair.offer(16)
    if stage == "before the reservation":
        pair.network.run(0.5)
    else:
        pair.expect(16, [0, 1, 2, 3])
        pair.network.run(0.5 if stage == "under way" else 0.0)
    pair.sender.abort(TRANSFER, "so it is", is_cancelled=is_cancelled)
    pair.network.run(0.5)
    if stage == "before the reservation":
        pair.expect(16, [0])
        pair.network.run(0.1)
    assert "so it is" in pair.receiver_log.ended[TRANSFER][0]
    assert pair.receiver_log.cancelled == [TRANSFER] * is_cancelled


@pytest.mark.parametrize(
    "changes",
    [{"grant_id": 1}, {"slot_gen": 99}, {"src_incarnation": 12}, {"dst_incarnation": 21}, {"attempt": 1}, {"transfer_id": bytes(16)}],
    ids=str,
)
def test_frame_of_another_grant_is_counted_and_writes_nothing(changes):
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.network.run(0.5)
    fill(pair.target, 14, 7)
    payload = memoryview(b"\x01" * sent[0].payload_nbytes)
    pair.receiver.on_data(0, replace(sent[0], block_index=1, chunk_seq=5, **changes).pack(), payload)
    assert set(pair.target.block(14)) == {7}
    assert pair.receiver.counters()["stale_frames"] == 1


def test_a_wire_is_measured_anew_when_it_is_opened_again(caplog):
    caplog.set_level(logging.INFO)
    pair = MemoryPair()
    pair.offer(16)
    pair.network.run(0.5)
    probes = [probe.header.pack() for probe in probe_messages(PLAN, LAYOUT.layer_nbytes, 11, 22)]
    for lane in range(SETTINGS.kv_lanes):
        pair.receiver.on_data(lane, probes[0], memoryview(b""))  # and there the connection broke
    pair.clock.advance(3600.0)
    for probe in probes:
        for lane in range(SETTINGS.kv_lanes):
            pair.clock.advance(1e-6)
            pair.receiver.on_data(lane, probe, memoryview(b""))
    assert "KV wire from prefill-0: tcp, " in caplog.text
    assert "is slow" not in caplog.text


def test_chunk_for_a_block_that_was_not_granted_fails_the_transfer():
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.network.run(0.5)
    pair.receiver.on_data(0, replace(sent[0], block_index=2, chunk_seq=5).pack(), memoryview(bytes(sent[0].payload_nbytes)))
    pair.run(0.5)
    assert "not all among the missing" in pair.receiver_log.ended[TRANSFER][0]


def test_abort_waits_for_the_lane_that_is_writing():
    pair = MemoryPair()
    sent = _headers(pair)
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.sender.send_blocks(TRANSFER, [(0, 0)])
    pair.network.run(0.5)
    grant = _incoming(pair)
    is_writing, may_finish, is_aborted = threading.Event(), threading.Event(), threading.Event()

    class SlowMemory(BytesMemory):
        def write(self, regions, data):
            is_writing.set()
            may_finish.wait(60)
            return pair.target.write(regions, data)

    pair.receiver._memory = SlowMemory(16, LAYOUT)
    payload = bytes(pair.source.block(1)[: sent[0].payload_nbytes])
    header = replace(sent[0], block_index=1, chunk_seq=5, checksum=checksum(payload)).pack()
    lane = threading.Thread(target=pair.receiver.on_data, args=(0, header, memoryview(payload)))
    lane.start()
    assert is_writing.wait(30)
    aborter = threading.Thread(target=lambda: (pair.receiver.abort(TRANSFER, "now"), is_aborted.set()))
    aborter.start()
    assert not is_aborted.wait(0.1), "abort must not return while a lane writes"
    may_finish.set()
    assert is_aborted.wait(30) and grant.num_writing == 0
    lane.join()
    aborter.join()


def test_draining_receiver_finishes_what_it_granted_and_refuses_new_offers():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [0])
    pair.network.run(0.5)
    pair.receiver.drain()
    pair.offer(16, transfer_id="cd" * 16)
    pair.send_all(16)
    pair.network.run(1.0)
    assert pair.sender_log.ended == {TRANSFER: [None], "cd" * 16: ["denied by the decode worker: the decode worker is draining"]}


def test_expect_refuses_arguments_that_contradict_each_other():
    pair = MemoryPair()
    with pytest.raises(TransferError, match="need 4 blocks"):
        pair.receiver.expect(TRANSFER, 0, [1], [0], 16, 5)
    with pytest.raises(TransferError, match="indices"):
        pair.receiver.expect(TRANSFER, 0, [10, 11, 12, 13], [12], 16, 5)
    pair.expect(16, [0])
    with pytest.raises(TransferError, match="already"):
        pair.expect(16, [0])


def test_control_message_of_an_unknown_connection_is_told_to_say_hello():
    pair = MemoryPair()
    pair.receiver.on_control("prefill-0>nobody", control.Renew(transfer_id=TRANSFER, src_incarnation=11, dst_incarnation=22))
    assert pair.receiver.counters()["control_ignored"] == 1


def test_what_is_offered_to_a_sender_that_has_closed_fails_at_once():
    pair = MemoryPair()
    pair.sender.close()
    pair.offer(16)
    assert "shutting down" in pair.sender_log.ended[TRANSFER][0] and pair.sender.num_transfers == 0


def test_sender_told_to_encrypt_sends_over_no_plain_lane():
    pair = MemoryPair(settings=SETTINGS.model_copy(update={"kv_lane_security": "curve"}))
    sent = _headers(pair)
    pair.offer(16)
    pair.expect(16, [0])
    pair.send_all(16)
    pair.run(1.0)
    assert "not encrypted" in pair.sender_log.ended[TRANSFER][0] and sent == []


def test_sender_that_was_frozen_goes_on_with_what_is_new_and_learns_why_the_rest_has_failed():
    pair, other = MemoryPair(), "cd" * 16
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.network.run(0.5)
    pair.network.stop("prefill-0", 3.0)
    pair.network.run(2.9)
    pair.network.run_in("prefill-0", lambda: pair.offer(16, transfer_id=other))
    pair.receiver.expect(other, 0, range(4), [], 16, 60.0)
    pair.network.run(1.0)
    pair.sender.commit(other, b"hidden", 0)
    pair.network.run(1.0)
    assert pair.sender_log.ended[other] == [None]
    assert "silent for" in pair.sender_log.ended[TRANSFER][0]
