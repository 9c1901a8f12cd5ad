"""Every setting, its default and its unit. The environment is read here, once, at start; the result is frozen.

PAGEWIRE_<NAME> sets a field for every service, PAGEWIRE_<ROLE>_<NAME> for one role (PAGEWIRE_DECODE_NUM_BLOCKS=64).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from shared.errors import ConfigurationError

Role = Literal["router", "prefill", "decode"]
Device = Annotated[str, Field(pattern=r"^(cpu|(auto|cuda)(:\d{1,3})?)$")]
CPU_KV_CACHE_GIB = 2.0
"""Of a worker on a CPU that is told neither kv_cache_gib nor num_blocks."""


class Settings(BaseModel):
    """Settings of one service."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # What is served
    model: str = Field("smollm2", description="'smollm2' (packaged), a .gguf file, a Hugging Face directory, or a Hub id")
    served_model_name: str | None = Field(None, description="name in the API; default: derived from the model")
    max_model_len: int | None = Field(None, ge=2, description="prompt + output tokens; default: the model's own limit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: float32 on a CPU, bfloat16 on a GPU")
    device: Device = Field(
        "auto", description="auto: cuda where there is a GPU that can run the model; cuda:N, auto:N: that GPU, one of CUDA_VISIBLE_DEVICES"
    )
    num_gpu_workers: int = Field(
        1, ge=1, description="worker: how many share its GPU, each with an equal part of the memory; `pagewire up` tells each"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights for a Hugging Face directory that has none, to measure speed"
    )
    cpu_weights: Literal["auto", "stored", "int16", "fp16", "fp32"] = Field(
        "auto",
        description="weights of an engine on a CPU. stored: as the model file has them; int16: and inputs of quantized ones rounded to "
        "16 bits, which is faster and moves logits by some 0.001; fp16: rounded to that; fp32; auto: stored",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="fp8: matrices of the layers as E4M3 with a factor for each output; a bf16 engine on a GPU of Hopper or later "
        "multiplies in FP8, others save memory alone",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="processes of a worker, on GPUs one for each, that share each layer of the model"
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of a worker's engine; default: all cores it may use")

    # Where things are
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="also read from REDIS_URL")
    redis_namespace: str = Field("pagewire", description="prefix of every Redis key")
    host: str = Field("127.0.0.1", description="router: address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="router: port to listen on")
    api_keys: SecretStr | None = Field(None, description="router: keys that clients must send, separated by commas; default: none needed")
    api_keys_file: str | None = Field(None, description="router: a file with a key a line, besides or instead of api_keys")
    bind_host: str = Field("127.0.0.1", description="worker: address its ZeroMQ sockets bind to")
    advertise_host: str | None = Field(None, description="worker: host name others reach it by; default: bind_host")
    worker_id: str | None = Field(None, description="worker: stable name; default: role and host name")
    metrics_port: int = Field(0, ge=0, le=65535, description="worker: HTTP port for /metrics; 0 = none (the router shows all workers)")

    # KV cache
    block_size: int = Field(16, ge=1, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=2, description="KV blocks of a worker; default: from kv_cache_gib")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="size of a worker's KV cache when num_blocks is not set; default: 2 on a CPU, on a GPU what gpu_memory_utilization "
        "leaves for it",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="part of a GPU's memory that the workers on it take together: weights, activations, KV cache"
    )
    kv_host_cache_gib: float = Field(
        0.0, ge=0, description="host memory of a worker for blocks that its KV cache evicts; they come back by hash. 0 = none"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="how a KV cache holds keys and values. auto: in the engine's dtype; fp8, on a GPU: as E4M3 without a factor"
    )
    enable_prefix_caching: bool = True

    # Scheduling
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens in one step")
    long_prefill_token_threshold: int = Field(0, ge=0, description="cap on one request's chunk when others wait; 0 = off")
    max_num_seqs: int = Field(64, ge=1, description="requests in one step")
    async_scheduling: bool | None = Field(
        None, description="prepare decode steps while the one before runs, tokens read one step late; default: on a GPU"
    )
    enforce_eager: bool = Field(False, description="on a GPU: launch the kernels of decode steps one by one, without CUDA graphs")
    max_step_ms: float = Field(200.0, gt=0, description="time bound on one step; caps chunks by the measured speed")
    max_num_waiting: int = Field(1024, ge=1, description="worker: requests that may wait; more are refused")

    # Routing
    aggregated: bool = Field(False, description="router: no prefill workers; decode workers compute every prompt themselves")
    local_prefill_max_tokens: int = Field(16, ge=0, description="an uncached tail this short behind a cached prefix stays on decode")

    # KV transfer
    kv_transport: Literal["auto", "cuda", "shm", "ipc", "tcp"] = Field("auto", description="auto: the fastest that both ends can use")
    kv_key_file: str | None = Field(
        None, description="made by `pagewire keys`: a worker takes KV from workers that hold it, and from nobody else"
    )
    kv_lane_security: Literal["auto", "curve", "plain-trusted"] = Field(
        "auto",
        description="receiver: encrypt data lanes; auto: unless bind_host is this machine alone. Sender: curve sends over no other lanes. "
        "Control is encrypted always",
    )
    kv_wire_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="how KV values travel; fp8: as E4M3 with a scale each layer and block, at both ends; auto: unchanged"
    )
    kv_min_gb_per_s: float = Field(0.1, ge=0, description="receiver: a wire that is slower when probed is warned about")
    kv_lanes: int = Field(2, ge=1, le=4, description="data sockets from one worker to another")
    kv_max_chunk_bytes: int = Field(4 << 20, ge=4096, le=1 << 30)
    kv_layer_groups: int | None = Field(
        None, ge=1, description="prefill: parts of a step's layers that leave one by one; default: 8 on a GPU, 1 on a CPU"
    )
    kv_checksum_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where a worker on a GPU forms checksums; auto: there, unless it is the only one, which workers may share"
    )
    kv_staging_mib: int = Field(
        512, ge=32, description="on a GPU: pinned host memory for KV on its way out; 32 MiB, two chunks, is the least"
    )
    kv_port: int = Field(
        0, ge=0, le=65531, description="decode: port of KV control messages; data lanes take the kv_lanes ports after it. 0 = free ports"
    )
    kv_advertise_port: int = Field(
        0, ge=0, le=65531, description="decode: kv_port as others reach it, through a NAT or a proxy, lanes after it; 0 = kv_port"
    )
    kv_credits: int = Field(16, ge=1, le=1 << 16, description="chunks in flight per transfer")
    kv_peer_timeout_s: float = Field(1.5, gt=0.5, description="a peer of which nothing is heard for this long is dead")
    kv_progress_timeout_s: float = Field(10.0, gt=0, description="a transfer that a live peer neither goes on with nor renews has failed")
    kv_failure_policy: Literal["recompute", "fail"] = Field("recompute", description="decode: what to do when a transfer fails")

    # Lifecycle
    lease_s: float = Field(1.5, gt=0.1, description="a worker that has not renewed for this long is gone")
    request_timeout_s: float = Field(600.0, gt=0)
    drain_s: float = Field(
        8.0,
        ge=0,
        description="worker: how long the requests it has may go on after SIGTERM; new ones go elsewhere. A second one ends it at once",
    )
    max_num_requests: int = Field(1024, ge=1, description="router: requests in flight; more are answered 429")
    max_retries: int = Field(2, ge=0, description="router: other workers tried before the first token")
    debug: bool = Field(False, description="check the block invariants after every step")


def load_settings(role: Role | None, environ: Mapping[str, str] = os.environ, **overrides: Any) -> Settings:
    """Defaults < PAGEWIRE_<NAME> < PAGEWIRE_<ROLE>_<NAME> < overrides that are not None. ConfigurationError names a bad one."""
    values: dict[str, Any] = {}
    if environ.get("REDIS_URL"):
        values["redis_url"] = environ["REDIS_URL"]
    for name in Settings.model_fields:
        keys = [f"PAGEWIRE_{name.upper()}"] + ([f"PAGEWIRE_{role.upper()}_{name.upper()}"] if role else [])
        for key in keys:
            if environ.get(key, "") != "":
                values[name] = environ[key]
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        shown = "" if name == "api_keys" else f" = {values.get(name)!r}"
        raise ConfigurationError(f"setting {name}{shown}: {first['msg']}") from error
