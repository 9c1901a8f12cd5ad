"""Frames and control messages of KVX/1 that nobody sane would send: a few ten thousand here, a million with `make fuzz-frames`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import kv_frame_fuzzer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_frame_fuzzer import DataFuzzer, Violation, fuzz

from shared.errors import ProtocolError
from shared.transport.protocol import control
from shared.transport.protocol.frames import HEADER_NBYTES, DataHeader
from shared.transport.receiving.receiver_state import ReceiverState

NUM_FRAMES = int(os.environ.get("PAGEWIRE_FUZZ_FRAMES", "30000"))
FRAMES_PER_PROCESS = 250_000
PROGRAM = Path(kv_frame_fuzzer.__file__)


@pytest.mark.parametrize("seed", range(-(-NUM_FRAMES // FRAMES_PER_PROCESS)))
def test_no_frame_crashes_hangs_takes_memory_or_writes_where_it_may_not(seed: int) -> None:
    num_frames = min(NUM_FRAMES, FRAMES_PER_PROCESS)
    done = subprocess.run([sys.executable, str(PROGRAM), str(num_frames), str(seed)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["rss_growth_mib"] < 64, report
    data, messages = report["DataFuzzer"], report["ControlFuzzer"]
    # It got past the doors: frames were taken, refused for each reason, and messages reached both states.
    for name in ("accepted", "stale_frames", "bad_headers", "bad_checksums", "chunks_duplicate", "chunks_nacked", "transfers ended"):
        assert data[name] > num_frames // 2000, (name, report)
    for name in ("decoded", "refused", "transfers ended"):
        assert messages[name] > num_frames // 200, (name, report)


def test_fuzzer_sees_a_block_written_that_nobody_granted() -> None:
    fuzzer = DataFuzzer(0)
    with pytest.raises(Violation, match="outside any grant"):
        for _ in range(2000):
            for blocks in fuzzer._live.values():
                blocks.clear()
            fuzzer.step()


def test_fuzzer_names_the_frame_at_which_something_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReceiverState, "on_control", lambda self, peer, message, blob=b"": {}[peer])
    with pytest.raises(KeyError):
        fuzz(100, 3)


@given(st.binary(min_size=HEADER_NBYTES - 4, max_size=HEADER_NBYTES - 4), st.booleans())
@settings(max_examples=500)
def test_header_is_taken_only_when_it_says_the_same_when_packed_again(body: bytes, is_disguised: bool) -> None:
    if is_disguised:
        body = b"KVX1\x01\x00\xc0\x00" + body[8:-42] + bytes(42)
    frame = body + zlib.crc32(body).to_bytes(4, "little")
    try:
        header = DataHeader.unpack(frame, 1 << 20)
    except ProtocolError:
        return
    assert header.pack() == frame and header.payload_nbytes == header.shape_nbytes <= 1 << 20


@given(st.data())
@settings(max_examples=200)
def test_header_of_any_numbers_is_packed_and_read_back_or_refused(data: st.DataObject) -> None:
    fuzzer_header = next(iter(DataFuzzer(1)._valid.values()))[0]
    names = data.draw(st.lists(st.sampled_from([n for n in kv_frame_fuzzer._HEADER_FIELDS if n.endswith(("start", "count", "seq"))])))
    header = replace(fuzzer_header, **{name: data.draw(st.integers(0, 0xFFFF)) for name in names})
    header = replace(header, payload_nbytes=header.shape_nbytes)
    try:
        assert DataHeader.unpack(header.pack(), 1 << 20) == header
    except ProtocolError:
        assert not 0 < header.shape_nbytes <= 1 << 20


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_kinds = [kind.model_fields["kind"].default for kind in control.AnyControl.__args__]
_bodies = st.fixed_dictionaries(
    {"kind": st.sampled_from(_kinds)},
    optional={name: _json for kind in control.AnyControl.__args__ for name in kind.model_fields if name != "kind"},
)


@given(_json | _bodies)
@settings(max_examples=150)
def test_control_message_of_any_shape_is_read_or_refused(body: object) -> None:
    frame = kv_frame_fuzzer._with_prefix(json.dumps(body).encode())
    try:
        message = control.decode(frame)
    except ProtocolError:
        return
    assert control.decode(control.encode(message)) == message
