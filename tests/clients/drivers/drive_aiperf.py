"""aiperf: a streamed chat run with usage on every chunk and a streamed completion run; it scrapes /metrics beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 8
OUTPUT_TOKENS = 12
PROMPT_TOKENS = 40
AIPERF = str(Path(sys.executable).parent / "aiperf")


def profile(base_url: str, model: str, tokenizer: str, endpoint: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs it and returns its report and what it read from /metrics. HF_HUB_OFFLINE must not be set: aiperf then refuses a folder."""
    folder = Path.cwd() / endpoint
    command = [
        AIPERF, "profile", "--model", model, "--url", base_url, "--endpoint-type", endpoint, "--streaming", "--tokenizer", tokenizer,
        "--ui", "none", "--no-gpu-telemetry", "--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--random-seed", "1",
        "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true",
        "--output-artifact-dir", str(folder), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    return report, json.loads((folder / "server_metrics_export.json").read_text())


def check(report: dict[str, Any], scraped: dict[str, Any]) -> None:
    def average(name: str) -> float:
        return float(report[name]["avg"])

    assert report["is_complete"] and not report["was_cancelled"]
    assert report["error_summary"] == []
    assert average("request_error_rate") == 0
    assert average("completed_request_count") == average("request_count") == NUM_REQUESTS
    assert average("usage_completion_tokens") == OUTPUT_TOKENS
    assert average("total_usage_total_tokens") == average("total_usage_prompt_tokens") + NUM_REQUESTS * OUTPUT_TOKENS
    assert 0 < average("time_to_first_token") < average("request_latency")
    assert average("inter_token_latency") > 0
    assert scraped["summary"]["endpoints_successful"] == scraped["summary"]["endpoints_configured"] != []
    assert any(name.startswith("vllm:") for name in scraped["metrics"])


def main(base_url: str, model: str, tokenizer: str) -> None:
    report, scraped = profile(base_url, model, tokenizer, "chat", "--use-server-token-count", "--per-chunk-usage")
    check(report, scraped)
    print(f"aiperf: {NUM_REQUESTS} streamed chat requests with usage on every chunk work", flush=True)

    report, scraped = profile(base_url, model, tokenizer, "completions")
    check(report, scraped)
    # Counted by aiperf itself, with the exported tokenizer. Generated text may be written in fewer tokens than it was generated in.
    assert report["input_sequence_length"]["avg"] == report["usage_prompt_tokens"]["avg"] == PROMPT_TOKENS
    assert abs(report["output_sequence_length"]["avg"] - OUTPUT_TOKENS) <= 1, report["output_sequence_length"]
    print(f"aiperf: {NUM_REQUESTS} streamed completions work")


if __name__ == "__main__":
    main(*sys.argv[1:4])
