"""The end of a transfer that decode waits for: broken, or wanted by nobody any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from decode_harness import DecodeHarness
from tiny_models import write_tiny_hf

from shared.ids import new_transfer_id
from shared.model_files.model_source import ModelSource, resolve_model


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    write_tiny_hf(tmp_path)
    return resolve_model(str(tmp_path))


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_prefill_was_told_to_forget_is_not_made_good(source: ModelSource, is_cancelled: bool) -> None:
    """A client that leaves is an abort at both workers, and prefill may tell decode before the router does."""
    transfer_id = new_transfer_id()
    with DecodeHarness(source) as decode:
        decode.submit("r", [5] * 9, transfer_id=transfer_id, max_tokens=2, ignore_eos=True)
        decode.turn()
        decode.worker.on_failed(transfer_id, "aborted by the prefill worker: the router no longer waits for it", is_cancelled)
        decode.run()
        counters = decode.worker.service_counters()
        made_good = 0 if is_cancelled else 1
        assert (counters["kv_recompute_fallbacks"], counters["kv_transfer_failures"]) == (made_good, made_good)
        assert counters["local_prompt_tokens"] == 9 * made_good
        assert decode.num_used == 0
        assert [failure.retryable for failure in decode.failures()] == [True] * is_cancelled, "a router that waits all the same tries again"
