"""Bounds and deadlines of KVX/1 that are not settings: what one peer may cost another, and how long anything may take."""

from __future__ import annotations

MAX_CONTROL_BYTES = 1 << 20
"""Largest control frame, JSON or hidden state."""
HELLO_TIMEOUT_S = 2.0
"""A decode worker that has not answered HELLO for this long is not there."""
HELLO_RETRY_S = 0.5
OFFER_WAIT_S = 30.0
"""An offer for a transfer that the decode service has not announced is denied after this."""
MAX_WAITING_OFFERS = 1024
MAX_WAITING_OFFERS_PER_PEER = 256
MAX_PEERS = 256
"""Prefill workers that may be connected to one decode worker."""
CONTROL_RATE_PER_S = 2000.0
CONTROL_BURST = 8000
"""Control messages of one peer that are listened to; what it says beyond that is dropped."""
MAX_CONTROL_QUOTAS = 4 * MAX_PEERS
"""Connections of which is remembered how much they said, peers or not."""
MAX_CHUNKS_PER_PEER = 64
"""Chunks on the way to one peer, of all its transfers."""
MAX_TOMBSTONES = 4096
"""Ended transfers remembered, to answer a peer that has not heard yet."""
MAX_CHUNK_DAMAGES = 2
"""A chunk that came damaged this often fails its transfer: one re-send, no more."""
MAX_CHUNK_LOSSES = 5
"""As above for a chunk not there at a fence: more, because after a reconnect it may merely be late."""
DISCONNECT_GRACE_S = 1.0
"""A control connection that is not back after this is a dead peer. Whoever comes back within it goes on where it was."""
LANE_GRACE_S = 0.3
"""What was on a lane that is not back after this goes over the others."""
LANES_TIMEOUT_S = 4.0
"""A peer that answers, but of whose lanes none could be opened within this, cannot be sent to: a firewall, most often."""
TICK_S = 0.05
"""How often the deadlines are looked at while transfers live."""
HEARTBEAT_S = 0.4
"""How often a peer with which transfers live is told that we do too."""
LATE_TICK_S = 0.5
"""Who looks at the deadlines this late was held up himself: what peers sent meanwhile is still to be read."""
DEAD_WIRE_S = 30.0
"""A transfer of which nothing was acknowledged for this long has lost its lanes, though control lives. Not less, since a slow wire that
lives is not to be cut."""
RENEW_S = 1.0
STALL_S = 1.5
"""After which a silent sender renews a transfer, and a stalled one asks what arrived."""
