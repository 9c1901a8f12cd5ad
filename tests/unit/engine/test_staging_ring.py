"""A slot comes back when the last view of it goes, whoever held it, and not before."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kernels import device_memory
from shared.engine.staging_ring import POISON, StagingRing
from shared.errors import TransferError
from shared.transport.wires.shared_segment import SegmentReader

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "pin", lambda address, nbytes: None)
    monkeypatch.setattr(device_memory, "unpin", lambda address: None)


def test_a_slice_of_a_view_keeps_the_slot() -> None:
    ring = StagingRing(2, 64)
    taken, _ = ring.take(10)
    view = taken.data
    part = memoryview(np.frombuffer(view[2:8], np.uint8))
    del taken, view
    assert ring.num_free == 1
    del part
    assert ring.num_free == 2


def test_slots_do_not_overlap_and_stand_where_others_read_them() -> None:
    ring = StagingRing(3, 64)
    held = [ring.take(64) for _ in range(3)]
    for number, (taken, _) in enumerate(held):
        taken[:] = number + 1
    assert sorted(start for _, start in held) == [0, 64, 128]
    assert ring.segment is not None
    reader = SegmentReader(ring.segment)
    for number, (_, start) in enumerate(held):
        assert bytes(reader.read(start, 64)) == bytes([number + 1]) * 64


def test_whoever_finds_none_gives_up_in_the_end() -> None:
    ring = StagingRing(1, 64, timeout_s=0.2)
    held = ring.take(1)
    started_s = time.monotonic()
    with pytest.raises(TransferError, match="kv_staging_mib"):
        ring.take(1)
    del held
    assert 0.15 < time.monotonic() - started_s < 10


def test_whoever_waits_gets_the_slot_that_is_given_back() -> None:
    ring = StagingRing(1, 64, timeout_s=60)
    held = [ring.take(1)]
    threading.Timer(0.05, held.clear).start()
    ring.take(1)


def test_a_chunk_larger_than_a_slot_is_refused() -> None:
    with pytest.raises(TransferError, match="does not fit a slot"):
        StagingRing(1, 64).take(65)


def test_in_debug_mode_what_is_given_back_is_overwritten_at_once() -> None:
    ring = StagingRing(1, 64, is_debug=True)
    taken, start = ring.take(64)
    taken[:] = 7
    assert ring.segment is not None
    late = SegmentReader(ring.segment).read(start, 64)
    assert bytes(late) == bytes([7]) * 64
    del taken
    assert bytes(late) == bytes([POISON]) * 64


def test_many_threads_never_share_a_slot() -> None:
    ring, failures = StagingRing(4, 8, timeout_s=60), []

    def work(number: int) -> None:
        for _ in range(500):
            taken, _ = ring.take(8)
            taken[:] = number
            time.sleep(0)
            if not bool((taken == number).all()):
                failures.append(number)
            del taken

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert ring.num_free == 4
