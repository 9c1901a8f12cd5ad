"""Sampling at a large vocabulary: ours beside FlashInfer, vLLM's native op, torch's sort and argmax, and one read of the logits.

    python bench/kernels/sampling.py [--vocab 128256] [--batches 1,64,256] [--json FILE]

Microseconds, median, L2 flushed before each run (triton.testing.do_bench). Peers that cannot be imported are named and skipped.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peers import device, microseconds, vllm_top_k_top_p

from kernels import sampling
from kernels.build import Library, check, load
from kernels.row_parameters import row_parameters

Run = Callable[[], object]


def read_floor(logits: torch.Tensor) -> Run:
    """The fastest of a few grid sizes."""
    library = load(Library("read_floor.cu"))
    library.read_once.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.read_once.restype = ctypes.c_char_p
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count

    def run_with(num_blocks: int) -> Run:
        stream = torch.cuda.current_stream().cuda_stream
        return lambda: check(library.read_once(logits.data_ptr(), logits.nbytes, out.data_ptr(), num_blocks, stream))

    candidates = [run_with(num_processors * factor) for factor in (1, 2, 4, 8)]
    return min(candidates, key=microseconds)


def graph_of(run: Run) -> Run:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def torch_sort(logits: torch.Tensor) -> Run:
    def run() -> torch.Tensor:
        values, indices = logits.sort(-1, descending=True)
        probs = values[:, :50].softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0)
        return indices.gather(-1, torch.multinomial(probs, 1))

    return run


def flashinfer(logits: torch.Tensor) -> Run:
    peer = importlib.import_module("flashinfer.sampling")
    top_k = torch.full((len(logits),), 50, device="cuda", dtype=torch.int32)
    top_p = torch.full((len(logits),), 0.9, device="cuda")
    return lambda: peer.top_k_top_p_sampling_from_logits(logits, top_k, top_p)


def vllm_native(logits: torch.Tensor) -> Run:
    apply_top_k_top_p = vllm_top_k_top_p()
    top_k = torch.full((len(logits),), 50, device="cuda", dtype=torch.int64)
    top_p = torch.full((len(logits),), 0.9, device="cuda")
    return lambda: apply_top_k_top_p(logits.clone(), top_k, top_p)


def runs_of(logits: torch.Tensor) -> dict[str, Callable[[], Run]]:
    num_rows = len(logits)
    history = torch.zeros(logits.shape, dtype=torch.int32, device="cuda")
    history[:, : logits.shape[1] // 64] = 1
    slots, rows = (torch.arange(num_rows, device="cuda") for _ in range(2))
    penalties = torch.tensor([[1.1, 0.5, 0.2]] * num_rows, device="cuda")

    def ours(temperature: float, top_k: int, top_p: float, min_p: float, of: torch.Tensor = logits) -> Callable[[], Run]:
        parameters = torch.tensor([row_parameters(temperature, top_k, top_p, min_p, seed) for seed in range(num_rows)], device="cuda")
        return lambda: lambda: sampling.sample_tokens(of, parameters)

    flat = torch.zeros_like(logits)
    return {
        "read once": lambda: read_floor(logits),
        "ours greedy": lambda: lambda: sampling.greedy_tokens(logits),
        "ours greedy, graph": lambda: graph_of(lambda: sampling.greedy_tokens(logits)),
        "torch argmax": lambda: lambda: logits.argmax(-1),
        "ours top-k 50 + top-p 0.9": ours(1.0, 50, 0.9, 0.0),
        "ours top-k 50 + top-p 0.9, graph": lambda: graph_of(ours(1.0, 50, 0.9, 0.0)()),
        "flashinfer": lambda: flashinfer(logits),
        "vllm native": lambda: vllm_native(logits),
        "torch sort": lambda: torch_sort(logits),
        "ours top-k 50": ours(1.0, 50, 1.0, 0.0),
        "ours top-k 1000": ours(1.0, 1000, 1.0, 0.0),
        "ours top-k 5000 (radix)": ours(1.0, 5000, 1.0, 0.0),
        "ours top-p 0.9": ours(1.0, 0, 0.9, 0.0),
        "ours top-p 0.9 at temperature 8 (radix)": ours(8.0, 0, 0.9, 0.0),
        "ours top-p 0.9, flat row (radix)": ours(1.0, 0, 0.9, 0.0, flat),
        "ours min-p 0.05": ours(1.0, 0, 1.0, 0.05),
        "ours temperature only": ours(1.0, 0, 1.0, 0.0),
        "ours penalties": lambda: lambda: sampling.apply_penalties(logits, history, slots, penalties),
        "ours logprobs, top 20": lambda: lambda: sampling.token_logprobs(logits, rows, slots, 20),
    }


def time_of(make: Callable[[], Run]) -> float | str:
    """Microseconds, or why not."""
    try:
        run = make()
        run()
        return microseconds(run)
    except Exception as error:  # a peer that is not there, or does not run here
        return f"{type(error).__name__}: {error}".splitlines()[0][:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    print(f"vocabulary {arguments.vocab}, fp32, {device()}: microseconds\n")
    print("| | " + " | ".join(f"batch {batch}" for batch in batches) + " |\n|---|" + "---|" * len(batches))
    runs = []
    for batch in batches:
        torch.manual_seed(0)
        runs.append(runs_of(torch.randn(batch, arguments.vocab, device="cuda") * 4))
    table: dict[str, dict[int, float | str]] = {}
    for name in runs[0]:
        table[name] = {batch: time_of(of_batch[name]) for batch, of_batch in zip(batches, runs, strict=True)}
        cells = [f"{time:.1f}" if isinstance(time, float) else time for time in table[name].values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"vocab": arguments.vocab, "microseconds": table}, indent=1))


if __name__ == "__main__":
    main()
