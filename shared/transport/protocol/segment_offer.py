"""How a sender says where its KV cache can be read by another process of the host (see wires/shared_segment.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SegmentOffer(BaseModel):
    """Where a segment is found. The nonce stands behind its last byte: who reads it there has found this one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    pid: int = Field(ge=1, lt=1 << 31)
    fd: int = Field(ge=0, lt=1 << 31)
    size_bytes: int = Field(ge=1, lt=1 << 62)
    nonce: str = Field(pattern=r"^[0-9a-f]{64}$")
