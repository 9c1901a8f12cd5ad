"""How a sender says where its KV cache stands in GPU memory, for a receiver of the same host (see engine/peer_device_memory.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DeviceMemoryOffer(BaseModel):
    """A CUDA IPC handle of the allocation and what part of it is meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    handle: str = Field(pattern=r"^[0-9a-f]{128}$")
    offset: int = Field(ge=0, lt=1 << 62)
    size_bytes: int = Field(ge=1, lt=1 << 62)
