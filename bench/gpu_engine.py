"""The engine on one GPU with random weights of a real shape: decode by batch, time to first token by prompt length, cold and warm.

    python bench/gpu_engine.py [--shape llama8b|smollm135m] [--parts decode,ttft,kernels] [--batches 1,8,32] [--eager] [--sync]

The same work as vLLM's offline engine gets in the comparison of bench/RESULTS.md: prompts of random tokens, greedy answers without an end
token; ITL is the difference between answers of 257 tokens and of one, over 256. A decode worker is stepped in this process, with all it
does for a request but the sockets. kernels: what a decode step spends on the GPU, by kernel.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from opentelemetry.trace import NoOpTracer

from services.decode.worker import DecodeWorker
from shared.config import Settings
from shared.messages import DecodeRequest, RequestOutput
from shared.model_files.model_config import ModelConfig
from shared.model_files.model_source import ModelSource
from shared.sampling_params import SamplingParams

SHAPES = {
    "llama8b": ModelConfig(
        architecture="llama", num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256, tokenizer_vocab_size=128256, max_model_len=131072, rope_theta=500000.0, rms_norm_eps=1e-5,
        eos_token_ids=(2,), bos_token_id=1,
    ),
    "smollm135m": ModelConfig(
        architecture="llama", num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
        vocab_size=49152, tokenizer_vocab_size=49152, max_model_len=8192, rope_theta=100000.0, rms_norm_eps=1e-5, eos_token_ids=(2,),
        bos_token_id=1, tie_word_embeddings=True,
    ),
}  # fmt: skip
KV_CACHE_GIB = {"llama8b": 60.0, "smollm135m": 20.0}
MAX_MODEL_LEN = {"llama8b": 40960, "smollm135m": 8192}


def no_tokenizer() -> Any:
    raise NotImplementedError("token ids only")


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.config = SHAPES[options.shape]
        source = ModelSource(
            name=options.shape, format="dummy", files=(), config=self.config, chat_template=None, fingerprint="bench",
            load_tokenizer=no_tokenizer, tensors={},
        )  # fmt: skip
        settings = Settings(
            device="cuda", dtype="bfloat16", kv_cache_gib=KV_CACHE_GIB[options.shape], max_model_len=MAX_MODEL_LEN[options.shape],
            max_num_batched_tokens=options.tokens, max_step_ms=1e6, max_num_seqs=256, enforce_eager=options.eager,
            async_scheduling=False if options.sync else None, kv_transport="tcp",
        )  # fmt: skip
        self.worker = DecodeWorker(source, settings, NoOpTracer())
        self.num_tokens = 0
        self.worker.rpc.send = self._count  # type: ignore[method-assign]
        self._rng = random.Random(1)
        self._num_requests = 0

    def _count(self, _router: bytes, message: object) -> None:
        if isinstance(message, RequestOutput):
            self.num_tokens += 1
        elif type(message).__name__ == "RequestFailed":
            raise SystemExit(f"a request failed: {message}")

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(10, self.config.vocab_size - 10) for _ in range(num_tokens))

    def submit(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        message = DecodeRequest(
            request_id=f"{self._num_requests}", token_ids=prompt, sampling=sampling, deadline_s=600.0, transfer_id=None
        )  # fmt: skip
        self.worker.accept(b"router", message)

    def run(self, prompts: list[tuple[int, ...]], num_tokens: int) -> float:
        """Seconds until every prompt has its answer."""
        self.num_tokens = 0
        start_s = time.perf_counter()
        for prompt in prompts:
            self.submit(prompt, num_tokens)
        while self.worker._jobs:
            self.worker._drain_inbox()
            self.worker.step()
        assert self.num_tokens == num_tokens * len(prompts), f"{self.num_tokens} tokens for {len(prompts)} answers of {num_tokens}"
        return time.perf_counter() - start_s


def measure_decode(engine: Engine, options: argparse.Namespace) -> None:
    for batch in map(int, options.batches.split(",")):
        engine.run([engine.prompt(128) for _ in range(batch)], 129)  # graphs of longer contexts
        first = min(engine.run([engine.prompt(128) for _ in range(batch)], 1) for _ in range(2))
        total = min(engine.run([engine.prompt(128) for _ in range(batch)], 257) for _ in range(2))
        itl_s = (total - first) / 256
        print(
            f"{options.shape} decode b={batch}: ITL {itl_s * 1e3:.2f} ms, {batch / itl_s:.0f} tok/s; ttft(128) {first * 1e3:.1f} ms",
            flush=True,
        )
    for batch, context in ((32, 8192), (64, 4096)) if options.shape == "llama8b" and options.long else ():
        prompts = [engine.prompt(context) for _ in range(batch)]
        engine.run(prompts, 2)
        first, total = engine.run(prompts, 1), engine.run(prompts, 129)
        itl_s = (total - first) / 128
        print(f"{options.shape} decode b={batch} ctx={context}: ITL {itl_s * 1e3:.2f} ms, {batch / itl_s:.0f} tok/s", flush=True)


def measure_ttft(engine: Engine, options: argparse.Namespace) -> None:
    for num_tokens in (512, 2048, 8192, 32768):
        if num_tokens > MAX_MODEL_LEN[options.shape] - 512:
            continue
        cold = statistics.median(engine.run([engine.prompt(num_tokens)], 1) for _ in range(3))
        prompt = engine.prompt(num_tokens)
        engine.run([prompt], 1)
        warm = statistics.median(engine.run([prompt], 1) for _ in range(5))
        print(
            f"{options.shape} prefill {num_tokens}: cold TTFT {cold * 1e3:.1f} ms ({num_tokens / cold:.0f} tok/s), "
            f"warm prefix TTFT {warm * 1e3:.1f} ms",
            flush=True,
        )


def measure_kernels(engine: Engine, options: argparse.Namespace) -> None:
    """Of steps alone, one after the other: host and GPU."""
    for batch in map(int, options.batches.split(",")):
        for _ in range(batch):
            engine.submit(engine.prompt(128), 200)
        for _ in range(20):
            engine.worker._drain_inbox()
            engine.worker.step()
        num_steps = 20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num_steps):
                engine.worker.step()
            torch.cuda.synchronize()
        while engine.worker._jobs:
            engine.worker._drain_inbox()
            engine.worker.step()
        events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
        total_us = sum(event.device_time_total for event in events)
        print(f"{options.shape} b={batch}: {total_us / num_steps:.0f} us of kernels a step", flush=True)
        for event in events[:18]:
            print(f"  {event.device_time_total / num_steps:8.1f} us {event.count / num_steps:6.1f} x  {event.key[:90]}")


PARTS = {"decode": measure_decode, "ttft": measure_ttft, "kernels": measure_kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--parts", default="decode,ttft")
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--long", action=argparse.BooleanOptionalAction, default=True, help="decode with contexts of 4096 and 8192 too")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--sync", action="store_true", help="without steps queued ahead")
    parser.add_argument("--verbose", action="store_true", help="with what the engine logs, such as the parts of its start")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING)
    start_s = time.perf_counter()
    engine = Engine(options)
    print(f"# {options.shape} on {torch.cuda.get_device_name()}: ready in {time.perf_counter() - start_s:.1f} s", flush=True)
    for name in options.parts.split(","):
        PARTS[name](engine, options)
    engine.worker.fail_all("the measurement is over")
    engine.worker.close_transport()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    import os

    os._exit(0)  # its sockets' thread, which would close them, never ran
