"""The CUDA libraries of an engine, compiled side by side where they were never built: one after the other, when each is first used, they
would take minutes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.build import KernelBuildError, Library, all_libraries, build, cache_folder, device_arch, find_prebuilt
from kernels.kv_cache_format import FP8_KINDS, SCALARS

logger = logging.getLogger(__name__)


def engine_libraries(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, arch: str) -> list[Library]:
    """What an engine with this head size and types loads on a GPU of `arch`; attention for head sizes that are seldom is not among them."""
    wanted: Mapping[str, int | str] = {"HEAD_SIZE": head_dim, "SCALAR": SCALARS[dtype], "KV_CACHE": FP8_KINDS.get(kv_dtype, 0)}
    return [
        library
        for library in all_libraries()
        if library.is_cuda
        and library.only_arch in (None, arch)
        and all(library.defines.get(name, value) == value for name, value in wanted.items())
    ]


def prepare(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Compile those that are missing. Whoever then loads one that could not be compiled gets the compiler's words."""
    arch = device_arch()
    missing = [library for library in engine_libraries(head_dim, dtype, kv_dtype, arch) if find_prebuilt(library, arch) is None]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for library in missing:
            pool.submit(_build, library, arch)


def _build(library: Library, arch: str) -> None:
    try:
        build(library, arch, cache_folder())
    except KernelBuildError as error:
        logger.info("%s is not compiled ahead of its use: %s", library.source, error)
