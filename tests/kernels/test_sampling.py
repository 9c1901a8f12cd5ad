"""The integer definition of sampling against brute force and fp64, and the CPU path against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_cases import AWKWARD_SIZES, KINDS, make_logits, make_parameters

from kernels import reference, sampling
from kernels.exponential_race import OUT, log_times, winners
from kernels.philox import token_bits
from kernels.row_parameters import POSITION, row_parameters


def parameters_of(**changes: float) -> torch.Tensor:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1} | changes
    return torch.tensor([row_parameters(**settings)])  # type: ignore[arg-type]


def brute_force(logits: list[float], parameters: list[int]) -> int:
    """The definition in plain Python, one token at a time."""
    scale, max_level, top_k, share, *keys = parameters
    exact_scale = float(torch.tensor(scale, dtype=torch.int32).view(torch.float32))
    values = [-math.inf if math.isnan(x) else x for x in logits]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if values[order[0]] == -math.inf:
        return 0
    if exact_scale == 0.0:
        return order[0]
    row, scales = torch.tensor([values]), torch.tensor([exact_scale])
    levels = reference.token_levels(row, scales)[0].tolist()
    weights = reference.level_weights(torch.tensor(levels)).tolist()
    order = [i for i in order if levels[i] <= max_level]
    if 0 < top_k < len(values):
        order = order[:top_k]
    if share < 1 << 31:
        total, mass, nucleus = sum(weights[i] for i in order), 0, []
        for i in order:
            if mass * (1 << 31) >= share * total:
                break
            nucleus.append(i)
            mass += weights[i]
        order = nucleus
    times = log_times(token_bits(torch.tensor([keys]), torch.tensor([i // 4 for i in order])))[0].tolist()
    return min((levels[i] + times[4 * place + i % 4], i) for place, i in enumerate(order))[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 511, 513])
def test_reference_equals_the_definition_one_token_at_a_time(vocab_size: int, kind: str) -> None:
    logits, parameters = make_logits(kind, 30, vocab_size), make_parameters(30, seed=vocab_size)
    expected = [brute_force(row, words) for row, words in zip(logits.tolist(), parameters.tolist(), strict=True)]
    assert reference.sample_tokens(logits, parameters).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", AWKWARD_SIZES)
def test_the_cpu_path_draws_what_the_reference_draws(vocab_size: int, kind: str) -> None:
    logits, parameters = make_logits(kind, 16, vocab_size), make_parameters(16, seed=vocab_size)
    assert torch.equal(sampling.sample_tokens(logits, parameters), reference.sample_tokens(logits, parameters))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_on_the_cpu_takes_the_lowest_index_of_the_maximum(kind: str) -> None:
    for vocab_size in AWKWARD_SIZES:
        logits = make_logits(kind, 4, vocab_size)
        assert torch.equal(sampling.greedy_tokens(logits), reference.greedy_tokens(logits))
    assert int(sampling.greedy_tokens(torch.cat((torch.zeros(1, 600), torch.ones(1, 20)), 1))) == 600


def test_the_cpu_path_draws_what_the_reference_draws_at_a_large_vocabulary() -> None:
    logits, parameters = make_logits("normal", 12, 128256), make_parameters(12, seed=3)
    assert torch.equal(sampling.sample_tokens(logits, parameters), reference.sample_tokens(logits, parameters))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_draw_as_their_fp32_values(dtype: torch.dtype) -> None:
    logits, parameters = make_logits("normal", 20, 4099).to(dtype), make_parameters(20, seed=8)
    assert torch.equal(sampling.sample_tokens(logits, parameters), sampling.sample_tokens(logits.float(), parameters))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits, parameters = make_logits("normal", 20, 3000), make_parameters(20, seed=6)
    together = sampling.sample_tokens(logits, parameters).tolist()
    assert together == [int(sampling.sample_tokens(logits[i : i + 1], parameters[i : i + 1])) for i in range(20)]


def test_weights_are_the_exponential_to_two_units_in_the_last_place() -> None:
    """Over a whole octave: all 2^23 fractions; other octaves are the same numbers shifted."""
    levels = torch.arange(1 << 23)
    weights = reference.level_weights(levels)
    exact = torch.exp2(40 - levels.double() / 2**23)
    assert float((weights.double() / exact - 1).abs().max()) < 2 * 2.0**-23
    assert bool((weights.diff() <= 0).all())
    assert int(weights[0]) == 1 << 40
    assert torch.equal(reference.level_weights(levels[::997] + (7 << 23)), weights[::997] >> 7)
    assert reference.level_weights(torch.tensor([41 << 23, 63 << 23])).tolist() == [0, 0]


FILTERS = [
    (0.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (2.0, 0, 1.0, 0.0), (50.0, 0, 1.0, 0.0),
    (0.7, 8, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.5, 0, 0.8, 0.0), (1.0, 0, 0.95, 0.0), (0.3, 0, 0.5, 0.0),
    (1.0, 0, 0.999, 0.0), (1.0, 0, 1.0, 0.05), (2.0, 0, 1.0, 0.3), (1.2, 20, 0.9, 0.01), (3.0, 5, 0.7, 0.0), (1.0, 40, 1.0, 0.02),
    (2.5, 0, 0.9, 0.1), (1e9, 0, 0.6, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_draws_follow_the_sorted_definition(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square of 50,000 draws against fp64 softmax, sort and cut."""
    num_draws = 50_000
    logits = torch.randn(24, generator=torch.Generator().manual_seed(4)) * 2
    probs = (logits.double() / max(temperature, 1e-3)).softmax(-1)
    values, order = probs.sort(descending=True)
    kept = values >= min_p * values[0]
    if top_k:
        kept[top_k:] = False
    values = values.where(kept, 0.0)
    values = values.where(values.cumsum(0) - values < top_p * values.sum(), 0.0)
    expected = torch.zeros(24, dtype=torch.float64).scatter_(0, order, values / values.sum()) * num_draws
    row = torch.tensor([row_parameters(temperature, top_k, top_p, min_p, seed=5)])
    is_kept = reference.kept_weights(logits[None], row) > 0
    scales = row[:, 0].to(torch.int32).view(torch.float32)
    levels = reference.token_levels(logits[None], scales).where(is_kept, OUT)
    keys = torch.stack((torch.full((num_draws,), 5), torch.zeros(num_draws, dtype=torch.int64), torch.arange(num_draws)), 1)
    draws = winners(levels.expand(num_draws, -1), keys)
    parameters = row.repeat(500, 1)
    parameters[:, POSITION] = torch.arange(500)
    assert torch.equal(sampling.sample_tokens(logits.expand(500, -1), parameters), draws[:500])
    counts = torch.bincount(draws, minlength=24)
    assert not counts[expected == 0].any()
    likely = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[likely].sum())
    degrees = int(likely.sum()) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 6


