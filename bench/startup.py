"""From command to ready: how long `pagewire up` takes with random weights, and where the time goes.

    python bench/startup.py [--shape llama-8b | --model DIR] [--repeat 3] [-- further arguments of `pagewire up`]

--shape writes a Hugging Face directory without weights, with the packaged model's tokenizer; --model names one. The first run may compile
kernels; the others find them in the cache, as every later start does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip
PHASE = re.compile(r"^\S+ \S+ (\w+) DEBUG \S+ start-up: (.+) took ([\d.]+) s$")
TIMEOUT_S = 900.0


@dataclass
class Start:
    """Seconds."""

    until_workers_s: float = 0.0
    """From the command until all processes had been started."""
    until_ready_s: float = 0.0
    phases: dict[tuple[str, str], float] = field(default_factory=dict)
    """(role, name): of the worker that took longest over it."""


def write_model(shape: str, directory: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "export-tokenizer", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (directory / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))  # in the place of the tokenizer's own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: str, arguments: list[str]) -> Start:
    """One run of the command, stopped when it is ready. Raises RuntimeError with what it said when it does not get there."""
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--model", model, "--load-format", "dummy", "--port", str(free_port())]
    with tempfile.TemporaryFile("w+") as log:
        start_s = time.monotonic()
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, "PAGEWIRE_LOG_LEVEL": "debug"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        found = Start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                now_s = time.monotonic() - start_s
                event = json.loads(line)["event"]
                if event == "loading":
                    found.until_workers_s = now_s
                if event == "ready":
                    found.until_ready_s = now_s
                    break
                if now_s > TIMEOUT_S:
                    break
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
        log.seek(0)
        said = log.read()
    if not found.until_ready_s:
        raise RuntimeError(f"it did not become ready:\n{said[-4000:]}")
    for line in said.splitlines():
        if match := PHASE.match(line):
            key, seconds = (match[1], match[2]), float(match[3])
            found.phases[key] = max(seconds, found.phases.get(key, 0.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--model", help="a Hugging Face directory, in the place of a shape")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="for `pagewire up`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            write_model(options.shape, Path(folder))
        starts = [start(options.model or folder, options.arguments) for _ in range(options.repeat)]
    print("| part | " + " | ".join(f"start {number}, s" for number in range(1, len(starts) + 1)) + " |")
    print("|---" * (len(starts) + 1) + "|")
    row("command until processes are started", [one.until_workers_s for one in starts])
    for role, name in sorted({key for one in starts for key in one.phases}, key=lambda key: key[0]):
        row(f"{role}: {name}", [one.phases.get((role, name), 0.0) for one in starts])
    row("command until ready", [one.until_ready_s for one in starts])
    print(f"median {median(one.until_ready_s for one in starts):.2f} s")


def row(name: str, seconds: list[float]) -> None:
    print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in seconds) + " |", flush=True)


if __name__ == "__main__":
    main()
