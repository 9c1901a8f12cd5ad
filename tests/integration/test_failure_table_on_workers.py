"""Failure cases of KVX/1 that a decode worker with too few blocks shows, on the real system. The others: tests/simulation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_stack import CNT, LocalStack, ids
from plain_run import assert_equals_plain_run

SCORED = {"logprobs": 2, "return_tokens_as_token_ids": True}


def at_once(stack: LocalStack, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: stack.complete(prompt, max_tokens, **SCORED, **options)["choices"][0], prompts))


def test_case_14_blocks_that_a_waiting_request_holds_are_not_evicted(tight: LocalStack) -> None:
    """Every request finds part of its prefix on decode and waits for the rest, while the others need the room."""
    prefix = ids(160, first=9000)
    tight.complete([*prefix, *ids(8)], 2)
    prompts = [[*prefix, 9001 + number, *ids(60 + number)] for number in range(2)]
    fillers = [ids(200 + number, first=9100 + number) for number in range(3)]
    for choice in at_once(tight, [fillers[0], prompts[0], fillers[1], prompts[1], fillers[2]], 2):
        assert_equals_plain_run(choice)
    tight.wait_until_idle()


def test_case_15_requests_of_one_prefix_share_what_is_on_the_way_where_room_is_short(tight: LocalStack) -> None:
    """In bytes: test_kv_bytes."""
    prefix = ids(240, first=9200)
    for choice in at_once(tight, [[*prefix, 9201 + number, *ids(10)] for number in range(3)], 2):
        assert_equals_plain_run(choice)
    tight.wait_until_idle()


@pytest.mark.long
def test_case_20_a_preempted_request_never_asks_for_its_kv_again(tight: LocalStack) -> None:
    before = tight.statistics("decode-0")["decode-0"].counters
    with ThreadPoolExecutor(4) as clients:
        # Salted: equal sequences would share their blocks.
        answers = list(clients.map(lambda number: tight.tokens(CNT, 150, ignore_eos=True, cache_salt=f"{number}"), range(4)))
    assert answers == answers[:1] * 4
    assert answers[0][:6] == [216, 38, 28, 216, 39, 28]
    after = tight.statistics("decode-0")["decode-0"].counters
    assert after["preemptions"] > before["preemptions"], "the pool was large enough for all"
    assert after["transfers_expected"] - before["transfers_expected"] <= 4, "one transfer a request at most"
    tight.wait_until_idle()
