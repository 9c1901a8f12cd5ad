"""Model weights under Hugging Face's names, from GGUF or safetensors: torch tensors, or for the CPU's kernel rows as the file has them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch

from kernels import cpu_linear
from kernels.cpu_linear import StoredRows
from shared.available_memory import available_memory_bytes
from shared.config import Settings
from shared.engine.dummy_weights import dummy_weight
from shared.engine.layers.linear import Weights
from shared.errors import ConfigurationError
from shared.model_files.model_source import ModelSource
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_names import ExpectedWeight, expected_weights
from shared.model_files.weight_reader import (
    NUM_LOADING_THREADS,
    PendingWeights,
    check_fits,
    check_room,
    read_weight,
    row_order,
    start_loading,
)

_SAME_TYPE = {"F16": torch.float16, "BF16": torch.bfloat16}

Storage = Literal["stored", "fp16", "fp32"]
"""How the CPU's kernel holds the weights of linear layers: as the file does, or converted. All but fp16 have the file's values."""


def cpu_storage(settings: Settings, dtype: torch.dtype, device: torch.device) -> Storage | None:
    """What the setting `cpu_weights` means here; None: tensors of `dtype`. Raises ConfigurationError."""
    if device.type != "cpu":
        return None
    if dtype is not torch.float32:
        if settings.cpu_weights != "auto":
            raise ConfigurationError(
                f"cpu_weights = {settings.cpu_weights!r} needs dtype float32; leave cpu_weights out, or dtype, whose default on a CPU it is"
            )
        return None
    return "stored" if settings.cpu_weights == "auto" else settings.cpu_weights


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None: unknown."""
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    return available_memory_bytes()


def _load_one(
    source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, dtype: torch.dtype, device: torch.device
) -> tuple[str, torch.Tensor]:
    if source.format == "safetensors" and _SAME_TYPE.get(stored.type_name) is dtype:
        # Already what is wanted: no way round through float32. The copy detaches it from the read-only map.
        tensor = torch.from_numpy(np.array(stored.data).view(np.int16)).view(dtype).reshape(expected.shape)
    else:
        tensor = torch.from_numpy(read_weight(source, expected, stored)).to(dtype)
    return expected.name, tensor.to(device)


def _as_rows(source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, storage: Storage) -> StoredRows:
    shape = (expected.shape[0], expected.shape[1])
    if storage == "stored" and stored.type_name in cpu_linear.FORMATS:
        return StoredRows(stored.type_name, stored.data, shape, row_order(source, expected))
    return _converted(read_weight(source, expected, stored), storage)


def _converted(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], storage: Storage) -> StoredRows:
    shape = (array.shape[0], array.shape[1])
    if storage == "fp16":
        return StoredRows("F16", array.astype(np.float16).reshape(-1).view(np.uint8), shape)
    return StoredRows("F32", array.reshape(-1).view(np.uint8), shape)


def load_for_cpu(
    source: ModelSource, storage: Storage, progress: Callable[[float], None] | None = None, pending: PendingWeights | None = None
) -> Weights:
    """For an fp32 engine: matrices as `storage` says where the kernel can be had, else as fp32 tensors of the same values. `pending`: as
    for `load_weights`. Raises ModelLoadError when the weights cannot fit in memory."""
    if not cpu_linear.prepare():
        tensors = load_weights(source, torch.float32, "cpu", progress, pending)
        if storage == "fp16":
            tensors = {name: tensor.half().float() if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
        return Weights(tensors)
    if storage != "stored" or source.format == "dummy":
        weights = Weights(load_weights(source, torch.float32, "cpu", progress, pending))
        for name in [name for name, tensor in weights.items() if tensor.dim() == 2]:
            weights.stored[name] = _converted(weights.pop(name).numpy(), storage)
        return weights
    pairs = list(source.weights())
    check_room(source, sum(len(stored.data) for _, stored in pairs), available_memory_bytes())
    weights = Weights({})
    for expected, stored in pairs:
        if len(expected.shape) == 2:
            weights.stored[expected.name] = _as_rows(source, expected, stored, storage)
        else:
            weights[expected.name] = torch.from_numpy(read_weight(source, expected, stored))
    if progress is not None:
        progress(1.0)  # what is left is a copy
    return weights


def load_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
    pending: PendingWeights | None = None,
) -> dict[str, torch.Tensor]:
    """Name -> tensor; `lm_head.weight` is absent when it is tied to the embedding.

    `pending`: float32 weights already being read (`start_loading`), wrapped without a copy when float32 on the CPU is wanted.
    Otherwise tensors are converted one by one, so at most a few are held in float32. `progress`: 0..1.
    Raises ModelLoadError when the weights cannot fit in memory.
    """
    device = torch.device(device)
    if source.format == "dummy":
        check_fits(source, dtype.itemsize, available_bytes(device), "GPU memory" if device.type == "cuda" else "memory")
        return {w.name: dummy_weight(w, seed, dtype, device) for seed, w in enumerate(expected_weights(source.config))}
    if pending is None and dtype is torch.float32 and device.type == "cpu":
        pending = start_loading(source, progress)
    if pending is not None:
        arrays = pending.result()
        return {name: torch.from_numpy(arrays.pop(name)).to(device=device, dtype=dtype) for name in list(arrays)}
    check_fits(source, dtype.itemsize, available_bytes(device), "GPU memory" if device.type == "cuda" else "memory")
    pairs = list(source.weights())
    num_elements, num_done = source.num_parameters, 0
    weights: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(NUM_LOADING_THREADS) as pool:
        loaded = pool.map(lambda pair: _load_one(source, pair[0], pair[1], dtype, device), pairs)
        for name, tensor in loaded:
            weights[name] = tensor
            num_done += tensor.numel()
            if progress is not None:
                progress(num_done / num_elements)
    return weights