def test_a_tiny_nucleus_keeps_the_best_token_and_share_one_keeps_all() -> None:
    logits = make_logits("normal", 1, 300)
    assert (reference.kept_weights(logits, parameters_of(top_p=1e-12)) > 0).sum() == 1
    assert (reference.kept_weights(logits, parameters_of(top_p=1.0 - 1e-13)) > 0).all()


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(1, 100)
    kept = reference.kept_weights(logits, parameters_of(top_k=7))[0]
    assert kept.nonzero().flatten().tolist() == list(range(7))
    kept = reference.kept_weights(logits, parameters_of(top_p=0.25))[0]
    assert kept.nonzero().flatten().tolist() == list(range(25))
    assert int(sampling.greedy_tokens(logits)) == 0


def test_off_values_change_nothing() -> None:
    logits = make_logits("normal", 1, 1000) / 2  # all within the 40 octaves that weights span
    plain = reference.kept_weights(logits, parameters_of())
    for changes in ({"top_k": -1}, {"top_k": 1000}, {"top_k": 10**12}, {"top_p": 1.5}, {"min_p": -1.0}):
        assert torch.equal(reference.kept_weights(logits, parameters_of(**changes)), plain)
    assert (plain > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-9, 1e-5, 1e9, 1e300])
def test_extreme_temperatures_stay_numbers(temperature: float) -> None:
    logits = make_logits("normal", 1, 1000)
    logits[0, 5] = float("-inf")
    tokens = [int(sampling.sample_tokens(logits, parameters_of(temperature=temperature, seed=seed))) for seed in range(50)]
    if temperature < 1:
        assert set(tokens) == {int(logits.argmax())}
    else:
        assert len(set(tokens)) > 30 and 5 not in tokens


