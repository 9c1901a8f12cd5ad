"""The hidden state that goes with the commit."""

from __future__ import annotations

import pytest
import torch

from services.prefill.worker import hidden_state_bytes
from shared.engine.kv_cache import hidden_state_dtype, kv_dtype_name
from shared.transport.protocol.frames import KVDtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_read_back_as_the_same_row_in_every_dtype(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 64).to(dtype)
    for row in (hidden[1], hidden.T[5]):
        assert torch.equal(torch.frombuffer(bytearray(hidden_state_bytes(row, dtype)), dtype=dtype), row)


@pytest.mark.parametrize("kv_dtype", list(KVDtype))
def test_both_ends_know_its_type_from_that_of_the_kv(kv_dtype: KVDtype) -> None:
    """Which of FP8 says nothing: then no bit of either 16-bit type is lost."""
    dtype = hidden_state_dtype(kv_dtype)
    if kv_dtype.itemsize > 1:
        assert kv_dtype_name(dtype) == kv_dtype.name.lower()
        return
    for engine_dtype in (torch.bfloat16, torch.float16):
        hidden = torch.randn(64).to(engine_dtype)
        arrived = torch.frombuffer(bytearray(hidden_state_bytes(hidden, dtype)), dtype=dtype).to(engine_dtype)
        assert torch.equal(arrived, hidden)
