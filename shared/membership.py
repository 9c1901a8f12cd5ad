"""Who is alive: each worker keeps a record in Redis under a lease; a record that is not renewed vanishes.

Key `{namespace}:worker:{worker_id}`, value = WorkerRecord as JSON, expiry = the lease. The incarnation in the record is the
epoch: a restarted worker has another one, and everything tied to the old one is void.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class WorkerStats(BaseModel):
    """A snapshot of one worker, sent with every renewal."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens not yet computed, of all requests the worker holds."""
    num_blocks_used: int = 0
    """Blocks referenced by requests (cached but unreferenced blocks are not used)."""
    num_blocks_cached: int = 0
    num_host_blocks_cached: int = 0
    tokens_per_s: float = 0.0
    """Measured speed of prefill-like steps; 0 until the first."""
    counters: dict[str, float] = Field(default_factory=dict)
    """Totals since start: name (see telemetry) -> value."""


class WorkerRecord(BaseModel):
    """What a worker says of itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    worker_id: str
    role: Literal["prefill", "decode"]
    incarnation: int
    rpc_endpoint: str
    """ROUTER socket that takes RouterMessage frames, e.g. tcp://127.0.0.1:41000."""
    kv_ctrl_endpoint: str | None = None
    """Where other workers open a KV transfer to this one."""
    kv_server_key: str = ""
    """The public CURVE key that answers there, in Z85."""
    model_name: str
    model_fingerprint: str
    dtype: str
    """Of its KV cache."""
    kv_wire_dtype: Literal["auto", "fp8"] = "auto"
    device: str = ""
    """What it computes on: cpu, or cuda:N, the first of its ranks' GPUs as its own host counts them."""
    block_size: int
    is_kv_whole: bool = True
    """See KVFormat.is_whole."""
    num_blocks: int
    num_host_blocks: int = 0
    """For which it has host memory besides."""
    max_model_len: int
    vocab_size: int
    is_draining: bool = False
    """It ends what it has, and takes nothing new."""
    stats: WorkerStats = WorkerStats()


def worker_key(namespace: str, worker_id: str) -> str:
    return f"{namespace}:worker:{worker_id}"


def workers_key(namespace: str) -> str:
    """The set of worker ids that have a record or had one: lets a reader find all records without scanning the key space.

    A worker that leaves in order removes its id; one whose lease ran out stays listed, until a reader drops it.
    """
    return f"{namespace}:workers"


def write_probe_key(namespace: str) -> str:
    """Written by routers, to learn whether a record could be renewed."""
    return f"{namespace}:write_probe"


def blocks_key(namespace: str, worker_id: str, incarnation: int) -> str:
    """What one incarnation of a worker holds: block hash -> tier (see cache/redis_prefix_index.py)."""
    return f"{namespace}:block_tiers:{worker_id}:{incarnation}"


def parse_record(value: bytes | str) -> WorkerRecord | None:
    """The record in `value`, or None when it is not one: a foreign key must not stop the reader."""
    try:
        return WorkerRecord.model_validate_json(value)
    except ValidationError:
        return None
