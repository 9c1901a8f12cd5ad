"""The engine on the CPU in one process: decode at several batch sizes and prefill, for each way to hold weights, beside transformers.

python bench/cpu_engine.py [--batches 1,4,16] [--weights stored,fp32] [--no-transformers]

transformers: in fp32, where it is installed; random weights of the shape.

For a processor without AVX-512: `python -m kernels.build --arch none --cpu x86-64-v3` first (delete kernels/prebuilt afterwards), and
MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 for torch's kernels. Turns of all variants alternate.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a worker

import torch

from kernels import sampling
from shared.available_cpus import available_cpus
from shared.batch import ScheduledRequest, SchedulerOutput
from shared.config import load_settings
from shared.engine.engine_core import EngineCore
from shared.freed_memory import keep_freed_memory
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request

CONTEXT, STEPS, PROMPT = 32, 12, 1024
CHUNK = 128
"""Tokens of a step of a prompt: what the scheduler takes at once on such a machine. Transformers takes the prompt in one."""


def prompt(num_tokens: int, seed: int) -> list[int]:
    return [(13 * i + 31 * seed) % 4000 + 100 for i in range(num_tokens)]


class Ours:
    def __init__(self, source: ModelSource, cpu_weights: str) -> None:
        settings = load_settings("decode", cpu_weights=cpu_weights, kv_cache_gib=0.5, enable_prefix_caching=False)
        self._engine = EngineCore(source, settings, lambda *_: None, lambda *_: None)

    def prefill(self) -> float:
        """Seconds."""
        request = self._reserve(0, PROMPT)
        start_s = time.perf_counter()
        for start in range(0, PROMPT, CHUNK):
            self._step([ScheduledRequest(request, start, CHUNK)])
        elapsed_s = time.perf_counter() - start_s
        self._engine.manager.free(request.request_id)
        return elapsed_s

    def decode(self, batch: int) -> float:
        """Seconds a step, sampling included."""
        requests = [self._reserve(i, CONTEXT) for i in range(batch)]
        tokens = self._step([ScheduledRequest(request, 0, CONTEXT) for request in requests])
        times_s = []
        for _ in range(STEPS):
            start_s = time.perf_counter()
            for request, token in zip(requests, tokens, strict=True):
                request.token_ids.append(token)
                assert self._engine.manager.grow(request)
            tokens = self._step([ScheduledRequest(request, request.num_tokens - 1, 1) for request in requests])
            times_s.append(time.perf_counter() - start_s)
        for request in requests:
            self._engine.manager.free(request.request_id)
        return statistics.median(times_s)

    def _reserve(self, index: int, num_tokens: int) -> Request:
        request = Request(f"{index}", prompt(num_tokens, index), arrival_s=0.0, deadline_at_s=0.0)
        assert self._engine.manager.reserve(request) is not None
        return request

    def _step(self, rows: list[ScheduledRequest]) -> list[int]:
        result = self._engine.run(SchedulerOutput(rows))
        tokens: list[int] = sampling.greedy_tokens(self._engine.runner.compute_logits(result.hidden)).tolist()
        return tokens


class Transformers:
    def __init__(self, source: ModelSource) -> None:
        import transformers

        config = source.config
        self._model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.max_model_len,
                tie_word_embeddings=config.tie_word_embeddings,
            )
        ).eval()

    @torch.inference_mode()
    def prefill(self) -> float:
        start_s = time.perf_counter()
        self._model(torch.tensor([prompt(PROMPT, 0)]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        output = self._model(torch.tensor([prompt(CONTEXT, i) for i in range(batch)]), use_cache=True)
        times_s = []
        for _ in range(STEPS):
            start_s = time.perf_counter()
            tokens = output.logits[:, -1:].argmax(-1)
            output = self._model(tokens, past_key_values=output.past_key_values, use_cache=True)
            times_s.append(time.perf_counter() - start_s)
        return statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--weights", default="stored,fp32", help="cpu_weights to try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    keep_freed_memory()
    torch.set_num_threads(available_cpus())
    source = resolve_model("smollm2")
    variants: dict[str, Any] = {name: Ours(source, name) for name in options.weights.split(",")}
    if not options.no_transformers and importlib.util.find_spec("transformers") is not None:
        variants["transformers fp32"] = Transformers(source)
    times_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, variant in variants.items():
            measures: dict[str, Callable[[], float]] = {f"decode {batch}": lambda b=batch, v=variant: v.decode(b) / b for batch in batches}
            measures[f"prefill {PROMPT}"] = lambda v=variant: v.prefill() / PROMPT
            for what, measure in measures.items():
                times_s[name, what].append(measure())
    columns = [*(f"decode {batch}" for batch in batches), f"prefill {PROMPT}"]
    print(f"tokens a second, best of {options.rounds} rounds\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in variants:
        print(f"| {name} | " + " | ".join(f"{1 / min(times_s[name, column]):.1f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
