"""Sampling kernels on a GPU against the CPU: the draws are the same bit for bit."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import AWKWARD_SIZES, KINDS, make_logits, make_parameters

from kernels import reference, sampling
from kernels.row_parameters import row_parameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

# Batches for which 8, 4, 2 and 1 blocks share a row on a GPU with 132 processors.
BATCHES = [1, 33, 64, 130, 300]


def poison_allocator() -> None:
    """Freed memory of the sizes that results take holds -1, so that what a kernel leaves out shows."""
    del [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in (1, 8, 33, 64, 130, 300, 512)][:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", AWKWARD_SIZES)
def test_draws_equal_the_cpu_for_all_parameters(vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, 24, vocab_size)
    parameters = make_parameters(24, seed=vocab_size)
    expected = sampling.sample_tokens(logits, parameters)
    poison_allocator()
    assert torch.equal(sampling.sample_tokens(logits.cuda(), parameters.cuda()).cpu(), expected)


@pytest.mark.parametrize("batch", BATCHES)
def test_draws_do_not_depend_on_how_many_blocks_share_a_row(batch: int) -> None:
    logits = make_logits("normal", batch, 32003)
    parameters = make_parameters(batch, seed=batch)
    expected = sampling.sample_tokens(logits, parameters)
    poison_allocator()
    assert torch.equal(sampling.sample_tokens(logits.cuda(), parameters.cuda()).cpu(), expected)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sampling.sample_tokens(logits[order].cuda(), parameters[order].cuda()).cpu(), expected[order])


@pytest.mark.parametrize("vocab_size", [128256, 151936, 262144])
def test_draws_at_large_vocabularies_equal_the_cpu(vocab_size: int) -> None:
    for kind in ("normal", "ties", "flat"):
        logits, parameters = make_logits(kind, 40, vocab_size, seed=3), make_parameters(40, seed=5)
        expected = sampling.sample_tokens(logits, parameters)
        assert torch.equal(sampling.sample_tokens(logits.cuda(), parameters.cuda()).cpu(), expected)


FILTERS = {  # (temperature, top_k, top_p, min_p); the paths are the kernel's, at the larger vocabularies
    "race alone": (1.0, 0, 1.0, 0.0),
    "race of a hot row": (50.0, 0, 1.0, 0.0),
    "race of what min-p leaves": (2.0, 0, 1.0, 0.001),
    "candidates, top-k": (1.5, 50, 1.0, 0.0),
    "candidates, all filters": (1.5, 1000, 0.9, 0.001),
    "candidates, top-p": (0.7, 0, 0.9, 0.0),
    "radix, top-k": (3.0, 3000, 1.0, 0.0),
    "radix, top-p": (8.0, 0, 0.95, 0.0),
    "radix, all filters": (8.0, 3000, 0.9, 1e-4),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [5, 128, 49152, 151936, 262144])
def test_every_path_lets_the_same_token_arrive_first(vocab_size: int, name: str) -> None:
    """Batches that 8 blocks and 1 block a row serve; many positions, since one draw agrees by chance."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator) * 3
    for batch in (12, 300):
        rows = logits[torch.arange(batch) % 6]
        parameters = torch.tensor([row_parameters(*FILTERS[name], seed=2**40 + i, sequence_index=i % 3, position=i) for i in range(batch)])
        expected = sampling.sample_tokens(rows, parameters)
        poison_allocator()
        assert torch.equal(sampling.sample_tokens(rows.cuda(), parameters.cuda()).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_draw_as_on_the_cpu(dtype: torch.dtype) -> None:
    for vocab_size in (17, 513, 49152):
        logits, parameters = make_logits("normal", 30, vocab_size).to(dtype), make_parameters(30, seed=2)
        assert torch.equal(sampling.sample_tokens(logits.cuda(), parameters.cuda()).cpu(), sampling.sample_tokens(logits, parameters))
        assert torch.equal(sampling.greedy_tokens(logits.cuda()).cpu(), reference.greedy_tokens(logits))


@pytest.mark.parametrize(("offset", "padding"), [(0, 4), (1, 3), (2, 7), (0, 1)])
def test_strided_and_unaligned_rows_draw_the_same(offset: int, padding: int) -> None:
    logits, parameters = make_logits("normal", 20, 5003), make_parameters(20, seed=4)
    expected = sampling.sample_tokens(logits, parameters)
    wide = torch.full((20, offset + 5003 + padding), float("inf"), device="cuda")
    wide[:, offset : offset + 5003] = logits
    view = wide[:, offset : offset + 5003]
    assert torch.equal(sampling.sample_tokens(view, parameters.cuda()).cpu(), expected)
    assert torch.equal(sampling.greedy_tokens(view).cpu(), logits.argmax(-1))


def test_thousands_of_positions_draw_as_on_the_cpu() -> None:
    logits, parameters = make_logits("normal", 1, 2000), torch.tensor([row_parameters(2.0, 0, 0.95, 0.0, seed=7)] * 4000)
    parameters[:, 6] = torch.arange(4000)
    rows = logits.expand(4000, -1)
    assert torch.equal(sampling.sample_tokens(rows.cuda(), parameters.cuda()).cpu(), sampling.sample_tokens(rows, parameters))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_the_lowest_index_of_the_maximum(kind: str) -> None:
    for vocab_size in (*AWKWARD_SIZES, 128256):
        for batch in (1, 40, 70, 140):
            logits = make_logits(kind, batch, vocab_size)
            poison_allocator()
            assert torch.equal(sampling.greedy_tokens(logits.cuda()).cpu(), reference.greedy_tokens(logits))


def test_a_captured_graph_replays_with_new_logits_and_positions() -> None:
    logits = make_logits("normal", 64, 32000).cuda()
    parameters = make_parameters(64, seed=6).cuda()
    history = torch.zeros(64, 32000, dtype=torch.int32, device="cuda")
    slots = torch.arange(64, device="cuda")
    penalties = torch.tensor([[1.2, 0.3, 0.1]] * 64, device="cuda")
    working = logits.clone()

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        working.copy_(logits)
        sampling.apply_penalties(working, history, slots, penalties)
        tokens = sampling.sample_tokens(working, parameters)
        sampling.record_tokens(history, slots, tokens, is_prompt=False)
        parameters[:, 6] += 1
        return tokens, sampling.greedy_tokens(logits), sampling.token_logprobs(logits, slots, tokens, 5)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, greedy, logprobs = step()
    cpu_history = history.cpu()
    for seed in (11, 12):
        fresh, on_cpu = make_logits("normal", 64, 32000, seed=seed), parameters.cpu()
        logits.copy_(fresh)
        tokens.fill_(-1)
        logprobs.fill_(float("nan"))
        graph.replay()
        penalised = fresh.clone()
        sampling.apply_penalties(penalised, cpu_history, slots.cpu(), penalties.cpu())
        expected = sampling.sample_tokens(penalised, on_cpu)
        sampling.record_tokens(cpu_history, slots.cpu(), expected, is_prompt=False)
        assert torch.equal(tokens.cpu(), expected)
        assert torch.equal(greedy.cpu(), fresh.argmax(-1))
        assert torch.equal(history.cpu(), cpu_history)
        assert not logprobs.isnan().any()


def test_ops_wait_for_nothing() -> None:
    logits, parameters = make_logits("normal", 64, 32000).cuda(), make_parameters(64, seed=6).cuda()
    rows = torch.arange(64, device="cuda")
    sampling.sample_tokens(logits, parameters)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.greedy_tokens(logits)
        sampling.token_logprobs(logits, rows, sampling.sample_tokens(logits, parameters), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "signed zeros", "sorted"])
