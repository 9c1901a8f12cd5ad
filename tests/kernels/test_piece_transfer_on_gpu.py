"""Pieces arrive where they are sent, and the checksum of pieces in GPU memory is the library's xxh3_64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from kernels.piece_transfer import MAX_PIECES_PER_PAYLOAD, PieceTransfer, can_sum

SIZES = (256, 304, 1008, 1024, 1040, 2048, 4160, 1 << 16, (1 << 16) + 16, 96 << 10, (97 << 10) + 976, (130 << 10) + 512, (5 << 20) + 80)


@pytest.fixture
def transfer() -> PieceTransfer:
    return PieceTransfer(torch.device("cuda", 0), 1024)


def pieces_of(count: int, size: int) -> tuple[torch.Tensor, np.ndarray]:
    memory = torch.randint(0, 256, (count, size), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return memory, memory.data_ptr() + np.arange(count, dtype=np.int64) * size


def expected(memory: torch.Tensor, order: list[int], per_payload: int) -> list[int]:
    parts = [memory[i].cpu().numpy().tobytes() for i in order]
    return [xxhash.xxh3_64_intdigest(b"".join(parts[i : i + per_payload])) for i in range(0, len(parts), per_payload)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
class TestOnGpu:
    @pytest.mark.parametrize("size", SIZES)
    def test_checksums_of_single_pieces_of_every_length(self, transfer: PieceTransfer, size: int) -> None:
        memory, addresses = pieces_of(5, size)
        order = [3, 0, 4, 3]
        assert transfer.run(summed=addresses[order], summed_nbytes=size).tolist() == expected(memory, order, 1)

    @pytest.mark.parametrize("size", [1024, 3072, 65536, 66 << 10])
    def test_checksums_of_several_pieces_in_the_order_named(self, transfer: PieceTransfer, size: int) -> None:
        memory, addresses = pieces_of(9, size)
        order = [8, 1, 2, 0, 5, 8]
        for per_payload in (1, 2, 3, 6):
            sums = transfer.run(summed=addresses[order], summed_nbytes=size, pieces_per_payload=per_payload)
            assert sums.tolist() == expected(memory, order, per_payload)

    def test_more_payloads_than_one_launch_takes(self, transfer: PieceTransfer) -> None:
        memory, addresses = pieces_of(600, 1024)
        order = list(range(599, -1, -1))
        assert transfer.run(summed=addresses[order], summed_nbytes=1024, pieces_per_payload=3).tolist() == expected(memory, order, 3)
        assert transfer.run(summed=addresses[order], summed_nbytes=1024).tolist() == expected(memory, order, 1)

    def test_every_flipped_bit_changes_it(self, transfer: PieceTransfer) -> None:
        memory = torch.zeros(1, 2064, dtype=torch.uint8, device="cuda")
        address, seen = np.array([memory.data_ptr()], np.int64), set()
        for place in range(0, 2064, 41):
            memory[0, place] = 1 << (place % 8)
            torch.cuda.synchronize()
            seen.add(int(transfer.run(summed=address, summed_nbytes=2064)[0]))
            memory[0, place] = 0
        assert len(seen) == len(range(0, 2064, 41))

    def test_pieces_are_copied_to_and_from_pinned_memory_and_summed_where_they_land(self, transfer: PieceTransfer) -> None:
        size = 24 << 10
        source, far = pieces_of(20, size)
        target, landed = pieces_of(20, size)
        host = torch.zeros(20, size, dtype=torch.uint8).pin_memory()
        near = host.data_ptr() + np.arange(20, dtype=np.int64) * size
        order = np.random.default_rng(2).permutation(20)
        order[3:7] = sorted(order[3:7])
        transfer.run(near, far[order], size)
        assert torch.equal(host, source.cpu()[torch.from_numpy(order)])
        sums = transfer.run(landed[order], near, size, landed, size)
        assert torch.equal(target, source)
        assert sums.tolist() == expected(source, list(range(20)), 1)

    def test_what_was_queued_before_is_done_on_return(self, transfer: PieceTransfer) -> None:
        memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(transfer.stream):
            for value in range(1, 20):
                memory.fill_(value)
        transfer.run()
        assert transfer.stream.query()
        assert int(memory[-1]) == 19

    def test_arrays_that_do_not_fit_together_are_refused(self, transfer: PieceTransfer) -> None:
        _, addresses = pieces_of(4, 1024)
        with pytest.raises(ValueError, match="as many"):
            transfer.run(addresses, addresses[:2], 1024)
        with pytest.raises(ValueError, match="as many"):
            transfer.run(summed=addresses[::2], summed_nbytes=1024)
        with pytest.raises(ValueError, match="checksums"):
            transfer.run(summed=addresses, summed_nbytes=1024, pieces_per_payload=3)
        with pytest.raises(ValueError, match="can_sum"):
            transfer.run(summed=addresses + 8, summed_nbytes=1024)


def test_what_can_be_summed() -> None:
    assert can_sum(1040, 1)
    assert can_sum(1024, MAX_PIECES_PER_PAYLOAD)
    assert not can_sum(1024, MAX_PIECES_PER_PAYLOAD + 1)
    assert not can_sum(128, 1)
    assert not can_sum(1040, 2)
    assert not can_sum(1030, 1)
    assert not can_sum(1024, 1, alignment=8)
