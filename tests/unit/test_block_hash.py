"""Prefix-block hashes: the same everywhere, different whenever the KV would differ."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from shared.block_hash import encode_extra_keys, hash_block_tokens, hash_full_blocks, root_hash

ROOT = root_hash("fingerprint", "float32", 16)
IDS = ([504, 3575, 282, 4649, 314, 7042, 30, 198] * 8)[:64]


def test_chain_is_the_same_in_every_process_whatever_the_hash_seed() -> None:
    program = (
        "from shared.block_hash import *\n"
        "ids = ([504, 3575, 282, 4649, 314, 7042, 30, 198] * 8)[:64]\n"
        "print([h.hex() for h in hash_full_blocks(root_hash('fingerprint', 'float32', 16), ids, 16)])\n"
    )
    here = str([h.hex() for h in hash_full_blocks(ROOT, IDS, 16)])
    for seed in ("0", "1", "random"):
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert done.stdout.strip() == here, done.stderr


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hash_full_blocks(ROOT, IDS[:n], 16)) for n in (0, 15, 16, 17, 31, 32, 64)] == [0, 0, 1, 1, 1, 2, 4]


def test_a_known_head_is_continued_not_hashed_again() -> None:
    whole = hash_full_blocks(ROOT, IDS, 16)
    assert hash_full_blocks(ROOT, IDS, 16, known=whole[:2]) == whole


def test_salt_adapter_and_content_with_the_same_text_differ() -> None:
    keys = [encode_extra_keys(cache_salt="X"), encode_extra_keys(adapter_id="X"), encode_extra_keys(content_ids=["X"]), encode_extra_keys()]
    assert len({hash_block_tokens(ROOT, IDS[:16], key) for key in keys}) == 4


def test_empty_salt_means_no_salt() -> None:
    assert encode_extra_keys(cache_salt="") == encode_extra_keys(cache_salt=None) == b""


def test_tokens_cannot_be_joined_into_each_other() -> None:
    assert hash_block_tokens(ROOT, [1, 23]) != hash_block_tokens(ROOT, [12, 3])


def test_parent_and_root_enter_the_hash() -> None:
    other = root_hash("fingerprint", "bfloat16", 16)
    assert hash_block_tokens(ROOT, IDS[:16]) != hash_block_tokens(other, IDS[:16])
    assert root_hash("fingerprint", "float32", 32) != ROOT


def test_random_blocks_do_not_collide() -> None:
    rng = random.Random(1)
    seen = {hash_block_tokens(ROOT, [rng.randrange(49152) for _ in range(16)]) for _ in range(5_000)}
    assert len(seen) == 5_000
