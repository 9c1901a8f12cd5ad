"""The prefill workers that are connected to a receiver: whether they fit, how their KV comes, how fast, and what each may cost.

Under the lock of ReceiverState; answers go through its wire.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shared.clock import Clock
from shared.config import Settings
from shared.errors import PagewireError, TransferError
from shared.transport.connector import BlockMemory, ReceiverWire
from shared.transport.protocol import control
from shared.transport.protocol.device_memory_offer import DeviceMemoryOffer
from shared.transport.protocol.frames import ChecksumCode, DataHeader, Flags
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.protocol.limits import MAX_PEERS
from shared.transport.protocol.segment_offer import SegmentOffer
from shared.transport.protocol.transport_name import TransportName, allowed
from shared.transport.protocol.wire_plan import IncompatibleError, WirePlan
from shared.transport.receiving.control_quotas import ControlQuotas
from shared.transport.wires.shared_segment import SegmentReader
from shared.transport.wires.wire_speed import Probe, probe_segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaneAddresses:
    """Where the lanes of a receiver are reached: by everybody, and by those of the same network (transport_name.network_identity)."""

    tcp: tuple[str, ...]
    ipc: tuple[str, ...] = ()
    network: str = ""
    are_encrypted: bool = False


@dataclass(slots=True)
class Peer:
    name: str
    incarnation: int
    plan: WirePlan
    num_lanes: int
    transport: TransportName
    last_heard_s: float
    offer: SegmentOffer | None = None
    segment: SegmentReader | None = None
    device_offer: DeviceMemoryOffer | None = None
    device: object = None
    """Its GPU memory, opened."""
    probes: dict[int, Probe] = field(default_factory=dict)
    """By lane."""

    def is_that_of(self, hello: control.Hello, plan: WirePlan) -> bool:
        theirs = hello.src_incarnation, hello.segment, hello.device_memory
        return (self.incarnation, self.offer, self.device_offer) == theirs and self.plan == plan


class PeerTable:
    def __init__(
        self,
        layout: KVLayout,
        memory: BlockMemory,
        incarnation: int,
        clock: Clock,
        settings: Settings,
        wire: ReceiverWire,
        lanes: LaneAddresses,
        counters: Counter[str],
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._incarnation = incarnation
        self._clock = clock
        self._settings = settings
        self._wire = wire
        self._lanes = lanes
        self._counters = counters
        self._peers: dict[str, Peer] = {}
        self._quotas = ControlQuotas()

    def get(self, key: str, incarnation: int) -> Peer | None:
        """The peer of that connection if it has said HELLO and is still this process."""
        peer = self._peers.get(key)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def __getitem__(self, key: str) -> Peer:
        return self._peers[key]

    def items(self) -> list[tuple[str, Peer]]:
        return list(self._peers.items())

    def pop(self, key: str) -> None:
        self._peers.pop(key, None)

    def clear(self) -> None:
        self._peers.clear()

    def hear(self, key: str, incarnation: int) -> bool:
        """A control message came from there; False: from one that says too much, so it is dropped."""
        now = self._clock.now_s()
        peer = self.get(key, incarnation)
        if peer is not None:
            peer.last_heard_s = now
        if self._quotas.take(key, now):
            return True
        self._counters["control_throttled"] += 1
        return False

    def silent(self, among: Iterable[str], now: float) -> list[str]:
        """Those of `among` of which nothing has been heard for too long."""
        timeout = self._settings.kv_peer_timeout_s
        return [key for key in set(among) if key in self._peers and now - self._peers[key].last_heard_s > timeout]

    def forgive_silence(self, now: float) -> None:
        """We were held up ourselves: what they said meanwhile is still to be read."""
        for peer in self._peers.values():
            peer.last_heard_s = now

    # HELLO

    def welcome(self, key: str, hello: control.Hello, lose: Callable[[str], None]) -> None:
        """Take the peer and say how it may send, or say why not. `lose`: called when the connection was another process's before."""
        known = self._peers.get(key)
        if known is None and len(self._peers) >= MAX_PEERS:
            self.refuse(key, hello.src_incarnation, f"{MAX_PEERS} prefill workers are connected already")
            return
        if not hello.protocol_min <= control.PROTOCOL_VERSION <= hello.protocol_max:
            ours, theirs = control.PROTOCOL_VERSION, (hello.protocol_min, hello.protocol_max)
            self.refuse(key, hello.src_incarnation, f"incompatible peer: protocol is {ours} here and {theirs} there", "protocol")
            return
        try:
            plan = self._agree(hello)
        except IncompatibleError as error:
            self.refuse(key, hello.src_incarnation, error.message, error.field)
            return
        except PagewireError as error:
            self.refuse(key, hello.src_incarnation, error.message, "max_chunk_bytes")
            return
        if known is None or not known.is_that_of(hello, plan):
            if known is not None and known.incarnation != hello.src_incarnation:
                lose("the prefill worker restarted")
            known = self._choose_transport(hello, plan)
            if known is None:
                ours_, theirs_ = allowed(self._settings.kv_transport), hello.transports
                self.refuse(key, hello.src_incarnation, f"no transport in common: {ours_} here and {theirs_} there", "transports")
                return
            self._peers[key] = known
        endpoints = (self._lanes.ipc if known.transport != "tcp" and self._is_near(hello) else self._lanes.tcp)[: hello.num_lanes]
        known.num_lanes = len(endpoints)
        self._wire.send_control(
            key,
            control.HelloAck(
                src_incarnation=self._incarnation,
                dst_incarnation=hello.src_incarnation,
                layout=self._layout,
                lane_endpoints=endpoints,
                max_chunk_bytes=min(hello.max_chunk_bytes, self._settings.kv_max_chunk_bytes),
                transport=known.transport,
                are_lanes_encrypted=self._lanes.are_encrypted,
            ),
        )

    def refuse(self, key: str, incarnation: int, reason: str, field: str | None = None) -> None:
        """Tell `incarnation` that there is no connection, and why."""
        self._wire.send_control(
            key, control.Deny(src_incarnation=self._incarnation, dst_incarnation=incarnation, reason=reason[:1000], field=field)
        )

    def _agree(self, hello: control.Hello) -> WirePlan:
        if ChecksumCode.XXH3_64.value not in hello.checksums:
            raise IncompatibleError("checksums", (ChecksumCode.XXH3_64.value,), hello.checksums)
        if hello.wire_dtype != self._settings.kv_wire_dtype:
            raise IncompatibleError("wire_dtype", self._settings.kv_wire_dtype, hello.wire_dtype)
        plan = WirePlan.between(hello.layout, self._layout, hello.wire_dtype)
        plan.layers_per_chunk(min(hello.max_chunk_bytes, self._settings.kv_max_chunk_bytes))
        return plan

    def _is_near(self, hello: control.Hello) -> bool:
        return bool(self._lanes.ipc) and hello.network == self._lanes.network != ""

    def _choose_transport(self, hello: control.Hello, plan: WirePlan) -> Peer | None:
        """The peer with the best transport that both ends allow and that works; None: there is none."""
        now = self._clock.now_s()
        for name in allowed(self._settings.kv_transport):
            peer = Peer(hello.worker_id, hello.src_incarnation, plan, 0, name, now, hello.segment, device_offer=hello.device_memory)
            if name not in hello.transports or (name == "ipc" and not self._is_near(hello)):
                continue
            if name == "cuda":
                if hello.device_memory is None or self._memory.gpu is None or not plan.is_whole:
                    continue
                try:
                    peer.device, bytes_per_s = self._memory.gpu.open(hello.device_memory)
                except TransferError as error:
                    logger.info("no copies from GPU to GPU with %s: %s", hello.worker_id, error.message)
                    continue
                self._report(peer, bytes_per_s)
            if name == "shm":
                try:
                    if hello.segment is None:
                        continue
                    peer.segment = SegmentReader(hello.segment)
                    self._memory.adopt(peer.segment.read(0, peer.segment.size_bytes))
                except TransferError as error:
                    logger.info("no shared memory with %s: %s", hello.worker_id, error.message)
                    continue
                self._report(peer, probe_segment(peer.segment))
            return peer
        return None

    # How fast it is

    def take_probe(self, lane: int, header: DataHeader) -> None:
        peer = next((peer for peer in self._peers.values() if peer.incarnation == header.src_incarnation), None)
        if peer is None or header.dst_incarnation != self._incarnation or not 0 <= lane < peer.num_lanes:
            self._counters["stale_frames"] += 1
            return
        # A lane opened again is measured anew: the time between two connections is not the wire's.
        probe = peer.probes[lane] = Probe() if header.chunk_seq == 0 else peer.probes.get(lane, Probe())
        probe.take(header.payload_nbytes, self._clock.now_s(), is_last=Flags.LAST in header.flags)
        if len(peer.probes) == peer.num_lanes and all(other.is_complete for other in peer.probes.values()):
            self._report(peer, sum(other.bytes_per_s for other in peer.probes.values()))
            peer.probes.clear()

    def _report(self, peer: Peer, bytes_per_s: float) -> None:
        gb_per_s = bytes_per_s / 1e9
        logger.info("KV wire from %s: %s, %.2f GB/s", peer.name, peer.transport, gb_per_s)
        if gb_per_s < self._settings.kv_min_gb_per_s:
            logger.warning(
                "the KV wire from %s is slow: %s carries %.3f GB/s, less than kv_min_gb_per_s = %g",
                peer.name, peer.transport, gb_per_s, self._settings.kv_min_gb_per_s,
            )  # fmt: skip
