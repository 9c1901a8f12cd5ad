"""The hidden state that goes with the commit."""

from __future__ import annotations

import pytest
import torch

from services.prefill.worker import hidden_state_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_read_back_as_the_same_row_in_every_dtype(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 64).to(dtype)
    for row in (hidden[1], hidden.T[5]):
        assert torch.equal(torch.frombuffer(bytearray(hidden_state_bytes(row)), dtype=dtype), row)
