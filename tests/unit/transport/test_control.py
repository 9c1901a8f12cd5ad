import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_transfer_pairs import LAYOUT, TRACEPARENT, TRANSFER

from shared.errors import ProtocolError
from shared.transport.protocol import control

ADDRESS: control.Address = {
    "transfer_id": TRANSFER,
    "attempt": 1,
    "src_incarnation": (1 << 64) - 1,
    "dst_incarnation": 2,
    "traceparent": TRACEPARENT,
}
MESSAGES = [
    control.Hello(src_incarnation=1, dst_incarnation=2, worker_id="p", layout=LAYOUT, num_lanes=2, max_chunk_bytes=4096),
    control.HelloAck(src_incarnation=1, dst_incarnation=2, layout=LAYOUT, lane_endpoints=("tcp://127.0.0.1:1",), max_chunk_bytes=4096),
    control.Offer(**ADDRESS, num_prompt_tokens=33, block_hashes="00ff", deadline_s=1.5),
    control.Grant(**ADDRESS, grant_id=5, slot_gen=6, missing=((0, 2), (4, 1)), credits=16),
    control.Deny(**ADDRESS, reason="full", retry_ms=100),
    control.Credit(**ADDRESS, received=((0, 7),)),
    control.Nack(**ADDRESS, nack_seq=1, chunks=((3, 1),)),
    control.Commit(**ADDRESS, num_cached_tokens=0, chunk_total=3, num_bytes=9, digest=1, hidden_nbytes=4, hidden_checksum=7),
    control.Committed(**ADDRESS),
    control.Abort(**ADDRESS, reason="client left"),
    control.AbortAck(**ADDRESS),
    control.Renew(**ADDRESS),
    control.Drain(src_incarnation=1, dst_incarnation=2),
    control.Bye(src_incarnation=1, dst_incarnation=2),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_message_survives_the_wire(message):
    assert control.decode(control.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_any_flipped_bit_is_refused(message):
    frame = bytearray(control.encode(message))
    for position in range(0, len(frame), 7):
        frame[position] ^= 1 << position % 8
        with pytest.raises(ProtocolError):
            control.decode(bytes(frame))
        frame[position] ^= 1 << position % 8


def _framed(body: bytes) -> bytes:
    return struct.pack("<4sI", b"KVXC", zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"kind":"EVAL"}',
        b'{"kind":"RENEW","src_incarnation":1,"dst_incarnation":2,"extra":1}',
        b'{"kind":"RENEW","src_incarnation":"1","dst_incarnation":2}',
        b'{"kind":"RENEW","src_incarnation":-1,"dst_incarnation":2}',
        b'{"kind":"RENEW","src_incarnation":1,"dst_incarnation":2,"transfer_id":"zz"}',
        b'{"kind":"OFFER","src_incarnation":1,"dst_incarnation":2,"num_prompt_tokens":1,"block_hashes":"abc","deadline_s":1}',
    ],
)
def test_message_of_another_shape_is_refused(body):
    with pytest.raises(ProtocolError):
        control.decode(_framed(body))


def test_message_over_the_limit_is_neither_sent_nor_taken():
    with pytest.raises(ProtocolError, match="limit"):
        control.encode(control.Offer(**ADDRESS, num_prompt_tokens=1, block_hashes="00" * (1 << 20), deadline_s=1))
    with pytest.raises(ProtocolError):
        control.decode(bytes((1 << 20) + 1))


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_noise_raises_protocol_error_and_nothing_else(noise):
    for frame in (noise, _framed(noise)):
        with pytest.raises(ProtocolError):
            control.decode(frame)
