"""Counter-based random numbers: the draw for (seed, sequence index, position) is the same on any worker and in any batch.

Philox4x32-10 (Salmon et al. 2011), key = the seed's low 64 bits, counter = (position, sequence index).
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds; all words are u32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: int, sequence_index: int, position: int) -> int:
    """64 random bits. `position` counts generated tokens from 0. Any Python int is a valid seed: its low 64 bits count."""
    counter = (position & _MASK, position >> 32 & _MASK, sequence_index & _MASK, 0)
    words = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return words[0] << 32 | words[1]