@pytest.mark.parametrize("min_p", [2.0**-64, 1e-80, 1e-100, 2.0**-512, 5e-324])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_min_p_below_every_weight_is_off(top_k: int, min_p: float) -> None:
    logits = make_logits("normal", 1, 1000)
    parameters = parameters_of(min_p=min_p, top_k=top_k)
    assert torch.equal(parameters, parameters_of(top_k=top_k))
    assert torch.equal(sampling.sample_tokens(logits, parameters), reference.sample_tokens(logits, parameters))


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "with -inf and nan", "signed zeros"])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_cpu_logprobs_equal_the_reference(num_top: int, kind: str) -> None:
    logits = make_logits(kind, 4, 700)
    rows, tokens = torch.tensor([3, 0, 3]), torch.tensor([2, 5, 650])
    got, expected = sampling.token_logprobs(logits, rows, tokens, num_top), reference.token_logprobs(logits, rows, tokens, num_top)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_the_cpu_penalties_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = make_logits("normal", 4, 600)
    history = torch.zeros(3, 600, dtype=torch.int32)
    for is_prompt in (True, False):
        noted = torch.randint(-1, 4, (900,), generator=generator), torch.randint(-5, 605, (900,), generator=generator)
        sampling.record_tokens(history, *noted, is_prompt)
    slots, penalties = torch.tensor([2, -1, 0, 7]), torch.rand(4, 3, generator=generator) * 2 + 0.1
    got, expected = logits.clone(), logits.clone()
    sampling.apply_penalties(got, history, slots, penalties)
    reference.apply_penalties(expected, history, slots, penalties)
    assert torch.equal(got, expected)
    assert torch.equal(got[1], logits[1]) and torch.equal(got[3], logits[3]) and not torch.equal(got[0], logits[0])


def test_history_counts_what_was_generated_beside_what_was_in_the_prompt() -> None:
    history = torch.zeros(2, 10, dtype=torch.int32)
    sampling.record_tokens(history, torch.tensor([0, 0, 1]), torch.tensor([3, 3, 4]), is_prompt=True)
    sampling.record_tokens(history, torch.tensor([0, 0, 0]), torch.tensor([3, 5, 5]), is_prompt=False)
    assert (history[0] & 0x7FFFFFFF).tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 0, 0]
    assert (history < 0).nonzero().tolist() == [[0, 3], [1, 4]]


def test_a_mask_forbids_every_token_whose_bit_is_clear() -> None:
    logits = torch.zeros(2, 70)
    masks = torch.tensor([[1 << 3 | -(1 << 31), 0, 1 << 5]], dtype=torch.int32)
    sampling.apply_token_mask(logits, torch.tensor([1]), masks)
    assert (logits[1] == 0).nonzero().flatten().tolist() == [3, 31, 69]
    assert (logits[0] == 0).all()


@pytest.mark.parametrize(
    ("logits", "parameters", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.int64), "logits are torch.float64"),
        (torch.zeros(8, 2).T, torch.zeros(2, 7, dtype=torch.int64), "contiguous rows"),
        (torch.zeros(2, 0), torch.zeros(2, 7, dtype=torch.int64), "0 tokens"),
        (torch.zeros(2, 8), torch.zeros(3, 7, dtype=torch.int64), "parameters is"),
        (torch.zeros(2, 8), torch.zeros(2, 7), "parameters is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(logits: torch.Tensor, parameters: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling.sample_tokens(logits, parameters)


def test_ops_have_shapes_without_data() -> None:
    logits = torch.empty(5, 100, device="meta")
    assert sampling.sample_tokens(logits, torch.empty(5, 7, dtype=torch.int64, device="meta")).shape == (5,)
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    assert [tuple(result.shape) for result in sampling.token_logprobs(logits, ids, ids, 3)] == [(2,), (2,), (2, 3), (2, 3)]
