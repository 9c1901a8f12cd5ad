"""The bytes of KVX/1 as they are on the wire. A change here is a new protocol version, not an edit of this file."""

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags, KVDtype, KVPart, LayoutCode, MessageType, ScaleCode, checksum

HEADER = DataHeader(
    msg_type=MessageType.CHUNK,
    flags=Flags.LAST | Flags.RETRY,
    transfer_id=bytes(range(16)),
    attempt=0x0102,
    src_incarnation=0x1112131415161718,
    dst_incarnation=0x2122232425262728,
    grant_id=0x3132333435363738,
    nack_seq=0x41424344,
    slot_gen=0x51525354,
    chunk_seq=0x61626364,
    chunk_total=0x71727374,
    payload_nbytes=2 * 1 * 2 * 3 * 16 * 64 * 2,
    checksum_algo=ChecksumCode.XXH3_64,
    checksum=0x8182838485868788,
    hash_set_digest=0x9192939495969798,
    layer_start=4,
    layer_count=2,
    block_index=0xA1A2A3A4,
    block_count=1,
    block_tokens=16,
    kv_part=KVPart.KV,
    dtype=KVDtype.BFLOAT16,
    scale=ScaleCode.NONE,
    layout=LayoutCode.LAYER_BLOCK_KV_HEAD_TOKEN_DIM,
    head_start=0,
    head_count=3,
    head_dim=64,
    src_tp_rank=0,
    src_tp_size=1,
    segment_offset=0xB1B2B3B4B5B6B7B8,
    trace_id=bytes(range(0xC0, 0xD0)),
    span_id=bytes(range(0xD0, 0xD8)),
    trace_flags=1,
)
GOLDEN = (
    "4b565831" "0200" "c000" "01" "03"
    "000102030405060708090a0b0c0d0e0f" "0201"
    "1817161514131211" "2827262524232221" "3837363534333231"
    "44434241" "54535251" "64636261" "74737271"
    "0060000000000000" "01" "8887868584838281" "9897969594939291"
    "0400" "0200" "a4a3a2a1" "0100" "1000"
    "03" "03" "00" "01" "0000" "0300" "4000" "0000" "0100" "b8b7b6b5b4b3b2b1"
    "c0c1c2c3c4c5c6c7c8c9cacbcccdcecf" "d0d1d2d3d4d5d6d7" "01"
    + "00" * 36
)  # fmt: skip
GOLDEN_CRC = "98846967"
LIMIT = 4 << 20


def test_data_header_has_these_bytes():
    assert HEADER.pack().hex() == GOLDEN + GOLDEN_CRC
    assert len(HEADER.pack()) == 192


def test_data_header_is_read_back():
    assert DataHeader.unpack(HEADER.pack(), LIMIT) == HEADER
    assert DataHeader.unpack(memoryview(HEADER.pack()), LIMIT) == HEADER


def test_checksum_is_xxh3_64():
    assert checksum(b"pagewire") == 0x8F3E076233C103D7


def test_any_flipped_bit_of_a_header_is_refused():
    frame = bytearray(HEADER.pack())
    for bit in range(len(frame) * 8):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            DataHeader.unpack(bytes(frame), LIMIT)
        frame[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "changes",
    [
        {"payload_nbytes": HEADER.payload_nbytes + 1},
        {"head_count": 4},
        {"msg_type": MessageType.FENCE},
        {"payload_nbytes": 0, "layer_count": 0},
        {"msg_type": 9},
        {"dtype": 99},
        {"layout": 2},
        {"flags": 0x80},
        {"layer_count": 65535, "head_dim": 65535, "payload_nbytes": 65535 * 65535 * 2 * 3 * 16 * 2},
    ],
    ids=str,
)
def test_header_whose_fields_contradict_each_other_is_refused(changes):
    with pytest.raises(ProtocolError):
        DataHeader.unpack(replace(HEADER, **changes).pack(), LIMIT)


def test_payload_over_the_agreed_chunk_is_refused():
    with pytest.raises(ProtocolError, match="over the agreed"):
        DataHeader.unpack(HEADER.pack(), HEADER.payload_nbytes - 1)


@settings(max_examples=500)
@given(st.binary(min_size=188, max_size=188))
def test_noise_with_a_right_crc_raises_protocol_error_and_nothing_else(noise):
    body = b"KVX1" + struct.pack("<HH", 1, 192) + noise[8:146] + bytes(42)
    frame = body + struct.pack("<I", zlib.crc32(body))
    try:
        header = DataHeader.unpack(frame, LIMIT)
    except ProtocolError:
        return
    assert header.payload_nbytes <= LIMIT
