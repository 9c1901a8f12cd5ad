"""A system whose one worker is an engine of three ranks: 9 query heads and 3 KV heads of the packaged model, shared by processes."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

import psutil
import pytest
from local_stack import CNT, LocalStack, ids
from plain_run import assert_equals_plain_run

pytestmark = pytest.mark.long
SCORED = {"temperature": 0, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalStack]:
    with LocalStack("--aggregated", "--tensor-parallel", "3", debug="true") as running:
        yield running


def ranks_of(stack: LocalStack) -> list[psutil.Process]:
    return psutil.Process(stack.pid("decode-0")).children()


def test_answers_of_ranks_are_those_of_one_engine(ranks: LocalStack) -> None:
    assert len(ranks_of(ranks)) == 2
    for prompt in (CNT, ids(50, first=51), ids(50, first=51)):
        assert_equals_plain_run(ranks.complete(prompt, 6, **SCORED)["choices"][0])
    sampled = ranks.complete(CNT, 8, n=4, temperature=1.0, seed=5)["choices"]
    assert len({choice["text"] for choice in sampled}) > 1
    ranks.wait_until_idle()


def test_a_rank_that_is_killed_takes_its_worker_along_and_another_one_serves(ranks: LocalStack) -> None:
    worker = psutil.Process(ranks.pid("decode-0"))
    [rank, other] = worker.children()
    rank.kill()
    assert psutil.wait_procs([worker, other], timeout=30)[1] == []
    assert ranks.next_event("restarted")["child"] == "decode-0"

    def is_served() -> bool:
        try:
            assert_equals_plain_run(ranks.complete(CNT, 3, **SCORED)["choices"][0])
            return True
        except urllib.error.HTTPError as error:
            assert error.code in (502, 503)
            return False

    ranks.wait_until(is_served, 60)
    assert len(ranks_of(ranks)) == 2
