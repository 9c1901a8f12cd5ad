"""Peers that hold a key and mean harm: what they say costs them their own transfers at most."""

import json
import zlib
from dataclasses import replace

import pytest
from kv_transfer_pairs import SETTINGS, TRANSFER, MemoryPair

from shared.errors import ProtocolError
from shared.transport.protocol import control
from shared.transport.protocol.frames import MAX_UNITS_PER_CHUNK, DataHeader


def _framed(message: control.ControlMessage, **changes: object) -> bytes:
    """As `encode` would, also what the model does not allow."""
    body = json.dumps({**message.model_dump(), **changes}).encode()
    return control._PREFIX.pack(control._MAGIC, zlib.crc32(body)) + body


def test_grant_before_hello_was_answered_ends_that_transfer_and_nothing_else():
    pair = MemoryPair()
    pair.network.kill("decode-0")
    pair.offer(16)
    (connection,) = pair.sender._connections
    pair.sender.on_control(connection, control.Grant(
        transfer_id=TRANSFER, src_incarnation=22, dst_incarnation=11, grant_id=1, slot_gen=1, missing=(), credits=1
    ))  # fmt: skip
    assert "HELLO" in pair.sender_log.ended[TRANSFER][0]


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0])
def test_offer_without_an_end_is_refused(deadline_s):
    """NaN is later than nothing: such an offer would wait for ever, and its like would leave no room for others."""
    offer = control.Offer(transfer_id=TRANSFER, src_incarnation=1, dst_incarnation=2, num_prompt_tokens=4, block_hashes="", deadline_s=1.0)
    assert control.decode(_framed(offer)) == offer
    with pytest.raises(ProtocolError, match="deadline_s"):
        control.decode(_framed(offer, deadline_s=deadline_s))


def test_sender_that_goes_beyond_its_credits_fails_its_transfer():
    """Else what is missing between the chunks that came could grow until no CREDIT can name it."""
    pair = MemoryPair()
    sent = []
    pair.network.post_data = lambda sender, endpoint, lane, header, payload: sent.append((header, bytes(payload)))
    pair.offer(64)
    pair.expect(64, list(range(16)))
    pair.send_all(64)
    pair.network.run(1.0, lambda: len(sent) == SETTINGS.kv_credits)
    header, payload = sent[0]
    pair.receiver.on_data(0, replace(header, chunk_seq=SETTINGS.kv_credits - 1).pack(), memoryview(payload))
    assert pair.receiver.counters()["chunks_received"] == 1
    header, payload = sent[1]
    pair.receiver.on_data(0, replace(header, chunk_seq=SETTINGS.kv_credits + 1).pack(), memoryview(payload))
    pair.receiver.deliver_events()
    assert "credits" in pair.receiver_log.ended[TRANSFER][0]


def test_more_cached_tokens_than_the_prompt_has_are_not_believed():
    pair = MemoryPair()
    pair.offer(16)
    pair.expect(16, [])
    pair.sender.commit(TRANSFER, b"hidden", 17)
    pair.run(2.0)
    assert "17 tokens cached of a prompt of 16" in pair.receiver_log.ended[TRANSFER][0]


def test_header_of_more_units_than_a_chunk_may_have_is_refused():
    """Each costs a checksum, and where it lands is worked out, before anything else is known of them."""
    pair = MemoryPair()
    sent = []
    pair.network.post_data = lambda sender, endpoint, lane, header, payload: sent.append(header)
    pair.offer(16)
    pair.expect(16, [0])
    pair.send_all(16)
    pair.network.run(1.0, lambda: bool(sent))
    unit_nbytes = sent[0].payload_nbytes
    for num_units, is_refused in ((MAX_UNITS_PER_CHUNK, False), (MAX_UNITS_PER_CHUNK + 1, True)):
        header = replace(sent[0], block_count=num_units, payload_nbytes=num_units * unit_nbytes).pack()
        if is_refused:
            with pytest.raises(ProtocolError, match="units"):
                DataHeader.unpack(header, 1 << 30)
        else:
            DataHeader.unpack(header, 1 << 30)
