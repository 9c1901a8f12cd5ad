"""Two prefix exchanges over real sockets, without models: what is pinned and reserved goes back however a pull ends."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from host_tier_cache import FailingStore, StepByStepExecutor
from kv_transfer_pairs import LAYOUT, random_memory
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import INVALID_SPAN, Span

from shared.block_hash import BlockHash, root_hash
from shared.cache.block_pool import BlockPool
from shared.cache.host_tier import HostTier
from shared.cache.kv_cache_manager import KVCacheManager
from shared.clock import SystemClock
from shared.config import Settings
from shared.engine.host_block_store import new_host_block_store
from shared.ids import new_incarnation, new_transfer_id
from shared.messages import KVPeer, PrefixPull, SendPrefix
from shared.request import Request
from shared.worker.prefix_exchange import PrefixExchange

BLOCK_SIZE = LAYOUT.block_size
ROOT = root_hash("test", "float32", BLOCK_SIZE)
NUM_BLOCKS = 5
NUM_POOL_BLOCKS = 16
PATIENCE_S = 10.0
"""For what happens of itself. Whatever would end it otherwise comes later."""
TOKENS = list(range(NUM_BLOCKS * BLOCK_SIZE + 2))


class Worker:
    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.memory = random_memory(NUM_POOL_BLOCKS, seed)
        blocks = torch.frombuffer(self.memory._memory, dtype=torch.uint8).view(NUM_POOL_BLOCKS, -1)
        self.store = FailingStore(new_host_block_store(blocks, NUM_POOL_BLOCKS * LAYOUT.block_nbytes))
        self.copies = StepByStepExecutor()
        tier = HostTier(self.store, self.copies, NUM_POOL_BLOCKS)
        self.manager = KVCacheManager(BlockPool(NUM_POOL_BLOCKS, host_tier=tier), BLOCK_SIZE, ROOT, host_tier=tier)
        self.incarnation = new_incarnation()
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        settings = Settings(kv_lanes=1, kv_max_chunk_bytes=LAYOUT.block_nbytes)
        self.exchange = PrefixExchange(
            LAYOUT, self.memory, self.manager, self.incarnation, SystemClock(), settings, name, "127.0.0.1", self.inbox.put
        )

    @property
    def peer(self) -> KVPeer:
        receiver = self.exchange.receiver
        return KVPeer(
            worker_id=self.name, ctrl_endpoint=receiver.ctrl_endpoint, incarnation=self.incarnation, server_key=receiver.server_key
        )

    def request(self, name: str, deadline_s: float = 60.0) -> Request:
        request = Request(name, list(TOKENS), arrival_s=0.0, deadline_at_s=time.monotonic() + deadline_s)
        request.update_block_hashes(ROOT, BLOCK_SIZE)
        return request

    def compute(self, num_blocks: int) -> list[BlockHash]:
        """As if it had computed these blocks for a request that has ended."""
        request = self.request("computed")
        assert self.manager.reserve(request)
        request.num_computed_tokens = num_blocks * BLOCK_SIZE
        self.manager.publish_full_blocks(request)
        self.manager.free(request.request_id)
        return request.block_hashes

    def evict(self) -> None:
        """To host memory: all its blocks have got another use."""
        block_ids = self.manager.pool.allocate(NUM_POOL_BLOCKS)
        assert block_ids is not None
        for block in block_ids:
            self.memory.block(block.block_id)[:] = bytes(LAYOUT.block_nbytes)
        self.manager.pool.free(block_ids)

    def run_until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "did not come true in time"
            try:
                self.inbox.get(timeout=0.01)()
            except queue.Empty:
                continue


@pytest.fixture
def holder() -> Iterator[Worker]:
    worker = Worker("holder", 1)
    yield worker
    worker.exchange.close()
    worker.manager.check_invariants()
    assert worker.manager.num_used() == 0


@pytest.fixture
def puller() -> Iterator[Worker]:
    worker = Worker("puller", 2)
    yield worker
    worker.exchange.close()
    worker.manager.check_invariants()


def ask(holder: Worker, puller: Worker, deadline_s: float = 60.0, timeout_s: float = 60.0) -> PrefixPull:
    hashes = puller.request("hashes").block_hashes
    pull = PrefixPull(transfer_id=new_transfer_id(), num_blocks=NUM_BLOCKS, timeout_s=timeout_s)
    holder.exchange.send(SendPrefix(
        transfer_id=pull.transfer_id, block_hashes=tuple(block_hash.hex() for block_hash in hashes), peer=puller.peer, deadline_s=deadline_s
    ))  # fmt: skip
    return pull


def start(puller: Worker, pull: PrefixPull, request: Request, span: Span = INVALID_SPAN) -> list[str]:
    """Grows when the pull has ended."""
    ended: list[str] = []
    reservation = puller.manager.reserve(request)
    assert reservation is not None
    assert puller.exchange.pull(pull, request, reservation, span, lambda _failure: ended.append(request.request_id))
    return ended


def test_pulled_blocks_are_the_holders_bytes_and_are_cached(holder: Worker, puller: Worker) -> None:
    hashes = holder.compute(NUM_BLOCKS)
    request, span = puller.request("a"), TracerProvider().get_tracer("test").start_span("prefill")
    ended = start(puller, ask(holder, puller), request, span)
    puller.run_until(lambda: ended)
    (event,) = span.events  # type: ignore[attr-defined]
    assert (event.name, event.attributes["kv.num_blocks"]) == ("kv.prefix_pulled", NUM_BLOCKS)
    assert request.num_computed_tokens == request.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    for block_hash in hashes:
        theirs, ours = holder.manager.pool.get_cached(block_hash), puller.manager.pool.get_cached(block_hash)
        assert theirs is not None and ours is not None
        assert holder.memory.block(theirs.block_id) == puller.memory.block(ours.block_id)
    holder.run_until(lambda: holder.manager.num_used() == 0)
    assert holder.exchange.counters()["kv_prefix_offered_blocks"] == puller.exchange.counters()["kv_prefix_pulled_blocks"] == NUM_BLOCKS


def test_holder_keeps_its_blocks_for_a_puller_that_never_comes_until_the_deadline_only(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    ask(holder, puller, deadline_s=0.6)
    assert holder.manager.num_used() == NUM_BLOCKS
    holder.run_until(lambda: holder.manager.num_used() == 0)


def test_puller_that_comes_too_late_for_the_holder_computes(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    pull = ask(holder, puller, deadline_s=1.5)
    puller.run_until(lambda: puller.exchange.receiver.state.num_transfers)
    holder.run_until(lambda: holder.manager.num_used() == 0)
    request = puller.request("a")
    ended = start(puller, pull, request)
    puller.run_until(lambda: ended)  # the holder had said so
    assert request.num_computed_tokens == 0
    assert puller.exchange.counters()["kv_prefix_pull_failures"] == 1


def test_pull_that_nobody_answers_ends_in_its_time(puller: Worker) -> None:
    request, span = puller.request("a"), TracerProvider().get_tracer("test").start_span("prefill")
    ended = start(puller, PrefixPull(transfer_id=new_transfer_id(), num_blocks=NUM_BLOCKS, timeout_s=0.3), request, span)
    puller.run_until(lambda: ended)
    (event,) = span.events  # type: ignore[attr-defined]
    assert event.name == "kv.prefix_pull_failed" and "deadline" in event.attributes["reason"]
    assert request.num_computed_tokens == 0


def test_dropped_before_there_was_room_for_it_the_holder_is_free_at_once(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    pull = ask(holder, puller)
    puller.run_until(lambda: puller.exchange.receiver.state.num_transfers)
    puller.exchange.drop(pull, "aborted")
    holder.run_until(lambda: holder.manager.num_used() == 0)


def test_who_waits_for_anothers_pull_goes_on_when_that_is_dropped(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    unanswered = PrefixPull(transfer_id=new_transfer_id(), num_blocks=NUM_BLOCKS, timeout_s=60.0)
    ended = start(puller, unanswered, puller.request("a"))
    woken: list[str] = []
    assert puller.exchange.join(ask(holder, puller), puller.request("b"), lambda: woken.append("b"))
    holder.run_until(lambda: holder.manager.num_used() == 0)  # its blocks are not wanted twice
    for _ in range(2):
        puller.exchange.drop(unanswered, "aborted")
    puller.manager.free("a")
    puller.run_until(lambda: woken)
    assert puller.manager.num_used() == 0
    assert not puller.exchange.join(unanswered, puller.request("c"), lambda: woken.append("c")), "nobody pulls any more"
    assert (ended, woken) == ([], ["b"])


def test_holder_that_shuts_down_is_known_at_once(puller: Worker) -> None:
    holder = Worker("holder", 1)
    holder.compute(NUM_BLOCKS)
    pull = ask(holder, puller)
    puller.run_until(lambda: puller.exchange.receiver.state.num_transfers)
    holder.exchange.close()
    assert holder.manager.num_used() == 0
    request = puller.request("a")
    ended = start(puller, pull, request)
    puller.run_until(lambda: ended)
    holder.exchange.send(SendPrefix(transfer_id=new_transfer_id(), block_hashes=(), peer=puller.peer, deadline_s=1.0))
    assert holder.manager.num_used() == 0


def test_what_is_here_already_is_not_pulled(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    puller.compute(NUM_BLOCKS)
    request = puller.request("a")
    reservation = puller.manager.reserve(request)
    assert reservation is not None
    assert not puller.exchange.pull(ask(holder, puller), request, reservation, INVALID_SPAN, lambda _failure: None)
    holder.run_until(lambda: holder.manager.num_used() == 0)
    puller.manager.free("a")


def test_another_incarnation_gets_nothing(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    puller.incarnation += 1
    ask(holder, puller)
    holder.run_until(lambda: holder.manager.num_used() == 0)
    assert puller.exchange.counters()["bytes_received"] == 0


def test_exchange_whose_receiver_has_failed_says_so_and_ends_its_pulls(puller: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that went on would let every later request wait for its deadline."""
    request = puller.request("a")
    ended = start(puller, PrefixPull(transfer_id=new_transfer_id(), num_blocks=NUM_BLOCKS, timeout_s=60.0), request)
    assert puller.exchange.is_alive
    monkeypatch.setattr(puller.exchange.receiver.state, "tick", lambda: 1 / 0)
    puller.run_until(lambda: ended and not puller.exchange.is_alive)
    assert request.num_computed_tokens == 0


