"""The counter-based generator: published vectors, range, independence of its keys."""

from __future__ import annotations

from kernels.philox import philox4x32, random_bits

ONES = 0xFFFFFFFF


def test_known_answers_of_the_published_generator() -> None:
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ONES,) * 4, (ONES,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_bits_spread_evenly() -> None:
    draws = [random_bits(42, 0, position) for position in range(4000)]
    assert all(0 <= draw < 2**64 for draw in draws)
    assert abs(sum(draws) / len(draws) / 2**64 - 0.5) < 0.02
    assert abs(sum(draw & 1 for draw in draws) / len(draws) - 0.5) < 0.03
    assert len(set(draws)) == len(draws)


def test_seed_index_and_position_each_change_the_draw() -> None:
    assert len({random_bits(1, 0, 0), random_bits(2, 0, 0), random_bits(1, 1, 0), random_bits(1, 0, 1)}) == 4


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 0, 2**63, 2**200):
        assert 0 <= random_bits(seed, 0, 0) < 2**64
    assert random_bits(-1, 0, 0) == random_bits(2**64 - 1, 0, 0)
