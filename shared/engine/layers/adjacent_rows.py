"""Matrices that read the same input as one: as they stand in memory, where loading has put them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def joined_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of the rows of all; no copy where they lie one after the other, as loading leaves them."""
    first, size = parts[0], parts[0].shape[1]
    ends = accumulate((part.numel() for part in parts), initial=first.storage_offset())
    if all(
        part.is_contiguous() and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.storage_offset() == end
        for part, end in zip(parts, ends, strict=False)
    ):
        return first.as_strided((sum(len(part) for part in parts), size), (size, 1))
    return torch.cat(list(parts))