@pytest.mark.parametrize("num_top", [0, 1, 20, 1000])
def test_logprobs_ranks_and_top_tokens_equal_the_cpu(num_top: int, kind: str) -> None:
    for vocab_size in (1, 17, 513, 5003, 128256):
        num = min(num_top, vocab_size)
        logits = make_logits(kind, 9, vocab_size)
        rows = torch.tensor([8, 0, 3])
        tokens = torch.tensor([vocab_size // 2, vocab_size - 1, 0])
        logprobs, ranks, top_ids, top_logprobs = reference.token_logprobs(logits, rows, tokens, num)
        got = [result.cpu() for result in sampling.token_logprobs(logits.cuda(), rows.cuda(), tokens.cuda(), num)]
        # Two fp32 sums of 128256 exponentials in different orders.
        torch.testing.assert_close(got[0], logprobs, atol=5e-5, rtol=5e-6)
        torch.testing.assert_close(got[3], top_logprobs, atol=5e-5, rtol=5e-6)
        assert torch.equal(got[1], ranks)
        assert torch.equal(got[2], top_ids)


def test_penalties_bias_and_masks_equal_the_cpu_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(8)
    vocab_size, num_slots = 5003, 6
    logits = make_logits("normal", 4, vocab_size)
    history = torch.zeros(num_slots, vocab_size, dtype=torch.int32)
    slots = torch.tensor([5, -1, 0, 2])
    penalties = torch.rand(4, 3, generator=generator) * 2 + 0.1
    noted_slots = torch.randint(-1, num_slots + 1, (3000,), generator=generator)
    noted_tokens = torch.randint(-2, vocab_size + 2, (3000,), generator=generator)
    noted_tokens[::2] %= 40  # many times the same
    bias_rows, bias_tokens = torch.tensor([0, 1, 3, 4, -1]), torch.tensor([7, 5002, 0, 0, 0])
    bias = torch.tensor([100.0, -3.3, float("-inf"), 1.0, 1.0])
    mask_rows = torch.tensor([2, 0, 9])
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        x, noted = logits.clone().to(device), history.clone().to(device)
        sampling.record_tokens(noted, noted_slots.to(device), noted_tokens.to(device), is_prompt=True)
        sampling.record_tokens(noted, noted_slots[1000:].to(device), noted_tokens[1000:].to(device), is_prompt=False)
        sampling.apply_token_bias(x, bias_rows.to(device), bias_tokens.to(device), bias.to(device))
        sampling.apply_token_mask(x, mask_rows.to(device), masks.to(device))
        sampling.apply_penalties(x, noted, slots.to(device), penalties.to(device))
        results.append((noted.cpu(), x.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[1][1], logits)
