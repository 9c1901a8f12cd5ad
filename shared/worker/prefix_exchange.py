"""Prefixes by hash: a worker gives another the KV blocks that it has cached, and takes from another what it would have to compute.

Both ends of KVX/1 live here, since a worker of either role both sends and receives. Its own transfers, from prefill to decode, go over the
same ends; their events are handed on to it. A prefix is one more transfer, without a hidden state: the holder pins what it offers until the
transfer has ended, and the puller computes whatever has not come in time. What the holder has in host memory, it first copies into its KV
cache.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import Span

from shared.block_hash import BlockHash
from shared.cache.kv_cache_manager import KVCacheManager, Reservation
from shared.clock import Clock
from shared.config import Settings
from shared.errors import TransferError
from shared.messages import PrefixPull, SendPrefix
from shared.request import Request, RequestStatus
from shared.transport.connector import BlockMemory, CommitInfo, ReceiverEvents, SenderEvents
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender

COUNTERS = ("kv_prefix_offered_blocks", "kv_prefix_pulls", "kv_prefix_pulled_blocks", "kv_prefix_pull_failures")
HEADROOM_SHARE = 8
"""An eighth of the KV cache is not taken from a holder's own requests for blocks that it brings back for others."""


@dataclass(eq=False)
class _Pull:
    request: Request
    last_hash: BlockHash
    span: Span
    then: Callable[[str | None], None]
    started_s: float
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests that want the same blocks: what each does when they are here, or will not come."""


class PrefixExchange:
    """Any thread, but for what `then` of a pull does: that runs where `post` runs it, on the engine thread."""

    def __init__(
        self,
        layout: KVLayout,
        memory: BlockMemory,
        manager: KVCacheManager,
        incarnation: int,
        clock: Clock,
        settings: Settings,
        worker_id: str,
        advertise_host: str,
        post: Callable[[Callable[[], None]], None],
        sender_events: SenderEvents | None = None,
        receiver_events: ReceiverEvents | None = None,
    ) -> None:
        """`sender_events`, `receiver_events`: told of the transfers that are not prefixes.

        Raises ConfigurationError for settings that cannot work.
        """
        self._block_size = layout.block_size
        self._manager = manager
        self._clock = clock
        self._post = post
        self._lock = threading.Lock()
        self._offered: set[str] = set()  # transfer ids
        self._pulls: dict[str, _Pull] = {}  # by transfer id
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.sender = KVSender(layout, memory, incarnation, _SenderEvents(self, sender_events), clock, settings, worker_id)
        self.receiver = KVReceiver(
            layout, memory, incarnation, _ReceiverEvents(self, receiver_events), clock, settings, advertise_host=advertise_host
        )

    def counters(self) -> dict[str, float]:
        """Of both ends together, and of the prefixes."""
        sent, received = self.sender.counters(), self.receiver.counters()
        ends = {name: sent.get(name, 0) + received.get(name, 0) for name in sent | received}
        with self._lock:
            return {**ends, **self._counters}

    @property
    def is_alive(self) -> bool:
        """False once either end has stopped, which it does by itself only when it has failed: then no transfer would ever end."""
        return self.sender.is_alive and self.receiver.is_alive

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for transfer_id in list(self._offered):  # those not offered yet, of which the sender knows nothing
            self._release(transfer_id)

    # ---- the holder's side ----------------------------------------------------------------------------------------------
    def send(self, message: SendPrefix) -> None:
        """Offer what is here of the prefix, perhaps nothing: who is told so need not wait. The blocks are pinned until the transfer has
        ended, at the latest when its deadline has passed."""
        transfer_id = message.transfer_id
        hashes = [BlockHash(bytes.fromhex(block_hash)) for block_hash in message.block_hashes]
        with self._lock:
            if transfer_id in self._offered or not self.sender.is_alive:
                return
            self._manager.pin(_pin_name(transfer_id), hashes, len(self._manager.pool.blocks) // HEADROOM_SHARE)
            self._offered.add(transfer_id)
        end_s = self._clock.now_s() + message.deadline_s
        self._manager.when_ready(_pin_name(transfer_id), partial(self._offer, message, hashes, end_s))

    def _offer(self, message: SendPrefix, hashes: list[BlockHash], end_s: float) -> None:
        """The bytes of what is pinned are there, or will not come."""
        transfer_id, pin_name = message.transfer_id, _pin_name(message.transfer_id)
        block_ids = [] if self._manager.has_failed(pin_name) else self._manager.block_ids(pin_name)
        with self._lock:
            if transfer_id not in self._offered:
                return
            self._counters["kv_prefix_offered_blocks"] += len(block_ids)
        num_tokens = len(block_ids) * self._block_size
        deadline_s = end_s - self._clock.now_s()
        try:
            self.sender.offer(transfer_id, 0, [message.peer], num_tokens, hashes[: len(block_ids)], deadline_s, message.traceparent)
        except TransferError:
            self._release(transfer_id)
            return
        self.sender.send_blocks(transfer_id, list(enumerate(block_ids)))
        self.sender.commit(transfer_id, b"", num_tokens)

    def _release(self, transfer_id: str) -> bool:
        """False: that is not a prefix."""
        with self._lock:
            if transfer_id not in self._offered:
                return False
            self._offered.remove(transfer_id)
        self._manager.free(_pin_name(transfer_id))
        return True

    # ---- the puller's side ----------------------------------------------------------------------------------------------
    def join(self, pull: PrefixPull, request: Request, then: Callable[[], None]) -> bool:
        """True: another request is fetching these blocks already. `pull` is dropped; `then` runs when they are here or will not come."""
        if pull.num_blocks > len(request.block_hashes):
            return False
        last_hash = request.block_hashes[pull.num_blocks - 1]
        with self._lock:
            other = next((other for other in self._pulls.values() if other.last_hash == last_hash), None)
            if other is None:
                return False
            other.waiting.append(then)
        self.drop(pull, "another request is fetching the same blocks")
        return True

    def pull(self, pull: PrefixPull, request: Request, reservation: Reservation, span: Span, then: Callable[[str | None], None]) -> bool:
        """Fetch what `reservation`, the blocks of `request`, lacks of the prefix. True: `then` runs when that has ended, within the time it
        may take, with the reason if it failed; request.num_computed_tokens says what came. False: there is nothing to fetch.

        Until then the blocks must stay the request's: call `drop` before they are given back.
        """
        num_usable = request.num_cacheable_tokens // self._block_size
        if not reservation.num_cached_blocks < pull.num_blocks <= num_usable:
            self.drop(pull, "nothing of it is missing")
            return False
        hashes = request.block_hashes[: pull.num_blocks]
        now_s = self._clock.now_s()
        with self._lock:
            self._pulls[pull.transfer_id] = _Pull(request, hashes[-1], span, then, now_s)
            self._counters["kv_prefix_pulls"] += 1
        request.status = RequestStatus.WAITING_FOR_KV
        try:
            self.receiver.expect(
                pull.transfer_id,
                0,
                block_ids=reservation.block_ids,
                missing=range(reservation.num_cached_blocks, pull.num_blocks),
                num_prompt_tokens=pull.num_blocks * self._block_size,
                deadline_s=min(pull.timeout_s, request.deadline_at_s - now_s),
                block_hashes=hashes,
                is_prefix=True,
            )
        except TransferError:  # a transfer id that is in use: the router's fault, and no reason to fail the request
            self.drop(pull, "this transfer cannot be taken")
            return False
        return True

    def drop(self, pull: PrefixPull, reason: str) -> None:
        """The blocks are not wanted, or no longer: the holder is told so, and on return nothing writes into them. Safe to call again."""
        with self._lock:
            known = self._pulls.pop(pull.transfer_id, None)
        self.receiver.abort(pull.transfer_id, reason)
        for then in known.waiting if known is not None else ():
            self._post(then)

    def _is_pulled(self, transfer_id: str) -> bool:
        with self._lock:
            return transfer_id in self._pulls

    def _settle(self, transfer_id: str, info: CommitInfo | None, reason: str) -> None:
        """Engine thread: the transfer has ended. What it brought has been verified block by block, so it is as good as computed here."""
        with self._lock:
            pull = self._pulls.pop(transfer_id, None)
            if pull is None:
                return
            self._counters["kv_prefix_pulled_blocks"] += info.num_blocks_missing if info is not None else 0
            self._counters["kv_prefix_pull_failures"] += info is None
        request = pull.request
        wait_ms = 1000 * (self._clock.now_s() - pull.started_s)
        if info is None:
            pull.span.add_event("kv.prefix_pull_failed", {"reason": reason, "kv.wait_ms": wait_ms})
        else:
            pull.span.add_event(
                "kv.prefix_pulled",
                {
                    "kv.num_blocks": info.num_blocks_missing,
                    "kv.bytes": info.num_bytes,
                    "kv.transport": info.transport,
                    "kv.wait_ms": wait_ms,
                },
            )
            # A holder that has evicted may have brought less than was here already.
            request.num_computed_tokens = max(request.num_computed_tokens, info.num_prompt_tokens)
            request.num_cached_tokens = request.num_computed_tokens
            self._manager.publish_full_blocks(request)
        pull.then(reason if info is None else None)
        for then in pull.waiting:
            self._post(then)


def _pin_name(transfer_id: str) -> str:
    return f"prefix {transfer_id}"


class _SenderEvents:
    """SenderEvents: of prefixes for the exchange, of all else for the worker."""

    def __init__(self, exchange: PrefixExchange, others: SenderEvents | None) -> None:
        self._exchange = exchange
        self._others = others

    def on_granted(self, transfer_id: str) -> None:
        if self._others is not None:
            self._others.on_granted(transfer_id)  # of a prefix nobody knows there

    def on_committed(self, transfer_id: str) -> None:
        if not self._exchange._release(transfer_id) and self._others is not None:
            self._others.on_committed(transfer_id)

    def on_failed(self, transfer_id: str, reason: str) -> None:
        if not self._exchange._release(transfer_id) and self._others is not None:
            self._others.on_failed(transfer_id, reason)


class _ReceiverEvents:
    """ReceiverEvents: of prefixes for the exchange, of all else for the worker."""

    def __init__(self, exchange: PrefixExchange, others: ReceiverEvents | None) -> None:
        self._exchange = exchange
        self._others = others

    def on_committed(self, transfer_id: str, hidden_state: bytes, info: CommitInfo) -> None:
        if self._exchange._is_pulled(transfer_id):
            self._exchange._post(lambda: self._exchange._settle(transfer_id, info, ""))
        elif self._others is not None:
            self._others.on_committed(transfer_id, hidden_state, info)

    def on_failed(self, transfer_id: str, reason: str, is_cancelled: bool) -> None:
        if self._exchange._is_pulled(transfer_id):
            self._exchange._post(lambda: self._exchange._settle(transfer_id, None, reason))
        elif self._others is not None:
            self._others.on_failed(transfer_id, reason, is_cancelled)
