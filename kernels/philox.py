"""Counter-based random numbers: the bits of (seed, sequence index, position, token) are the same on any worker and in any batch.

Philox4x32-10 (Salmon et al. 2011), key = the seed's low 64 bits, counter = (position, sequence index, token id / 4).
"""

from __future__ import annotations

import torch

TOKENS_PER_CALL = 4
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds over four words of counter and two of key, each a u32 in an int64 tensor of any shape that broadcasts."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # past 2^63 they wrap; the bits are right
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def token_bits(keys: torch.Tensor, quads: torch.Tensor) -> torch.Tensor:
    """32 random bits for each of the tokens 4q .. 4q + 3 of every q in `quads`. int64 [num_rows, 4 * len(quads)].

    keys: int64 [num_rows, 3], (seed, sequence index, position) each; position counts generated tokens from 0. quads: int64 [n]."""
    seed, sequence_index, position = (keys[:, column, None] for column in range(3))
    counter = (position & _MASK, (position >> 32) & _MASK, sequence_index & _MASK, quads)
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(words, -1).flatten(-2)
