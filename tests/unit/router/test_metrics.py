from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from services.router.metrics import TokenHistogram
from shared.telemetry import TPOT_BUCKETS


def test_a_token_histogram_shows_what_one_of_the_library_shows() -> None:
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = TokenHistogram("vllm:gap_seconds", "A gap", TPOT_BUCKETS, "m")
    ours.register(histogram)
    reference = Histogram("vllm:gap_seconds", "A gap", ["model_name"], registry=theirs, buckets=TPOT_BUCKETS).labels("m")
    assert generate_latest(ours) == generate_latest(theirs)
    for value in (0.0, 0.0005, 0.00050001, 0.004, 0.004, 1, 79.9, 80, 81, 1e9):
        histogram.observe(value)
        reference.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
