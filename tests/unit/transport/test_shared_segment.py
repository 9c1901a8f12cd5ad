from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from shared.errors import TransferError
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.wires import shared_segment
from shared.transport.wires.shared_segment import SegmentReader, SharedSegment, map_inherited


def test_another_process_reads_what_is_written_after_it_looked() -> None:
    segment = SharedSegment(1 << 16)
    code = (
        "import sys; from shared.transport.wires.shared_segment import *\n"
        "reader = SegmentReader(SegmentOffer.model_validate_json(sys.argv[1]))\n"
        "print(bytes(reader.read(100, 5)).hex(), flush=True); sys.stdin.readline(); print(bytes(reader.read(100, 5)).decode())"
    )
    command = [sys.executable, "-c", code, segment.offer.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "0000000000\n"
        segment.view[100:105] = b"hello"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "hello\n"


def test_a_reader_can_neither_write_nor_find_the_file_cut_short() -> None:
    segment = SharedSegment(1 << 16)
    view = SegmentReader(segment.offer).read(0, 16)
    assert view.readonly
    fd = os.open(f"/proc/self/fd/{segment.offer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 10)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_a_process_that_inherits_a_segment_writes_to_it_and_no_reader_trusts_it_before_it_is_sealed() -> None:
    segment = SharedSegment(1 << 16, is_sealed=False)
    with pytest.raises(TransferError, match="not sealed"):
        SegmentReader(segment.offer)
    code = (
        "import sys; from shared.transport.wires.shared_segment import *\n"
        "view = map_inherited(int(sys.argv[1]), 1 << 16); print('mapped', flush=True); sys.stdin.readline(); view[100:105] = b'hello'"
    )
    command = [sys.executable, "-c", code, str(segment.offer.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[segment.offer.fd]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "mapped\n"
        segment.seal()
        child.communicate("\n")
    assert child.returncode == 0
    assert bytes(SegmentReader(segment.offer).read(100, 5)) == b"hello"
    with pytest.raises(PermissionError):
        map_inherited(os.dup(segment.offer.fd), 1 << 16)


def test_pages_cost_memory_when_they_are_used_and_the_owner_may_go_first() -> None:
    segment = SharedSegment(64 << 30)
    np.frombuffer(segment.view, np.uint8)[5] = 7
    reader = SegmentReader(segment.offer)
    del segment
    assert reader.read(5, 1)[0] == 7


@pytest.mark.parametrize(
    "change", [{"pid": 1}, {"pid": 2**31 - 1}, {"fd": 0}, {"fd": 2**31 - 1}, {"size_bytes": 100}, {"nonce": "00" * 32}]
)
def test_any_other_file_is_refused(change: dict[str, object]) -> None:
    segment = SharedSegment(1 << 16)
    offer = SegmentOffer.model_validate({**segment.offer.model_dump(), **change})
    with pytest.raises(TransferError):
        SegmentReader(offer)


def test_where_there_are_no_such_seals_one_descriptor_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segment, "_SEALS", 1 << 14)  # unknown to every kernel
    gc.collect()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught:
        SharedSegment(1 << 12)
    other = os.open("/dev/null", os.O_RDONLY)  # a second close would be of this one, had it the number of the first
    del caught
    gc.collect()
    os.fstat(other)
    os.close(other)
    # Fewer, where threads of earlier tests have let go of theirs meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_an_unsealed_file_is_refused() -> None:
    segment = SharedSegment(1 << 12)
    fd = os.memfd_create("pagewire-kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, (1 << 12) + 32)
    with pytest.raises(TransferError, match="not sealed"):
        SegmentReader(segment.offer.model_copy(update={"fd": fd}))
    os.close(fd)


@pytest.mark.parametrize(("start", "size"), [(-1, 4), (0, (1 << 12) + 1), (1 << 12, 1), (1 << 70, 4), (4, -1)])
def test_nothing_outside_is_read(start: int, size: int) -> None:
    segment = SharedSegment(1 << 12)
    with pytest.raises(TransferError):
        SegmentReader(segment.offer).read(start, size)
