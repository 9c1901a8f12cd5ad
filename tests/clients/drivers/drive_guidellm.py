"""guidellm: chat and completions streamed at a fixed concurrency, and a run that finds the model's name by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 8
OUTPUT_TOKENS = 12
PROMPT_TOKENS = 40
GUIDELLM = str(Path(sys.executable).parent / "guidellm")


def benchmark(base_url: str, tokenizer: str, name: str, backend: str) -> dict[str, Any]:
    report = Path.cwd() / f"{name}.json"
    command = [
        GUIDELLM, "run", "--backend", f"kind=openai_http,target={base_url},{backend}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--output", f"kind=json,path={report}", "--disable-console-interactive",
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    (result,) = json.loads(report.read_text())["benchmarks"]
    return dict(result)


def check(result: dict[str, Any]) -> None:
    # Not metrics.request_totals: the last request is left out there if it ended when guidellm's time of measuring did.
    totals, failed = result["scheduler_metrics"]["requests_made"], [*result["requests"]["errored"], *result["requests"]["incomplete"]]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}, (totals, failed)
    assert len(result["requests"]["successful"]) >= NUM_REQUESTS - 2
    for request in result["requests"]["successful"]:
        assert request["output"].strip(), request
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, request
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, request
        # One chunk a token, then the usage and the end: none before the first token, so times measured here are times of tokens.
        assert request["info"]["timings"]["request_iterations"] == OUTPUT_TOKENS + 2, request


def main(base_url: str, model: str, tokenizer: str) -> None:
    check(benchmark(base_url, tokenizer, "chat", f"model={model},request_format=/v1/chat/completions"))
    print(f"guidellm: {NUM_REQUESTS} streamed chat requests work", flush=True)
    check(benchmark(base_url, tokenizer, "completions", "request_format=/v1/completions"))
    print(f"guidellm: {NUM_REQUESTS} streamed completions of the model it found work")


if __name__ == "__main__":
    main(*sys.argv[1:4])
