"""KV between engines of unequal tensor-parallel degree, on CPUs: real ranks, real transfers. To the transfer a block has all its heads,
wherever they are computed, so what holds between two engines of one rank holds between any two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from decode_harness import DecodeHarness
from prefill_harness import answer, peer_of, prefill_worker, run, submit
from tiny_models import with_changes, write_tiny_hf

from services.prefill.worker import PrefillWorker
from shared.engine.engine_core import EngineCore
from shared.ids import new_transfer_id
from shared.messages import AbortRequest, PrefixPull, SendPrefix
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.transport.connector import FrameTap
from shared.transport.protocol.frames import DataHeader, MessageType

BLOCK_SIZE = 4
TOLERANCE = 1e-4
"""Of keys and values: sums over ranks are formed in another order."""
NUM_TOKENS = 43
NUM_CACHED = (NUM_TOKENS - 1) // BLOCK_SIZE
_names = (f"request {number}" for number in itertools.count())
_seeds = itertools.count(1)


def new_prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    """One that nobody has cached."""
    seed = next(_seeds)
    return [(11 * index + 17 * seed + index * index * seed) % 200 + 3 for index in range(num_tokens)]


class Workers:
    """Of one model, of each degree that is asked for; `alone` has one rank and takes no KV."""

    def __init__(self, source: ModelSource, directory: Path, stack: ExitStack) -> None:
        self._source = source
        self._directory = directory
        self._stack = stack
        self.tamper: FrameTap = _as_it_is
        self.prefill = cache(self._new_prefill)
        self.decode = cache(self._new_decode)
        self.alone = self._new_decode(1)

    def _settings(self, degree: int) -> dict[str, object]:
        return {"model": str(self._directory), "tensor_parallel_size": degree, "max_num_batched_tokens": 16, "debug": True}

    def _new_prefill(self, degree: int) -> PrefillWorker:
        # The others show the memory that their ranks share, and hand over each layer while the next one runs.
        own = {"kv_transport": "tcp"} if degree == 4 else {"kv_layer_groups": 3}
        worker, _ = self._stack.enter_context(prefill_worker(self._source, **own, **self._settings(degree)))
        worker._sender._tap = lambda header, payload: self.tamper(header, payload)
        return worker

    def _new_decode(self, degree: int) -> DecodeHarness:
        return self._stack.enter_context(DecodeHarness(self._source, **self._settings(degree)))


def _as_it_is(_: DataHeader, payload: memoryview) -> memoryview:
    return payload


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)], ids="{} KV heads".format)
def all_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """With 2 KV heads each stands on two of 4 ranks."""
    directory: Path = tmp_path_factory.mktemp("model")
    write_tiny_hf(directory, with_changes(num_layers=3, num_kv_heads=request.param))
    source = resolve_model(str(directory))
    assert source.config.num_kv_heads == request.param
    with ExitStack() as stack:
        yield Workers(source, directory, stack)


@pytest.fixture
def workers(all_workers: Workers) -> Iterator[Workers]:
    yield all_workers
    all_workers.tamper = _as_it_is


def cached_kv(engine: EngineCore, prompt: list[int]) -> torch.Tensor:
    """[blocks, layers, 2, heads, block_size, head_dim]: what is cached of a prompt, of all ranks together."""
    request = Request(next(_names), list(prompt), arrival_s=0.0, deadline_at_s=1e9)
    reservation = engine.manager.reserve(request)
    assert reservation is not None
    try:
        return engine.cache.tensor[reservation.block_ids[: reservation.num_cached_blocks]].clone()
    finally:
        engine.manager.free(request.request_id)


@pytest.mark.parametrize(
    ("src", "dst"), [(1, 2), (2, 1), (2, 2), (4, 2), *(pytest.param(*pair, marks=pytest.mark.long) for pair in [(2, 4), (1, 4)])]
)
def test_every_head_arrives_whatever_the_degrees(workers: Workers, src: int, dst: int) -> None:
    prefill, decode = workers.prefill(src), workers.decode(dst)
    prompt = new_prompt()
    expected = answer(workers.alone, next(_names), prompt)
    assert answer(decode, next(_names), prompt, prefill) == expected
    sent, arrived = cached_kv(prefill.engine, prompt), cached_kv(decode.worker.engine, prompt)
    assert len(arrived) == NUM_CACHED
    assert torch.equal(sent, arrived)
    assert (arrived - cached_kv(workers.alone.worker.engine, prompt)).abs().max() < TOLERANCE
    # The same prompt again finds its blocks at both ends; one that shares its beginning goes on from them.
    assert answer(decode, next(_names), prompt, prefill) == expected
    other = prompt[:21] + new_prompt(9)
    assert answer(decode, next(_names), other, prefill) == answer(workers.alone, next(_names), other)
    assert decode.worker._counters["kv_recompute_fallbacks"] == 0
    assert prefill.engine.manager.num_used() == decode.num_used == 0


def test_a_damaged_frame_is_found_and_repaired_on_every_rank(workers: Workers) -> None:
    prefill, decode = workers.prefill(4), workers.decode(2)
    flipped: list[int] = []

    def flip_once(header: DataHeader, payload: memoryview) -> memoryview:
        if header.payload_nbytes and not flipped:
            flipped.append(header.chunk_seq)
            # In the last head of V, which the second rank computes.
            return memoryview(bytes(payload[:-1]) + bytes([payload[-1] ^ 64]))
        return payload

    workers.tamper = flip_once
    prompt = new_prompt()
    assert answer(decode, next(_names), prompt, prefill) == answer(workers.alone, next(_names), prompt)
    assert torch.equal(cached_kv(prefill.engine, prompt), cached_kv(decode.worker.engine, prompt))
    assert flipped
    assert decode.worker._receiver.counters()["bad_checksums"] == 1
    assert decode.worker._counters["kv_recompute_fallbacks"] == 0


@pytest.mark.parametrize("who", ["both", "decode", "prefill"])
def test_an_abort_in_the_middle_gives_every_block_back_and_publishes_none(workers: Workers, who: str) -> None:
    prefill, decode = workers.prefill(4), workers.decode(2)
    name, prompt = next(_names), new_prompt()
    workers.tamper = lambda header, payload: payload if header.msg_type is not MessageType.CHUNK or header.chunk_seq < 5 else None
    num_received = decode.worker._receiver.counters()["chunks_received"]

    submit(decode, name, prompt, prefill)
    while decode.worker._receiver.counters()["chunks_received"] < num_received + 5:
        prefill._turn()
        decode.turn()
    assert decode.num_used == 11
    if who != "decode":
        prefill.abort(AbortRequest(request_id=name, reason="test"))
    if who != "prefill":
        decode.abort(name)
    run(decode, prefill)
    assert prefill.engine.manager.num_used() == decode.num_used == 0
    # Whom prefill tells that nobody waits computes nothing either.
    assert decode.answers(name) == [] and len(cached_kv(decode.worker.engine, prompt)) == 0
    workers.tamper = _as_it_is
    assert answer(decode, next(_names), prompt, prefill) == answer(workers.alone, next(_names), prompt)


@pytest.mark.parametrize("degree", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_prefix_is_pulled_from_ranks(workers: Workers, degree: int) -> None:
    holder, puller = workers.decode(2), workers.decode(degree)
    prompt = new_prompt()
    expected = answer(holder, next(_names), prompt)
    hashes = tuple(block_hash.hex() for block_hash in _hashes(holder, prompt))
    pull = PrefixPull(transfer_id=new_transfer_id(), num_blocks=NUM_CACHED, timeout_s=60.0)
    holder.worker.prefixes.send(
        SendPrefix(transfer_id=pull.transfer_id, block_hashes=hashes[:NUM_CACHED], peer=peer_of(puller), deadline_s=60.0)
    )
    name = next(_names)
    puller.submit(name, prompt, prefix_pull=pull, max_tokens=12, ignore_eos=True, temperature=0.0)
    run(puller, None)
    assert puller.answers(name) == [expected]
    assert puller.worker.prefixes.counters()["kv_prefix_pulled_blocks"] == NUM_CACHED
    assert torch.equal(cached_kv(holder.worker.engine, prompt), cached_kv(puller.worker.engine, prompt))


def _hashes(decode: DecodeHarness, prompt: list[int]) -> list[bytes]:
    request = Request("hashes", list(prompt), arrival_s=0.0, deadline_at_s=1e9)
    request.update_block_hashes(decode.worker.engine.root, BLOCK_SIZE)
    return list(request.block_hashes)
