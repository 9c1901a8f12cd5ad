"""Blocks on the way for one request are not sent again for another, unless waiting for them would cost more."""

from __future__ import annotations

from pathlib import Path

from decode_harness import DecodeHarness
from tiny_models import write_tiny_hf

from services.decode.awaited_blocks import AwaitedBlocks
from shared.block_hash import BlockHash, hash_full_blocks, root_hash
from shared.ids import new_transfer_id
from shared.messages import DecodeRequest
from shared.model_files.model_source import resolve_model
from shared.sampling_params import SamplingParams

CHAIN = hash_full_blocks(root_hash("m", "float32", 4), list(range(40)), 4)
A, B, C = CHAIN[:3]


def test_blocks_are_awaited_until_their_transfer_has_ended():
    awaited = AwaitedBlocks()
    awaited.add("first", [A, B])
    assert awaited.are_worth_waiting_for([A]) and awaited.are_worth_waiting_for([B, C])
    assert not awaited.are_worth_waiting_for([C]) and not awaited.are_worth_waiting_for([])
    awaited.remove("first")
    awaited.remove("first")
    assert not awaited.are_worth_waiting_for([A]) and not awaited


def test_a_block_belongs_to_the_first_that_brings_it():
    awaited = AwaitedBlocks()
    awaited.add("first", [A])
    awaited.add("second", [A, B])
    awaited.remove("second")
    assert awaited.are_worth_waiting_for([A]) and not awaited.are_worth_waiting_for([B])


def test_hashes_are_bytes_that_compare_by_value():
    awaited = AwaitedBlocks()
    awaited.add("first", [A])
    assert awaited.are_worth_waiting_for([BlockHash(bytes(A))])


def test_a_transfer_that_brings_much_else_is_not_waited_for():
    awaited = AwaitedBlocks()
    awaited.add("long", CHAIN)
    assert awaited.are_worth_waiting_for(CHAIN[:5]) and awaited.are_worth_waiting_for([*CHAIN, C])
    assert not awaited.are_worth_waiting_for(CHAIN[:4])


def test_short_request_does_not_wait_for_a_long_prompt_of_which_it_shares_the_beginning(tmp_path: Path):
    write_tiny_hf(tmp_path)
    with DecodeHarness(resolve_model(str(tmp_path))) as decode:
        transfers = {}
        for name, prompt in {"long": [5] * 45, "same": [5] * 45, "short": [5] * 6 + [7] * 3}.items():
            transfers[name] = new_transfer_id()
            decode.worker.accept(b"router", DecodeRequest(
                request_id=name, transfer_id=transfers[name], token_ids=tuple(prompt), sampling=SamplingParams(), deadline_s=60.0
            ))  # fmt: skip
        expected = decode.worker.prefixes.receiver.state._incoming
        assert set(expected) == {transfers["long"], transfers["short"]}


def test_requests_that_waited_for_anothers_pull_come_back_in_the_order_of_their_arrival(tmp_path: Path):
    write_tiny_hf(tmp_path)
    with DecodeHarness(resolve_model(str(tmp_path)), num_blocks=8) as decode:
        for name in ("runs", "first", "second", "third"):
            decode.submit(name, [ord(name[0])] * 26)
        queue = decode.worker._reserve_queue
        assert [job.request.request_id for job in queue] == ["first", "second", "third"]
        waited = [queue.popleft(), queue.popleft()]
        for job in waited:
            decode.worker._queue_again(job)
        assert [job.request.request_id for job in queue] == ["first", "second", "third"]
