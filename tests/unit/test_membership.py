from __future__ import annotations

from shared.membership import WorkerRecord, WorkerStats, blocks_key, parse_record, worker_key, workers_key

RECORD = WorkerRecord(
    worker_id="a", role="decode", incarnation=2**63, rpc_endpoint="tcp://h:1", kv_ctrl_endpoint="tcp://h:2", model_name="m",
    model_fingerprint="f", dtype="float32", block_size=16, num_blocks=8, max_model_len=32, vocab_size=64,
    stats=WorkerStats(num_running=3, counters={"x": 1.5}),
)  # fmt: skip


def test_record_survives_the_round_trip() -> None:
    assert parse_record(RECORD.model_dump_json()) == RECORD
    assert parse_record(RECORD.model_dump_json().encode()) == RECORD


def test_record_of_a_newer_version_is_read_and_a_foreign_value_is_not() -> None:
    assert parse_record(RECORD.model_dump_json()[:-1] + ',"new_field":1}') == RECORD
    for value in (b"", b"{}", b"\xff", "text", "[1]"):
        assert parse_record(value) is None


def test_keys_of_two_namespaces_never_meet() -> None:
    assert worker_key("n", "a") == "n:worker:a"
    assert workers_key("n") == "n:workers"
    assert blocks_key("n", "a", 7) == "n:block_tiers:a:7"
