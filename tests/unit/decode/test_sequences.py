"""Several answers to one prompt on a decode worker: forks, room, ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_harness import DecodeHarness
from tiny_models import TINY_CONFIG, with_changes, write_tiny_hf

from shared.messages import decode_batch, encode_batch
from shared.model_files.model_source import ModelSource, resolve_model
from shared.sampling_params import BeamSearchParams

PROMPT = [5, 9, 7, 30, 31, 32, 33, 34, 35, 36]
FREE = {"temperature": 1.5, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_hf(directory)
    return resolve_model(str(directory))


def answers(source: ModelSource, num_sequences: int, max_tokens: int = 9, **settings: object) -> list[list[int]]:
    with DecodeHarness(source, **settings) as decode:
        decode.submit("r", PROMPT, num_sequences=num_sequences, max_tokens=max_tokens, **FREE)
        decode.run()
        assert decode.num_used == 0
        return decode.answers("r")


def test_eight_answers_to_2000_tokens_cost_eight_tails_and_what_they_generate(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, with_changes(max_model_len=2200, vocab_size=TINY_CONFIG.vocab_size))
    prompt = [3 + (7 * i + i // 50) % 200 for i in range(2005)]
    with DecodeHarness(resolve_model(str(tmp_path)), block_size=16, num_blocks=400, max_num_batched_tokens=2048) as decode:
        decode.submit("r", prompt, num_sequences=8, max_tokens=40, **FREE)
        decode.run()
        num_prompt_blocks, num_generated_blocks = 2005 // 16, -(-40 // 16)
        assert decode.peak_num_used <= num_prompt_blocks + 8 * num_generated_blocks + 8
        assert len(set(map(tuple, decode.answers("r")))) == 8
        assert decode.worker.engine.manager.num_hit_tokens == 0
        [timing] = decode.timings()
        assert timing.num_computed_tokens == 2005 + 8 * 40, "the prompt was computed once"


def test_the_first_answer_is_the_one_that_a_single_request_gets(source: ModelSource, roomy: list[list[int]]) -> None:
    assert answers(source, 1) == roomy[:1]
    assert len(set(map(tuple, roomy))) == 6


@pytest.fixture(scope="module")
def roomy(source: ModelSource) -> list[list[int]]:
    """Six answers of a worker with room for all."""
    return answers(source, 6)


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 9}, {"max_num_seqs": 3}, {"max_num_seqs": 1}, {"num_blocks": 8, "enable_prefix_caching": False}]
)
def test_where_not_all_find_room_they_take_turns_and_answer_the_same(
    source: ModelSource, roomy: list[list[int]], settings: dict[str, int]
) -> None:
    assert answers(source, 6, **settings) == roomy


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_beam_search_in_the_same_step_changes_no_answer(source: ModelSource, width: int) -> None:
    """Its beams are left out of the draw, and as many forks come in."""
    found: list[list[tuple[int | None, float]]] = []
    for num_turns_before in (0, 3):
        with DecodeHarness(source) as decode:
            if num_turns_before:
                search = BeamSearchParams(width=width)
                decode.submit("beams", PROMPT, num_sequences=width, beam_search=search, max_tokens=12, ignore_eos=True)
            for _ in range(num_turns_before):
                decode.turn()
            decode.submit("r", PROMPT, num_sequences=width + 1, max_tokens=3, num_logprobs=0, **FREE)
            decode.run()
            outputs = sorted(decode.outputs("r"), key=lambda output: (output.sequence_index, output.index))
            found.append([(output.token_id, output.logprobs.logprob) for output in outputs if output.logprobs])
    alone, beside = found
    assert [token for token, _ in beside] == [token for token, _ in alone]
    assert [logprob for _, logprob in beside] == pytest.approx([logprob for _, logprob in alone], abs=1e-4)


def test_a_sequence_that_ends_gives_its_own_blocks_back_at_once(source: ModelSource) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=4, max_tokens=20, **FREE)
        for _ in range(12):
            decode.turn()
        before = decode.num_used
        decode.abort("r", 2)
        decode.turn()
        # Three full blocks: two of the prompt stay with the others.
        assert decode.num_used <= before - 3
        assert {output.sequence_index for output in decode.outputs("r")[-3:]} == {0, 1, 3}
        decode.run()
        assert [len(tokens) for tokens in decode.answers("r")] == [20, 20, len(decode.answers("r")[2]), 20]
        assert len(decode.answers("r")[2]) < 14
        assert decode.num_used == 0 and len(decode.timings()) == 1


def test_the_first_sequence_may_end_first(source: ModelSource) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=3, max_tokens=10, **FREE)
        decode.turn()
        decode.abort("r", 0)
        decode.run()
        assert [len(tokens) for tokens in decode.answers("r")] == [1, 10, 10]
        assert decode.num_used == 0


@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_an_abort_ends_all_sequences(source: ModelSource, num_turns: int) -> None:
    with DecodeHarness(source, num_blocks=10) as decode:
        decode.submit("r", PROMPT, num_sequences=8, max_tokens=20, **FREE)
        for _ in range(num_turns):
            decode.turn()
        decode.abort("r")
        assert not decode.turn()
        assert decode.num_used == 0 and len(decode.worker._sequences) == 0 and not decode.worker.engine.scheduler.waiting


def test_a_deadline_ends_all_sequences_with_one_failure(source: ModelSource) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=3, max_tokens=100, **FREE)
        decode.turn()
        decode.worker._jobs["r"].request.deadline_at_s = 0.0
        decode.turn()
        assert [failure.error_type for failure in decode.failures()] == ["deadline"]
        assert decode.num_used == 0


def test_aborting_the_last_sequence_ends_the_request(source: ModelSource) -> None:
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=2, max_tokens=50, **FREE)
        decode.turn()
        for index in (0, 1, 1, 7):
            decode.abort("r", index)
        decode.turn()
        assert not decode.worker._jobs and decode.num_used == 0


def test_sixteen_sequences_in_a_small_pool_do_not_keep_a_later_request_out(source: ModelSource) -> None:
    with DecodeHarness(source, num_blocks=12, max_num_seqs=4) as decode:
        decode.submit("many", PROMPT, num_sequences=16, max_tokens=5, **FREE)
        decode.turn()
        decode.submit("later", [40, 41, 42, 43, 44], max_tokens=4, **FREE)
        decode.run()
        assert len(decode.answers("later")[0]) == 4
        assert [len(tokens) for tokens in decode.answers("many")] == [5] * 16


def test_one_token_each_needs_no_fork_to_live(source: ModelSource) -> None:
    assert [len(tokens) for tokens in answers(source, 16, max_tokens=1, max_num_seqs=2)] == [1] * 16


def test_a_failed_draw_ends_the_request_with_its_siblings(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no draw")

    monkeypatch.setattr("services.decode.worker.sample", broken)
    with DecodeHarness(source) as decode:
        decode.submit("r", PROMPT, num_sequences=4, max_tokens=5, **FREE)
        decode.turn()
        assert [failure.message for failure in decode.failures()] == ["sampling failed: no draw"]
        assert decode.num_used == 0 and not decode.worker._jobs


def test_a_row_whose_log_probabilities_are_no_numbers_fails_alone(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a step are one frame: what cannot be written in it must not get there."""
    with DecodeHarness(source) as decode:
        compute_logits = decode.worker.engine.runner.compute_logits

        def spoil_the_second(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden).clone()
            logits[1:] = float("nan")
            return logits

        monkeypatch.setattr(decode.worker.engine.runner, "compute_logits", spoil_the_second)
        for name in ("a", "b"):
            decode.submit(name, [5, 9, 7], temperature=0.0, max_tokens=4, ignore_eos=True, num_logprobs=2)
        decode.run()
        (failure,) = decode.failures()
        assert failure.error_type == "internal"
        assert len(decode.answers("b" if failure.request_id == "a" else "a")[0]) == 4
        assert [message for frame in encode_batch(decode.sent) for message in decode_batch(frame)] == decode.sent
        assert decode.num_used == 0
