"""The race by which tokens are drawn: its table against high precision, its probabilities against the exact ones, every path the same
bits, and what a disturbance of the logits does to it."""

from __future__ import annotations

import ctypes
import decimal
import random
import subprocess
from pathlib import Path

import pytest
import torch
from sampling_cases import make_logits

from kernels import build, cpu_sampling, reference, sampling
from kernels.exponential_race import OUT, log_time_table, log_times, winners
from kernels.philox import token_bits
from kernels.row_parameters import LEVELS_PER_OCTAVE, POSITION, row_parameters

needs_compiler = pytest.mark.skipif(build.find_cxx() is None, reason="no C++ compiler")
EDGES = [0, 1, 2, 126, 127, 128, 129, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]


def exact_log_time(bits: int) -> decimal.Decimal:
    """log2(-log2(1 - (bits + 1/2) / 2^32)) + 33 in levels, to 40 digits."""
    with decimal.localcontext(decimal.Context(prec=40)):
        log_2 = decimal.Decimal(2).ln()
        time = -((2**33 - 2 * bits - 1) / decimal.Decimal(2**33)).ln() / log_2
        return (time.ln() / log_2 + 33) * LEVELS_PER_OCTAVE


def test_the_table_is_the_exact_value_rounded_and_no_libm_would_round_it_otherwise() -> None:
    table = log_time_table()
    for half in range(2):
        for node in range(table.shape[1]):
            shift = max(0, node // 64 - 1)
            s = node - 64 * shift << shift
            exact = exact_log_time(s if half == 0 else 2**32 - 1 - s)
            assert int(table[half, node]) == round(exact)
            assert abs(abs(exact % 1) - decimal.Decimal("0.5")) > 2.0**-20  # fp64 is off by less than 2^-21


def test_log_times_are_within_5e_5_octaves_and_never_below_the_octave_of_their_bits() -> None:
    draw = random.Random(1)
    bits = EDGES + [draw.getrandbits(32) for _ in range(3000)] + [draw.getrandbits(draw.randrange(1, 33)) for _ in range(1000)]
    bits += [2**32 - 1 - draw.getrandbits(draw.randrange(1, 32)) for _ in range(1000)]
    times = log_times(torch.tensor(bits)).tolist()
    for one, time in zip(bits, times, strict=True):
        assert abs(time - exact_log_time(one)) < 5e-5 * LEVELS_PER_OCTAVE
        assert one.bit_length() << 23 <= time < 39 << 23


def test_log_times_rise_with_the_bits() -> None:
    bits = torch.cat((torch.arange(2**17), torch.arange(2**31 - 2**16, 2**31 + 2**16), torch.arange(2**32 - 2**17, 2**32)))
    assert bool((log_times(bits).diff() >= 0).all())


@pytest.mark.parametrize("octaves", [0, 0.01, 1, 3, 6, 10, 20])
def test_the_less_likely_of_two_tokens_wins_as_often_as_it_should(octaves: float) -> None:
    """Summed over the time of the likelier one, by 2^14 equal shares of its bits; the other's chance to be faster is found by bisection."""
    level = round(octaves * LEVELS_PER_OCTAVE)
    of_best = log_times(torch.arange(2**14) * 2**18 + 2**17)
    low, high = torch.zeros_like(of_best), torch.full_like(of_best, 2**32)  # how many bits are faster: in low .. high
    while bool((low < high).any()):
        middle = (low + high) // 2
        is_faster = (level + log_times(middle.clamp(max=2**32 - 1)) < of_best) & (middle < 2**32)
        low, high = torch.where((low < high) & is_faster, middle + 1, low), torch.where((low < high) & ~is_faster, middle, high)
    chance = float(low.double().mean()) / 2**32
    exact = 2 ** -(level / LEVELS_PER_OCTAVE) / (1 + 2 ** -(level / LEVELS_PER_OCTAVE))
    assert chance == pytest.approx(exact, rel=1e-4)


HARNESS = """#include "exponential_race.h"
extern "C" void log_times(const int32_t* table, const uint32_t* bits, int64_t size, uint32_t* out, uint32_t* least) {
    for (int64_t i = 0; i < size; i++) {
        out[i] = race::log_time(table, bits[i]);
        least[i] = race::least_log_time(bits[i]);
    }
}
extern "C" void token_bits(const int64_t* keys, const uint32_t* quads, int64_t size, uint32_t* out) {
    for (int64_t i = 0; i < size; i++) {
        const race::Words words = race::token_bits(race::read_keys(keys + 3 * i), quads[i]);
        for (int j = 0; j < 4; j++) out[4 * i + j] = words.x[j];
    }
}
"""


@needs_compiler
def test_the_functions_that_kernels_share_equal_torch_over_millions_of_inputs(tmp_path: Path) -> None:
    """kernels/csrc/exponential_race.h is the same source on the CPU and the GPU."""
    (tmp_path / "harness.cpp").write_text(HARNESS)
    command = [str(build.find_cxx()), "-O2", "-std=c++17", "-fPIC", "-shared", f"-I{build.SOURCES}", "harness.cpp", "-o", "harness.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    harness = ctypes.CDLL(str(tmp_path / "harness.so"))
    generator = torch.Generator().manual_seed(2)
    shift = torch.randint(0, 32, (2_000_000,), generator=generator)
    bits = torch.randint(0, 2**32, (2_000_000,), generator=generator) >> shift
    bits = torch.cat((bits, bits ^ 0xFFFFFFFF, torch.tensor(EDGES)))
    words, times, least = (torch.empty(len(bits), dtype=torch.int32) for _ in range(3))
    words.copy_(bits.where(bits < 2**31, bits - 2**32))
    size = ctypes.c_int64(len(bits))
    harness.log_times(
        *(ctypes.c_void_p(x.data_ptr()) for x in (log_time_table(), words)), size, *(ctypes.c_void_p(x.data_ptr()) for x in (times, least))
    )
    assert torch.equal(times.long(), log_times(bits))
    assert bool((least <= times).all())
    keys = torch.randint(-(2**63), 2**63 - 1, (100_000, 3), generator=generator)
    quads = torch.randint(0, 2**20, (100_000,), generator=generator, dtype=torch.int32)
    out = torch.empty(100_000, 4, dtype=torch.int32)
    harness.token_bits(*(ctypes.c_void_p(x.data_ptr()) for x in (keys, quads)), ctypes.c_int64(100_000), ctypes.c_void_p(out.data_ptr()))
    expected = torch.cat(
        [token_bits(keys[i : i + 100], quads[i : i + 100].long()).view(100, 100, 4).diagonal().T for i in range(0, 100_000, 100)]
    )
    assert torch.equal(out.long() & 0xFFFFFFFF, expected)


@needs_compiler
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 7, 128, 1023, 1024, 1025, 1027, 49152])
def test_the_compiled_race_has_the_winners_of_torch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for spread in (0, 1 << 20, 1 << 23, 10 << 23):
        levels = (torch.randn(12, vocab_size, generator=generator).abs() * spread).int()
        levels[:, 1::3] = OUT
        levels[:, vocab_size // 2] = 0
        keys = torch.randint(-(2**63), 2**63 - 1, (12, 3), generator=generator)
        assert cpu_sampling._kernel() is not None
        assert [cpu_sampling._winner(row, key) for row, key in zip(levels, keys, strict=True)] == winners(levels, keys).tolist()


def test_without_a_compiler_the_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, parameters = make_logits("normal", 8, 1001), torch.tensor([row_parameters(1.5, 0, 0.9, 0.0, seed) for seed in range(8)])
    compiled = sampling.sample_tokens(logits, parameters)
    monkeypatch.setattr(cpu_sampling, "_kernel", lambda: None)
    assert torch.equal(sampling.sample_tokens(logits, parameters), compiled)


@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p"),
    [(0.6, 1.0, 0.0), (1.0, 1.0, 0.0), (1.6, 1.0, 0.0), (2.0, 1.0, 0.0), (1.0, 0.9, 0.0), (1.0, 1.0, 0.02)],
)
def test_the_last_digits_of_the_logits_hardly_change_a_draw(temperature: float, top_p: float, min_p: float) -> None:
    """As batches of other shapes disturb them: up to 6e-5. A walk along cumulative weights changes 0.2 to 0.9 %."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(49152, generator=generator) * 2.5
    parameters = torch.tensor([row_parameters(temperature, 0, top_p, min_p, seed=9)] * 400)
    parameters[:, POSITION] = torch.arange(400)
    disturbed = logits + (torch.rand(49152, generator=generator) - 0.5) * 1.2e-4
    draws, others = (sampling.sample_tokens(x.expand(400, -1), parameters) for x in (logits, disturbed))
    assert len(set(draws.tolist())) > 100
    assert torch.equal(draws, others)


def test_one_kept_token_is_the_draw() -> None:
    levels = torch.full((5, 9), OUT)
    levels[torch.arange(5), torch.tensor([0, 3, 4, 7, 8])] = 0
    assert winners(levels, torch.arange(15).view(5, 3)).tolist() == [0, 3, 4, 7, 8]
    logits = torch.tensor([[float("-inf"), 1.0, float("nan")]])
    for sample_tokens in (reference.sample_tokens, sampling.sample_tokens):
        assert int(sample_tokens(logits, torch.tensor([row_parameters(1.0, 0, 1.0, 0.0, seed=1)]))) == 1
