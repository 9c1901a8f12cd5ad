"""KV from the GPU of one process to that of another: by pinned shared memory and by CUDA IPC, on one GPU or two."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_blocks_process
import pytest
import torch

from shared.engine.device_blocks import DeviceBlocks
from shared.engine.peer_device_memory import PeerDeviceMemory
from shared.errors import TransferError
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.region import Region
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.wires.shared_segment import SegmentReader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
PAIRS = [(0, 0)] + ([(0, 1)] if torch.cuda.is_available() and torch.cuda.device_count() > 1 else [])
WHOLE = (0, 8, 0, 8, 0, 16)


class Sender:
    def __init__(self, device: int) -> None:
        script = str(Path(gpu_blocks_process.__file__))
        self.process = subprocess.Popen(
            [sys.executable, script, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.offers = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the sender has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def device_memory(self) -> DeviceMemoryOffer:
        return DeviceMemoryOffer.model_validate(self.offers["device_memory"])


@pytest.fixture(params=PAIRS, ids=lambda pair: f"gpu{pair[0]}-to-gpu{pair[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Sender, DeviceBlocks, torch.Tensor, torch.Tensor]]:
    source, target = request.param
    cache = torch.zeros(gpu_blocks_process.SHAPE, dtype=torch.bfloat16, device=f"cuda:{target}")
    blocks = DeviceBlocks(cache, staging_nbytes=8 << 20, max_chunk_nbytes=4 << 20)
    sender = Sender(source)
    yield sender, blocks, cache, gpu_blocks_process.cache_of(target)
    sender.process.kill()
    sender.process.wait(10)


Pair = tuple[Sender, DeviceBlocks, torch.Tensor, torch.Tensor]


def test_blocks_pass_through_pinned_shared_memory(pair: Pair) -> None:
    sender, blocks, cache, expected = pair
    reader = SegmentReader(SegmentOffer.model_validate(sender.offers["segment"]))
    blocks.adopt(reader.read(0, reader.size_bytes))
    for block in (3, 0, 15):
        notice = sender.ask(f"read {block}")
        landed = blocks.write([Region(15 - block, *WHOLE)], reader.read(notice["offset"], notice["nbytes"]))
        assert landed == notice["checksum"]
        assert torch.equal(cache[15 - block], expected[block])


def test_a_notice_that_is_acted_upon_too_late_is_found_by_its_checksum(pair: Pair) -> None:
    sender, blocks, _, _ = pair
    reader = SegmentReader(SegmentOffer.model_validate(sender.offers["segment"]))
    blocks.adopt(reader.read(0, reader.size_bytes))
    notice = sender.ask("read 5")
    sender.ask("release")
    assert blocks.write([Region(1, *WHOLE)], reader.read(notice["offset"], notice["nbytes"])) != notice["checksum"]


def test_blocks_pass_from_gpu_to_gpu_by_cuda_ipc(pair: Pair) -> None:
    sender, blocks, cache, expected = pair
    peer = PeerDeviceMemory(sender.device_memory, cache.device)
    for block in (3, 0, 15):
        notice = sender.ask(f"locate {block}")
        assert blocks.write_from(peer, notice["offsets"], [Region(15 - block, *WHOLE)]) == notice["checksum"]
        assert torch.equal(cache[15 - block], expected[block])
    with pytest.raises(TransferError, match="outside"):
        blocks.write_from(peer, [peer.size_bytes - 5], [Region(0, *WHOLE)])
    with pytest.raises(TransferError, match="outside"):
        blocks.write_from(peer, [-1], [Region(0, *WHOLE)])


def test_a_sender_that_is_killed_leaves_memory_that_can_be_read_and_let_go(pair: Pair) -> None:
    sender, blocks, cache, _ = pair
    peer = PeerDeviceMemory(sender.device_memory, cache.device)
    notice = sender.ask("locate 2")
    sender.process.send_signal(signal.SIGKILL)
    sender.process.wait(10)
    landed = blocks.write_from(peer, notice["offsets"], [Region(0, *WHOLE)])  # right or wrong, but no fault of ours
    assert landed is not None
    del peer
    assert blocks.write([Region(1, *WHOLE)], memoryview(bytes(1 << 19))) is not None
    with pytest.raises(TransferError):
        PeerDeviceMemory(sender.device_memory, cache.device)
