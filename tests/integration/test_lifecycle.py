"""`pagewire up` as a user meets it: ready quickly, ends clean, restarts what dies, and says in one line why it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
from local_stack import CNT, ROOT, LocalStack, is_alive
from lost_time import LostTime
from tiny_models import tiny_hf_config, tiny_tokenizer_json

from services.local.ports import free_port
from shared.available_memory import available_memory_bytes

CNT_START = [216, 38, 28]


def run_up(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEWIRE_", "REDIS_"))}
    command = [sys.executable, "-m", "services.cli", "up", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**inherited, **environ}, capture_output=True, text=True, timeout=240, check=False)


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]


def test_a_killed_worker_is_restarted_and_ctrl_c_ends_everything_within_five_seconds_and_leaves_nothing() -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    with LocalStack() as running:
        assert running.tokens(CNT, 3) == CNT_START
        for name in ("decode-0", "prefill-0"):
            os.kill(running.pids[name], signal.SIGKILL)
            event = running.next_event("restarted")
            assert (event["child"], event["ending"]) == (name, "killed by SIGKILL")
            deadline_s = time.monotonic() + 120
            while True:
                try:
                    assert running.tokens(CNT, 3) == CNT_START
                    break
                except urllib.error.HTTPError as error:
                    assert error.code in (502, 503)
                    assert time.monotonic() < deadline_s
                    time.sleep(0.2)
        running.wait_until_idle()
        pids = {name: running.pid(name) for name in running.pids}
        with LostTime() as lost:
            assert running.stop() < 5 + lost.so_far_s
        assert running.process.returncode == 0
        assert [name for name, pid in pids.items() if is_alive(pid)] == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", running.port)) != 0
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_only_the_router_gets_the_api_keys_and_children_end_when_the_launcher_is_killed() -> None:
    with LocalStack(api_keys="sesame", router_api_keys="open") as running:
        environs = {name: Path(f"/proc/{pid}/environ").read_bytes() for name, pid in running.pids.items()}
        assert {name for name, environ in environs.items() if b"API_KEYS" in environ} == {"router"}
        assert b"PAGEWIRE_API_KEYS=open\0" in environs["router"]
        assert b"sesame" not in environs["router"]
        running.process.kill()
        running.wait_until(
            lambda: not any(is_alive(pid) for pid in running.pids.values()),
            describe=lambda: [name for name, pid in running.pids.items() if is_alive(pid)],
        )


def test_a_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_clear_line(run_up("--port", str(port)), str(port), "--port")


def test_a_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    assert_one_clear_line(run_up("--port", str(free_port()), "--model", str(tmp_path / "nothing.gguf")), "nothing.gguf")


def test_roles_that_disagree_on_the_rotary_embedding_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {**tiny_hf_config(), "architectures": ["Phi3ForCausalLM"], "rope_scaling": rope, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))
    arguments = ("--port", str(free_port()), "--model", str(tmp_path), "--load-format", "dummy")
    assert_one_clear_line(run_up(*arguments, PAGEWIRE_DECODE_MAX_MODEL_LEN="64"), "max_model_len", "original context")


def test_a_model_too_large_for_memory_is_one_line_and_exit_code_2() -> None:
    assert_one_clear_line(run_up("--port", str(free_port()), PAGEWIRE_KV_CACHE_GIB="4000"), "MiB", "PAGEWIRE_KV_CACHE_GIB")
    assert_one_clear_line(run_up("--port", str(free_port()), "--kv-host-cache-gib", "4000"), "MiB", "PAGEWIRE_KV_HOST_CACHE_GIB")


def test_each_rank_of_a_worker_has_a_kv_cache_of_its_own() -> None:
    available = available_memory_bytes()
    if available is None:
        pytest.skip("this machine does not say how much memory is free")
    arguments = ("--port", str(free_port()), "--aggregated", "--tensor-parallel", "3")
    assert_one_clear_line(run_up(*arguments, PAGEWIRE_KV_CACHE_GIB=str(available / 2 / (1 << 30))), "MiB", "PAGEWIRE_KV_CACHE_GIB")


def test_a_model_that_does_not_divide_among_ranks_is_one_line_and_exit_code_2() -> None:
    arguments = ("--port", str(free_port()), "--tensor-parallel", "3")
    assert_one_clear_line(run_up(*arguments, PAGEWIRE_DECODE_TENSOR_PARALLEL_SIZE="2"), "9 query heads", "divisor")


def test_a_redis_that_does_not_answer_is_one_line_and_exit_code_2() -> None:
    assert_one_clear_line(run_up("--port", str(free_port()), "--redis", f"redis://127.0.0.1:{free_port()}/0"), "Redis")


@pytest.mark.parametrize(("name", "value"), [("PAGEWIRE_BLOCK_SIZE", "none"), ("PAGEWIRE_MAX_STEP_MS", "-1"), ("PAGEWIRE_PORT", "70000")])
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    assert_one_clear_line(run_up(**{name: value}), name.removeprefix("PAGEWIRE_").lower(), value)
