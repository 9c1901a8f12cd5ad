"""What the benches of kernels share: how a run is timed, what this device's memory gave in the same process, and peers that may be absent.

A peer is imported when it is first asked for; whoever is missing or fails is named in the results and skipped.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from triton.testing import do_bench

Run = Callable[[], torch.Tensor]
WRONG = 0.02
"""A relative error that no rounding of bf16 explains."""


@dataclass(frozen=True)
class Measured:
    microseconds: float
    error: float


def microseconds(run: Callable[[], object], warmup_ms: int = 50, repeat_ms: int = 150) -> float:
    """Median on the GPU, L2 flushed before each run."""
    return float(do_bench(run, warmup=warmup_ms, rep=repeat_ms, return_mode="median")) * 1e3


def measure(make: Callable[[], Run], error_of: Callable[[torch.Tensor], float], repeat_ms: int = 150) -> Measured | str:
    """Checked, then timed; or, in words, why there is nothing to time."""
    try:
        run = make()
        error = error_of(run())
        if not error < WRONG:
            return f"wrong: relative error {error:.1e}"
        return Measured(microseconds(run, repeat_ms=repeat_ms), error)
    except Exception as reason:  # a peer that does not run is named, whatever it raises
        return " ".join(f"{type(reason).__name__}: {reason}".split())[:160]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def read_ceiling() -> float:
    """Bytes per second: the larger of a sum over 2 GiB and a device copy of as much (bytes read and written)."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    read = source.nbytes / microseconds(lambda: source.sum())
    copy = 2 * source.nbytes / microseconds(lambda: target.copy_(source))
    return max(read, copy) * 1e6


def device() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


@functools.cache
def flash_attention_3() -> Any:
    """The paged, variable-length FA3 inside vLLM."""
    return functools.partial(importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func, fa_version=3)


@functools.cache
def flashinfer() -> Any:
    return importlib.import_module("flashinfer")


@functools.cache
def vllm_ops() -> Any:
    """vLLM's C++ ops, PagedAttention V1 and V2 among them."""
    return importlib.import_module("vllm._custom_ops")


@functools.cache
def vllm_top_k_top_p() -> Any:
    return importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
