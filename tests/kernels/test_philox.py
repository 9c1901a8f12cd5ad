"""The counter-based generator: published vectors, range, independence of its keys."""

from __future__ import annotations

import torch

from kernels.philox import philox4x32, token_bits

ONES = 0xFFFFFFFF


def words_of(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = philox4x32(tuple(torch.tensor(word) for word in counter), tuple(torch.tensor(word) for word in key))
    return tuple(int(word) for word in words)


def bits_of(seed: int, sequence_index: int, position: int, num_tokens: int = 4) -> torch.Tensor:
    return token_bits(torch.tensor([[seed, sequence_index, position]]), torch.arange(num_tokens // 4))[0]


def test_known_answers_of_the_published_generator() -> None:
    assert words_of((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert words_of((ONES,) * 4, (ONES,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_bits_spread_evenly_over_tokens_and_positions() -> None:
    for draws in (bits_of(42, 0, 7, 4000), torch.cat([bits_of(42, 0, position) for position in range(1000)])):
        assert bool(((draws >= 0) & (draws < 2**32)).all())
        assert abs(float(draws.double().mean()) / 2**32 - 0.5) < 0.02
        assert abs(float((draws & 1).double().mean()) - 0.5) < 0.03
        assert len(set(draws.tolist())) == len(draws)


def test_a_tokens_bits_do_not_depend_on_which_others_are_asked_for() -> None:
    keys = torch.tensor([[3, 1, 2**33 + 5], [-4, 0, 0]])
    every = token_bits(keys, torch.arange(100))
    assert torch.equal(token_bits(keys, torch.tensor([93, 2])), torch.cat((every[:, 372:376], every[:, 8:12]), 1))
    assert torch.equal(token_bits(keys[1:], torch.arange(100)), every[1:])


def test_seed_index_and_position_each_change_the_draw() -> None:
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 + 2**40, 0, 0), (1, 0, 2**32)]
    assert len({tuple(bits_of(*key).tolist()) for key in keys}) == len(keys)


def test_the_low_64_bits_of_a_seed_count_all() -> None:
    assert len({tuple(bits_of(seed, 0, 0).tolist()) for seed in (0, -1, 2**63 - 1, -(2**63), 2**31, 2**32)}) == 6
