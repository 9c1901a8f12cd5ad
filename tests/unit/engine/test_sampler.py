"""The sampler against the sorted definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kernels import reference, row_parameters
from shared import sampling_params
from shared.engine.sampler import PendingTokens, SamplingRow, sample
from shared.engine.structured_output import TokenMask
from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams

VOCAB = 500


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def row(
    output: list[int] | None = None,
    prompt: list[int] | None = None,
    seed: int = 1,
    stops: tuple[int, ...] = (),
    sequence_index: int = 0,
    **params: Any,
) -> SamplingRow:
    prompt, output = prompt or [], output or []
    return SamplingRow(SamplingParams(**params), seed, prompt + output, len(prompt), frozenset(stops), sequence_index)


def draw(logits: torch.Tensor, **kwargs: Any) -> int:
    return sample(logits[None], [row(**kwargs)])[0].token_id


def kept(logits: torch.Tensor, **params: Any) -> set[int]:
    weights = reference.kept_weights(logits[None], torch.tensor([row(**params).kernel_parameters()]))
    return set(weights[0].nonzero().flatten().tolist())


def sorted_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True, stable=True).tolist()
    order = [i for i in order if probs[i] >= min_p * probs[order[0]]]
    if top_k > 0:
        order = order[:top_k]
    total, mass, result = float(probs[order].sum()), 0.0, []
    for i in order:
        if result and mass >= top_p * total:
            break
        result.append(i)
        mass += float(probs[i])
    return set(result)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (5, 1.0, 0.0), (20, 0.5, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.02), (0, 1e-9, 0.0)]
)
def test_filters_keep_what_the_sorted_definition_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(3)
    expected = sorted_definition(logits, temperature, top_k, top_p, min_p)
    assert kept(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # At temperature 2 the probabilities are .455, .276, .167, .101; without it .644, .237, .087, .032.
        ({"min_p": 0.5}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        # Each filter looks at what those before it left: of the two kept by top-k the first has .622, of min-p's three .507.
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"top_k": 2, "top_p": 0.63}, {0, 1}),
        ({"min_p": 0.3, "top_p": 0.5}, {0}),
        ({"min_p": 0.3, "top_p": 0.6}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6, "min_p": 0.3}, {0}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.7}, {0}),
    ],
)
def test_filters_come_after_the_temperature_and_each_after_the_other(params: dict[str, Any], expected: set[int]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    assert kept(logits, temperature=2.0, **params) == expected


def test_top_p_of_a_flat_distribution_needs_the_full_sort() -> None:
    assert len(kept(torch.zeros(10_000), top_p=0.9)) == pytest.approx(9000, abs=1)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 5e-324, 1e-5])
def test_tiny_temperatures_give_the_argmax(temperature: float) -> None:
    logits = logits_of()
    assert draw(logits, temperature=temperature) == int(logits.argmax())


def test_kernels_and_parameters_agree_on_what_is_greedy() -> None:
    assert row_parameters.GREEDY_TEMPERATURE == sampling_params.GREEDY_TEMPERATURE


def test_huge_temperature_is_finite_and_uniform() -> None:
    draws = {draw(logits_of(), temperature=1e9, seed=seed) for seed in range(200)}
    assert len(draws) > 150


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_is_an_error_and_harms_no_other(value: float, temperature: float) -> None:
    """Whatever token came of it would look like an answer."""
    logits = torch.stack([logits_of(), torch.full((VOCAB,), value), logits_of(1)])
    rows = [row(temperature=temperature, seed=3) for _ in range(3)]
    first, bad, last = sample(logits, rows)
    assert isinstance(bad, ValueError) and "not finite" in str(bad)
    assert [first, last] == sample(logits[[0, 2]], [rows[0], rows[2]])


def test_top_k_off_values_equal_no_top_k() -> None:
    logits = logits_of()
    reference = [draw(logits, temperature=2.0, seed=seed) for seed in range(20)]
    for top_k in (-1, 0, VOCAB, 10**6):
        assert [draw(logits, temperature=2.0, seed=seed, top_k=top_k) for seed in range(20)] == reference
    assert {draw(logits, temperature=2.0, seed=seed, top_k=1) for seed in range(20)} == {int(logits.argmax())}


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    num_draws = 1000
    rows = [row(temperature=0.7, seed=9, output=[0] * position) for position in range(num_draws)]
    draws = torch.tensor([token.token_id for token in sample(logits.expand(num_draws, -1), rows)])
    counts = torch.bincount(draws, minlength=4)
    expected = (logits / 0.7).softmax(-1) * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


def test_a_seeded_row_does_not_depend_on_its_batch() -> None:
    logits = torch.stack([logits_of(i) for i in range(8)])
    rows = [row(temperature=1.5, seed=i) if i % 2 else row(temperature=0.0) for i in range(8)]
    together = [token.token_id for token in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0].token_id for i in range(8)]
    assert together == alone


def test_choices_of_one_prompt_draw_independently() -> None:
    assert len({draw(logits_of(), temperature=2.0, sequence_index=i) for i in range(8)}) > 4


def test_min_tokens_suppresses_every_stop_id_until_then() -> None:
    logits = logits_of()
    logits[2] = 100.0
    assert draw(logits, temperature=0.0, stops=(2,), min_tokens=3, output=[1, 1]) != 2
    assert draw(logits, temperature=0.0, stops=(2,), min_tokens=3, output=[1, 1, 1]) == 2


def test_stop_id_survives_when_nothing_else_is_allowed() -> None:
    assert draw(logits_of(), temperature=1.0, stops=(2,), min_tokens=3, allowed_token_ids=(2,)) == 2


def test_bias_and_allowed_ids() -> None:
    logits = logits_of()
    assert draw(logits, temperature=0.0, logit_bias={7: 100.0}) == 7
    assert draw(logits, temperature=2.0, allowed_token_ids=(4, 9)) in (4, 9)


def test_penalties_match_their_formulas_over_prompt_and_output() -> None:
    logits = logits_of(5)
    prompt, output = [1, 2, 3, 3], [3, 4, 4]
    expected = logits.clone()
    for i in (1, 2, 3, 4):
        expected[i] = expected[i] / 1.3 if expected[i] > 0 else expected[i] * 1.3
    expected[3] -= 0.5 * 1 + 0.2
    expected[4] -= 0.5 * 2 + 0.2
    token = draw(logits, temperature=0.0, prompt=prompt, output=output, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    assert token == int(expected.argmax())


def test_logprobs_are_raw_and_ranked() -> None:
    logits = logits_of()
    sampled = sample(logits[None], [row(temperature=0.0, num_logprobs=3, logit_bias={11: 100.0})])[0]
    raw = logits.log_softmax(-1)
    assert sampled.token_id == 11 and sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(raw[11]), abs=1e-6)
    assert sampled.logprobs.rank == int((raw > raw[11]).sum()) + 1
    assert list(sampled.logprobs.top_token_ids) == raw.topk(3).indices.tolist()


def test_each_row_gets_the_logprobs_it_asks_for() -> None:
    logits = torch.stack([logits_of(i) for i in range(4)])
    asked = [None, 0, 5, 2]
    sampled = sample(logits, [row(temperature=1.0, num_logprobs=num, seed=i) for i, num in enumerate(asked)])
    assert sampled[0].logprobs is None
    for i, num in enumerate(asked[1:], start=1):
        logprobs = sampled[i].logprobs
        assert logprobs is not None and len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == num
        assert logprobs.logprob == pytest.approx(float(logits[i].log_softmax(-1)[sampled[i].token_id]), abs=1e-6)


def test_adjustments_of_one_row_leave_the_others_alone() -> None:
    logits = torch.stack([logits_of(i) for i in range(5)])
    plain = logits.argmax(-1).tolist()
    rows = [
        row(temperature=0.0),
        row(temperature=0.0, logit_bias={7: 100.0}),
        row(temperature=0.0, allowed_token_ids=(4, 9)),
        row(temperature=0.0, prompt=[plain[3]], repetition_penalty=100.0),
        row(temperature=0.0, stops=(plain[4],), min_tokens=1),
    ]
    tokens = [token.token_id for token in sample(logits, rows)]
    assert tokens[:2] == [plain[0], 7]
    assert tokens[2] == max((4, 9), key=lambda i: float(logits[2, i]))
    assert tokens[3] != plain[3] and tokens[4] != plain[4]
    assert tokens == [sample(logits[i : i + 1], rows[i : i + 1])[0].token_id for i in range(5)]


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of()
    before = logits.clone()
    sample(logits[None], [row(temperature=1.0, repetition_penalty=2.0, prompt=[1], logit_bias={1: 5.0}, top_p=0.5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_numbers_never_lead_outside_the_vocabulary(bad: float, temperature: float) -> None:
    for logits in (torch.full((VOCAB,), bad), torch.where(torch.arange(VOCAB) == 3, bad, logits_of())):
        for penalty in (1.0, 1.5):
            rows = [row(temperature=temperature, repetition_penalty=penalty, prompt=[3])]
            token = int(PendingTokens(logits[None], rows).tokens)
            assert 0 <= token < VOCAB


def mask_of(*token_ids: int) -> TokenMask:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def masked(mask: TokenMask, stops: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"temperature": 0.0, **params}), 1, [], 0, frozenset(stops), grammar_mask=mask)


def test_only_what_the_grammar_allows_is_drawn_and_only_in_its_row() -> None:
    logits = torch.stack([logits_of(1), logits_of(1), logits_of(1)])
    best = int(logits[0].argmax())
    rows = [row(temperature=0.0), masked(mask_of(7, 400)), masked(mask_of(9), temperature=1.0)]
    tokens = [token.token_id for token in sample(logits, rows)]
    assert tokens[0] == best
    assert tokens[1] == (7 if logits[0, 7] > logits[0, 400] else 400)
    assert tokens[2] == 9


def test_grammar_bias_and_allowed_ids_hold_together() -> None:
    logits = logits_of(1)[None]
    assert sample(logits, [masked(mask_of(7, 8, 9), allowed_token_ids=(8, 9, 10), logit_bias={9: 100})])[0].token_id == 9
    assert sample(logits, [masked(mask_of(7, 8, 9), logit_bias={9: 100, 20: 100})])[0].token_id == 9
    with pytest.raises(InvalidRequestError):
        sample(logits, [masked(mask_of(7), allowed_token_ids=(8,))])


def test_min_tokens_hold_a_stop_back_unless_the_grammar_allows_nothing_else() -> None:
    logits = logits_of(1)[None]
    assert sample(logits, [masked(mask_of(5, 8), stops=(5,), min_tokens=3, logit_bias={5: 100})])[0].token_id == 8
    assert sample(logits, [masked(mask_of(5), stops=(5,), min_tokens=3)])[0].token_id == 5
