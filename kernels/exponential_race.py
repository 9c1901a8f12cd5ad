"""The draw: every kept token runs for an exponential time, and the first to arrive is the token (Gumbel-max, in integers).

Token i takes E_i / weight_i, with E_i = -log2(1 - u_i) and u_i = (r_i + 1/2) / 2^32 from 32 random bits of its own. It wins with the
probability weight_i / total, and a small change of the logits changes the winner only where the two best arrive that close together:
logits differ in the last digits with a batch's shape, and a walk along cumulative weights would feel the sum of all those differences.

Times are compared by their logarithms, level_i + log2(E_i), in levels of 2^-23 octaves: integers, so that every device agrees. log2(E)
comes from one table that every path reads, in steps of 1/64 octave of u below one half and of 1 - u above, with a straight line between:
at most 5e-5 octaves off. That and the 32 bits change the probability of a token likelier than 2^-27 by less than 1e-4 of itself
(tests/kernels/test_exponential_race.py); one 39 octaves below the best cannot win.
"""

from __future__ import annotations

import functools
import math

import torch

from kernels.philox import TOKENS_PER_CALL, token_bits
from kernels.row_parameters import LEVELS_PER_OCTAVE

OUT = 1 << 30
"""The level of a token that a filter dropped: past every arrival."""
_ORIGIN_OCTAVES = 33
"""Added to every logarithm, so that none is negative: the least E is 2^-32.5."""
_SEGMENT_BITS = 6
_NUM_NODES = (26 << _SEGMENT_BITS) + 1


@functools.cache
def log_time_table(device: torch.device | None = None) -> torch.Tensor:
    """log2(E) + 33 octaves at the nodes of both halves of u: int32 [2, 1665], made once a device. Node 64 * e + m stands where
    s = m * 2^e; s is r in the first half and ~r in the second. No value lies near a rounding boundary: any libm gives the same table."""
    if device is not None:
        return log_time_table().to(device)
    shifts = [max(0, (node >> _SEGMENT_BITS) - 1) for node in range(_NUM_NODES)]
    shares = [((node - (shift << _SEGMENT_BITS) << shift) + 0.5) / 2**32 for node, shift in enumerate(shifts)]
    times = [[-math.log1p(-share) / math.log(2) for share in shares], [-math.log2(share) for share in shares]]
    return torch.tensor(
        [[round((math.log2(time) + _ORIGIN_OCTAVES) * LEVELS_PER_OCTAVE) for time in half] for half in times], dtype=torch.int32
    )


def log_times(bits: torch.Tensor) -> torch.Tensor:
    """log2(E) + 33 octaves, in levels, of 32 random bits each. int64 of any shape, like `bits`."""
    is_second = bits >> 31
    s = torch.where(is_second > 0, bits ^ 0xFFFFFFFF, bits)
    shift = (s.double().frexp().exponent.long() - _SEGMENT_BITS - 1).clamp_(min=0)
    node = is_second * _NUM_NODES + (shift << _SEGMENT_BITS) + (s >> shift)
    table = log_time_table().to(bits.device, torch.int64).flatten()
    start = table[node]
    return start + ((table[node + 1] - start) * (s - (s >> shift << shift)) >> shift)


def winners(levels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The token that arrives first in each row, ties by index; any token of a row where all are OUT. int64 [num_rows].

    levels: integers [num_rows, vocab_size], OUT for what may not win, 0 for the best. keys: int64 [num_rows, 3] of (seed, sequence index,
    position)."""
    num_rows, vocab_size = levels.shape
    padded = torch.nn.functional.pad(levels, (0, -vocab_size % TOKENS_PER_CALL), value=OUT).view(num_rows, -1, TOKENS_PER_CALL)
    is_in = padded.amin((0, 2)) < OUT
    is_in[0] = True  # a minimum needs something
    quads = is_in.nonzero()[:, 0]
    token_ids = (quads[:, None] * TOKENS_PER_CALL + torch.arange(TOKENS_PER_CALL, device=levels.device)).flatten()
    arrivals = padded[:, quads].flatten(1) + log_times(token_bits(keys, quads))
    return (arrivals << 32 | token_ids).amin(-1) & 0xFFFFFFFF
