"""Prefix-block hashes: H_i = blake2b-128(H_{i-1} | tokens of block i | extra keys), the same in every process and run.

The root covers what makes KV bytes interchangeable (model, dtype, block size, format version), so equal hashes mean equal KV.
Tokens enter as fixed-width little-endian u32: [1, 23] and [12, 3] differ. Extra keys are tagged and length-prefixed: a
cache_salt "X" and an adapter "X" differ. cache_salt None and "" are the same: no salt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
HASH_SIZE_BYTES = 16
_FORMAT = b"pagewire-kv-1"


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<I", len(value)) + value


def root_hash(model_fingerprint: str, dtype: str, block_size: int) -> BlockHash:
    """The parent of every first block."""
    digest = hashlib.blake2b(digest_size=HASH_SIZE_BYTES)
    for tag, value in ((b"v", _FORMAT), (b"m", model_fingerprint.encode()), (b"d", dtype.encode()), (b"b", str(block_size).encode())):
        digest.update(_field(tag, value))
    return BlockHash(digest.digest())


def encode_extra_keys(cache_salt: str | None = None, adapter_id: str | None = None, content_ids: Iterable[str] = ()) -> bytes:
    """Canonical bytes of what else the KV of a block depends on; empty when nothing does."""
    encoded = b""
    if cache_salt:
        encoded += _field(b"s", cache_salt.encode())
    if adapter_id:
        encoded += _field(b"a", adapter_id.encode())
    for content_id in content_ids:
        encoded += _field(b"c", content_id.encode())
    return encoded


def hash_block_tokens(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
    """`token_ids`: the tokens of one full block, each 0 <= id < 2^32."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(hashlib.blake2b(parent + packed + extra_keys, digest_size=HASH_SIZE_BYTES).digest())


def hash_full_blocks(
    root: BlockHash, token_ids: Sequence[int], block_size: int, extra_keys: bytes = b"", known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """The chain of all full blocks of `token_ids`; `known` is an already computed head of it, which is not hashed again."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block_tokens(parent, token_ids[start : start + block_size], extra_keys)
        hashes.append(parent)
    return hashes
