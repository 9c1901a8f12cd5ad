"""The `llm` command, told of the server by its extra-openai-models.yaml: chat, completion, no stream, an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LLM = str(Path(sys.executable).parent / "llm")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LLM_USER_PATH": str(folder)}
    return subprocess.run([LLM, *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)


def ask(folder: Path, *arguments: str) -> str:
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), arguments
    return done.stdout.rstrip("\n")


def main(base_url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = [
            {"model_id": "served", "model_name": model, "api_base": f"{base_url}/v1"},
            {"model_id": "served-completion", "model_name": model, "api_base": f"{base_url}/v1", "completion": True},
            {"model_id": "missing", "model_name": "no-such-model", "api_base": f"{base_url}/v1"},
        ]
        (folder / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML
        question = ("What is the capital of France?", "-s", "Be brief.", "-o", "temperature", "0", "-o", "max_tokens", "12")

        streamed = ask(folder, "-m", "served", *question)
        log = json.loads(ask(folder, "logs", "list", "-n", "1", "--json"))[0]
        assert log["input_tokens"] > 0 and 0 < log["output_tokens"] <= 12, log
        print("llm: a streamed prompt works", flush=True)

        assert ask(folder, "-m", "served", "--no-stream", *question) == streamed
        log = json.loads(ask(folder, "logs", "list", "-n", "1", "--json"))[0]
        assert log["input_tokens"] > 0 and 0 < log["output_tokens"] <= 12, log
        print("llm: --no-stream works", flush=True)

        assert ask(folder, "-c", "And of Spain?", "-o", "max_tokens", "8")
        assert ask(folder, "-m", "served-completion", "1, 2, 3, 4, 5,", "-o", "temperature", "0", "-o", "max_tokens", "8").startswith(
            " 6, 7"
        )
        print("llm: a conversation and a completion work", flush=True)

        failed = run(folder, "-m", "missing", "hi")
        assert failed.returncode != 0
        assert "no-such-model" in failed.stderr and "Traceback" not in failed.stderr, failed.stderr[-2000:]
        print("llm: an error is shown")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
