"""What the sampling kernels need to know of a row, as one row of integers, so that a batch goes to a device in one copy.

Floating point parameters are rounded here, once, on the host: no device computes a logarithm or a quotient of its own.
"""

from __future__ import annotations

import math
import struct

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy."""
NUM_COLUMNS = 7
SCALE, MAX_LEVEL, TOP_K, TOP_P, SEED, SEQUENCE_INDEX, POSITION = range(NUM_COLUMNS)
LEVELS_PER_OCTAVE = 1 << 23
"""A level is 2^-23 octaves (halvings) of probability below the best token."""
TOP_P_OFF = 1 << 31
MAX_LEVEL_OFF = (1 << 32) - 1
_MIN_SCALE = 2.0**-100
_MIN_MIN_P = 2.0**-64
_MASK = (1 << 64) - 1


def row_parameters(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, sequence_index: int = 0, position: int = 0
) -> list[int]:
    """One row of the int64 [num_rows, NUM_COLUMNS] tensor that `sample_tokens` takes.

    Off values: top_k <= 0, top_p >= 1, min_p <= 0. `position` counts the tokens generated before this one; it may be raised on the device.
    """
    is_greedy = temperature < GREEDY_TEMPERATURE
    scale = 0.0 if is_greedy else max(math.log2(math.e) / temperature * LEVELS_PER_OCTAVE, _MIN_SCALE)
    # No level reaches 2^29; a limit past that would not fit the 32 bits that kernels give it.
    max_level = MAX_LEVEL_OFF if min_p <= _MIN_MIN_P else max(0, math.floor(-math.log2(min_p) * LEVELS_PER_OCTAVE))
    share = TOP_P_OFF if top_p >= 1.0 else max(1, round(top_p * TOP_P_OFF))
    return [
        struct.unpack("<I", struct.pack("<f", scale))[0],
        max_level,
        min(max(top_k, 0), (1 << 31) - 1),
        share,
        _signed(seed),
        sequence_index,
        position,
    ]


def _signed(seed: int) -> int:
    low = seed & _MASK
    return low - (1 << 64) if low >> 63 else low