def test_holder_brings_blocks_back_from_host_memory_before_it_offers_them(holder: Worker, puller: Worker) -> None:
    hashes = holder.compute(NUM_BLOCKS)
    computed = [bytes(holder.memory.block(holder.manager.pool.get_cached(block_hash).block_id)) for block_hash in hashes]  # type: ignore[union-attr]
    holder.evict()
    request = puller.request("a")
    ended = start(puller, ask(holder, puller), request)
    time.sleep(0.1)
    assert not puller.exchange.receiver.counters()["bytes_received"] and not ended
    holder.copies.run_next()
    puller.run_until(lambda: ended)
    assert request.num_computed_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert [bytes(puller.memory.block(block_id)) for block_id in puller.manager.block_ids("a")[:NUM_BLOCKS]] == computed
    holder.run_until(lambda: holder.manager.num_used() == 0)
    puller.manager.free("a")


def test_holder_that_cannot_bring_blocks_back_says_so_at_once(holder: Worker, puller: Worker) -> None:
    holder.compute(NUM_BLOCKS)
    holder.evict()
    request = puller.request("a")
    ended = start(puller, ask(holder, puller), request)
    holder.store.is_failing = True
    holder.copies.run_next()
    puller.run_until(lambda: ended)
    assert request.num_computed_tokens == 0
    holder.run_until(lambda: holder.manager.num_used() == 0)
    puller.manager.free("a")


def test_holder_that_shuts_down_while_it_brings_blocks_back_keeps_none(puller: Worker) -> None:
    holder = Worker("holder", 1)
    holder.compute(NUM_BLOCKS)
    holder.evict()
    ask(holder, puller)
    assert holder.manager.num_used() == NUM_BLOCKS
    holder.exchange.close()
    holder.manager.close()
    holder.manager.check_invariants()
    assert holder.manager.num_used() == 0
