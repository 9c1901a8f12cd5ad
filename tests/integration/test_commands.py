"""The `pagewire` command beside `up`: complete, doctor, export-tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from local_stack import ROOT, LocalStack
from tokenizers import Tokenizer

from kernels import build
from kernels.cpu_attention import library
from services.local.doctor import run_checks
from services.local.ports import free_port
from shared.model_files.hf_tokenizer import tokenizer_from_hf
from shared.model_files.model_source import resolve_model


def pagewire(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEWIRE_", "REDIS_"))}
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_what_each_worker_computes_on_is_said(stack: LocalStack) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert stack.devices["prefill-0"] == device
    with urllib.request.urlopen(stack.url + "/ready", timeout=60) as response:
        workers = json.load(response)["workers"]
    assert {worker["worker_id"]: (worker["device"], worker["num_blocks"]) for worker in workers} == {
        name: (device, 640) for name, device in stack.devices.items()
    }


def test_a_device_that_is_none_is_refused_in_a_line() -> None:
    done = pagewire("up", "--device", "tpu", "--port", str(free_port()))
    assert done.returncode == 2
    assert "device" in done.stderr and len(done.stderr.splitlines()) == 1


def test_complete_streams_the_answer(stack: LocalStack) -> None:
    done = pagewire("complete", "1, 2, 3, 4, 5,", "--url", stack.url, "--max-tokens", "24")
    assert (done.returncode, done.stdout) == (0, " 6, 7, 8, 9, 10, 11, 12,\n")


def test_complete_as_json_ends_with_the_usage(stack: LocalStack) -> None:
    done = pagewire("complete", "What is the capital of France?", "--chat", "--json", "--url", stack.url, "--max-tokens", "24")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert "Paris" in "".join(event.get("text", "") for event in events)
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_complete_without_a_server_says_what_to_do() -> None:
    done = pagewire("complete", "x", "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "pagewire up" in done.stderr and len(done.stderr.splitlines()) == 1


def test_complete_passes_on_the_servers_words(stack: LocalStack) -> None:
    done = pagewire("complete", "x", "--url", stack.url, "--max-tokens", "100000")
    assert done.returncode == 1
    assert "8192" in done.stderr


def test_doctor_finds_this_machine_fit() -> None:
    done = pagewire("doctor", "--json", "--port", str(free_port()))
    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout
    assert set(checks) == {"python", "torch", "gpu", "kernels", "redis", "port", "shared memory", "memory", "model"}
    assert "redis" in pagewire("doctor", "--port", str(free_port())).stdout


def test_doctor_counts_only_kernels_that_this_processor_would_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "find_cxx", lambda: None)
    (tmp_path / "cpu_attention-0123.so").write_bytes(b"of other sources")
    assert {check.name: check.status for check in run_checks("smollm2", free_port())}["kernels"] == "warn"
    (tmp_path / build.library_name(library(torch.float32, 64), build.cpu_targets()[0])).write_bytes(b"")
    assert {check.name: check.status for check in run_checks("smollm2", free_port())}["kernels"] == "ok"


def test_doctor_says_what_is_wrong(stack: LocalStack, tmp_path: Path) -> None:
    done = pagewire("doctor", "--json", "--port", str(stack.port), "--model", str(tmp_path / "none.gguf"))
    failed = {check["name"]: check for check in map(json.loads, done.stdout.splitlines()) if check["status"] == "fail"}
    assert done.returncode == 1
    assert set(failed) == {"port", "model"} and all(check["advice"] for check in failed.values())


def test_exported_tokenizer_is_readable_by_client_tools(tmp_path: Path) -> None:
    assert pagewire("export-tokenizer", str(tmp_path)).returncode == 0
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(os.listdir(tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("1, 2, 3, 4, 5,").ids[:3] == [33, 28, 216]


def test_exported_tokenizer_is_the_same_tokenizer(tmp_path: Path) -> None:
    source = resolve_model("smollm2")
    tokenizer = source.load_tokenizer()
    tokenizer.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    again = tokenizer_from_hf(tmp_path / "out", tuple(config["eos_token_id"]))
    for text in ("12345", " café\n\n🦙", "<|im_start|>user\nhi<|im_end|>"):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == source.chat_template
    assert (again.bos_token_id, again.eos_token_ids, again.add_bos) == (1, (2,), False)


def test_prefill_workers_and_aggregated_mode_exclude_each_other() -> None:
    done = pagewire("up", "--aggregated", "--prefill", "2", "--port", str(free_port()))
    assert done.returncode == 2
    assert "--prefill" in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_empty_api_key_is_refused_and_does_not_open_the_server() -> None:
    done = pagewire("up", "--api-key", "", "--port", str(free_port()))
    assert done.returncode == 2
    assert "--api-key is empty" in done.stderr
