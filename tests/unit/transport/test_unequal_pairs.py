"""KV between workers that differ in block size, tensor-parallel degree or number format, on the in-memory twin."""

import random
from itertools import product

import numpy as np
import pytest
from kv_transfer_pairs import SETTINGS, TRANSFER
from tensor_parallel_pairs import HEADS, Ranks

from shared.transport.protocol.frames import KVDtype
from shared.transport.simulated_network import FaultPlan

FAULTS = FaultPlan(0.03, 0.05, 0.03, 0.02, 0.05, 0.02, 0.0001, 0.02)


@pytest.mark.parametrize(("src_block", "dst_block"), [(4, 16), (16, 4), (4, 4), (8, 2)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 45])
def test_block_sizes_may_differ_when_one_divides_the_other(src_block, dst_block, num_tokens):
    ranks = Ranks(num_tokens, src_block, dst_block)
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.infos[TRANSFER].num_bytes == ranks.truth.nbytes, "no token travels twice, and none that is not there"


def test_of_unequal_blocks_only_the_missing_ones_are_written():
    ranks = Ranks(45, 4, 16)
    ranks.start(missing=[1])
    ranks.run()
    arrived = ranks.arrived()
    assert np.array_equal(arrived[:, :, :, 16:32], ranks.truth[:, :, :, 16:32])
    assert not arrived[:, :, :, :16].any()
    assert not arrived[:, :, :, 32:].any()


@pytest.mark.parametrize(("src_tp", "dst_tp"), [pair for pair in product([1, 2, 4, 8], repeat=2) if pair != (1, 1)])
def test_tensor_parallel_degrees_may_differ(src_tp, dst_tp):
    ranks = Ranks(13, 4, 4, src_tp, dst_tp)
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.hidden == {TRANSFER: b"hidden"}
    total = ranks.truth.nbytes * max(1, dst_tp // HEADS)
    assert sum(receiver.counters()["bytes_received"] for receiver in ranks.receivers) == total, "exactly once to each that holds it"


@pytest.mark.parametrize("seed", range(30))
def test_everything_at_once_under_faults_is_exact_or_fails_as_a_whole(seed):
    draw = random.Random(seed)
    blocks = draw.choice([(4, 8), (8, 4), (16, 2), (4, 4)])
    ranks = Ranks(draw.randint(1, 40), *blocks, draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), FAULTS, seed)
    ranks.start()
    ranks.run(80)
    assert list(ranks.log.ended) == [TRANSFER]
    assert len(ranks.log.ended[TRANSFER]) == 1
    assert ranks.log.ended[TRANSFER] != [None] or ranks.is_exact
    assert all(len(log.ended[TRANSFER]) == 1 for log in ranks.sender_logs if log.ended)
    assert not any(sender.num_transfers for sender, _ in ranks.senders)


def test_half_precision_arrives_in_a_single_precision_cache_exactly():
    ranks = Ranks(21, 8, 4, dtypes=(KVDtype.FLOAT16, KVDtype.FLOAT32))
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    assert ranks.is_exact
    assert ranks.log.infos[TRANSFER].num_bytes == ranks.truth.nbytes, "the narrower format travels"


def test_fp8_on_the_wire_when_both_ends_ask_for_it():
    ranks = Ranks(21, 8, 4, kv_wire_dtype="fp8")
    ranks.start()
    ranks.run()
    assert ranks.log.ended == {TRANSFER: [None]}
    error = np.abs(ranks.arrived() - ranks.truth)
    assert (error <= np.abs(ranks.truth) / 16 + 3e-5).all()
    assert error.any()
    assert ranks.log.infos[TRANSFER].num_bytes < ranks.truth.nbytes * 0.3


def test_a_cast_that_loses_and_was_not_asked_for_is_refused_and_the_field_named():
    ranks = Ranks(16, 4, 4, dtypes=(KVDtype.FLOAT32, KVDtype.FLOAT16))
    ranks.start()
    ranks.network.run(1.0)
    assert "dtype" in ranks.sender_logs[0].ended[TRANSFER][0]


def test_a_rank_that_never_offers_fails_the_group_though_the_others_are_alive():
    ranks = Ranks(20, 4, 4, src_tp=2)
    ranks.network.kill("prefill-1")
    ranks.start()
    ranks.run(SETTINGS.kv_progress_timeout_s + 0.5)
    (reason,) = ranks.log.ended[TRANSFER]
    assert "ranks [1]" in reason
    assert ranks.sender_logs[0].ended[TRANSFER][0] is not None
