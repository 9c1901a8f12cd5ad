"""Model weights under Hugging Face's names, from GGUF or safetensors: torch tensors, each read straight to its place, or for the CPU's
kernel rows as the file has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import cpu_linear
from kernels.cpu_linear import StoredRows
from kernels.quantize_rows import quantize_rows
from shared.available_memory import available_memory_bytes
from shared.config import Settings
from shared.engine.dummy_weights import dummy_weight
from shared.engine.layers.fp8_linear import FP8Weight
from shared.engine.layers.linear import Weights
from shared.engine.tensor_parallel.sharding import Shard
from shared.errors import ConfigurationError
from shared.model_files.model_source import ModelSource, Quantization
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_layout import weight_buffers
from shared.model_files.weight_names import ExpectedWeight, expected_weights
from shared.model_files.weight_reader import (
    NUM_LOADING_THREADS,
    PendingWeights,
    check_room,
    read_weight,
    row_order,
    start_loading,
)

_SAME_TYPE = {"F16": torch.float16, "BF16": torch.bfloat16}

Storage = Literal["stored", "int16", "fp16", "fp32"]
"""How the CPU's kernel holds the weights of linear layers: as the file does (int16: and rounds the inputs of quantized ones), or converted.
All but fp16 have the file's values."""


def cpu_storage(settings: Settings, dtype: torch.dtype, device: torch.device) -> Storage | None:
    """What the setting `cpu_weights` means here; None: tensors of `dtype`. Raises ConfigurationError."""
    if device.type != "cpu":
        return None
    if settings.quantization is not None:
        if settings.cpu_weights != "auto":
            raise ConfigurationError(
                f"cpu_weights = {settings.cpu_weights!r} does not go with quantization = {settings.quantization!r}: either says how "
                "weights are held; leave one out"
            )
        return None
    if settings.tensor_parallel_size > 1:  # a rank's share of a row is no whole blocks of the file's
        if settings.cpu_weights in ("stored", "int16", "fp16"):
            raise ConfigurationError(
                f"cpu_weights = {settings.cpu_weights!r} does not go with tensor_parallel_size: ranks hold tensors of dtype; leave it out"
            )
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


class _Places:
    """Memory for all weights, taken beforehand; what is put into a place that is quantised is converted there and then."""

    def __init__(
        self, expected: Sequence[ExpectedWeight], dtype: torch.dtype, device: torch.device, quantization: Quantization | None
    ) -> None:
        self._device, self._dtype = device, dtype
        is_quantized = [quantization is not None and weight.is_quantizable for weight in expected]
        self._tensors = _memory(list(compress(expected, map(not_, is_quantized))), dtype, device)
        self._values = _memory(list(compress(expected, is_quantized)), torch.float8_e4m3fn, device)
        self._fp8: dict[str, FP8Weight] = {}

    def put(self, name: str, whole: torch.Tensor, part_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Of the weight `name` what `part_of` gives. Any thread."""
        place = self._tensors.get(name)
        if place is not None:
            place.copy_(part_of(whole))
            return
        # Before it is shared out: a rank that holds some of an output's inputs has the factor of all, so all degrees are one model.
        values, factors = quantize_rows(whole.to(self._device, self._dtype))
        place = self._values[name]
        place.view(torch.uint8).copy_(part_of(values.view(torch.uint8)))
        self._fp8[name] = FP8Weight(place, factors if len(place) == len(values) else part_of(factors))

    def weights(self) -> Weights:
        return Weights(self._tensors, fp8=self._fp8)


def _memory(expected: Sequence[ExpectedWeight], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    shapes = {weight.name: weight.shape for weight in expected}
    places: dict[str, torch.Tensor] = {}
    for buffer in weight_buffers(expected):
        memory = torch.empty(buffer.size, dtype=dtype, device=device)
        for name, start in buffer.starts.items():
            places[name] = memory[start : start + math.prod(shapes[name])].view(shapes[name])
    return places


def _parts(source: ModelSource, expected: Sequence[ExpectedWeight], shard: Shard | None) -> list[ExpectedWeight]:
    """With the shapes of what this rank holds."""
    if shard is None:
        return list(expected)

    def shape(weight: ExpectedWeight) -> tuple[int, ...]:
        return tuple(_part(source, weight.name, shard)(torch.empty(weight.shape, device="meta")).shape)

    return [replace(weight, shape=shape(weight)) for weight in expected]


def _part(source: ModelSource, name: str, shard: Shard | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives what this rank holds of the weight `name`."""
    return lambda whole: whole if shard is None else shard.part_of(name, whole, source.config)


def _wrapped(arrays: dict[str, NDArray[np.float32]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same memory as tensors, those of one buffer still in one piece; takes the arrays out."""
    memories: dict[int, torch.Tensor] = {}
    for name in list(arrays):
        array = arrays.pop(name)
        owner = array if array.base is None else array.base
        memory = memories.setdefault(id(owner), torch.from_numpy(owner).view(-1))
        start = (array.ctypes.data - memory.data_ptr()) // array.itemsize
        yield name, memory[start : start + array.size].view(array.shape)


def _load_one(
    source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, places: _Places, dtype: torch.dtype, shard: Shard | None
) -> None:
    if source.format == "safetensors" and _SAME_TYPE.get(stored.type_name) is dtype:
        # Already what is wanted: no way round through float32. The copy detaches it from the read-only map.
        tensor = torch.from_numpy(np.array(stored.data).view(np.int16)).view(dtype).reshape(expected.shape)
    else:
        tensor = torch.from_numpy(read_weight(source, expected, stored)).to(dtype)
    places.put(expected.name, tensor, _part(source, expected.name, shard))


def _as_rows(source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, storage: Storage) -> StoredRows:
    shape = (expected.shape[0], expected.shape[1])
    if storage in ("stored", "int16") and stored.type_name in cpu_linear.FORMATS:
        return StoredRows(stored.type_name, stored.data, shape, row_order(source, expected), is_int16=storage == "int16")
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
        weights = load_weights(source, torch.float32, "cpu", progress, pending)
        if storage == "fp16":
            weights.update({name: tensor.half().float() for name, tensor in weights.items() if tensor.dim() == 2})
        return weights
    if storage in ("fp16", "fp32") or source.format == "dummy":
        weights = load_weights(source, torch.float32, "cpu", progress, pending)
        for name in [name for name, tensor in weights.items() if tensor.dim() == 2]:
            weights.stored[name] = _converted(weights.pop(name).numpy(), storage)
        return weights
    weights = Weights({})
    for expected, stored in source.weights():
        if len(expected.shape) == 2:
            weights.stored[expected.name] = _as_rows(source, expected, stored, storage)
        else:
            weights[expected.name] = torch.from_numpy(read_weight(source, expected, stored))
    # More than the file has where that has K-quants.
    needed = sum(cpu_linear.packed_nbytes(rows.type_name, rows.shape) for rows in weights.stored.values())
    check_room(source, needed, available_memory_bytes())
    if progress is not None:
        progress(1.0)  # what is left is a copy
    return weights


def load_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
    pending: PendingWeights | None = None,
    shard: Shard | None = None,
    quantization: Quantization | None = None,
) -> Weights:
    """Tensors, `lm_head.weight` not among them when it is tied to the embedding; with `quantization` matrices of layers as FP8.

    `pending`: float32 weights already being read (`start_loading`), wrapped without a copy when float32 on the CPU is wanted.
    Otherwise tensors are converted one by one, so at most a few are held twice. `progress`: 0..1. `shard`: only what it holds.
    Raises ModelLoadError when the weights cannot fit in memory.
    """
    device = torch.device(device)
    if source.format != "dummy" and quantization is None:
        if pending is None and shard is None and dtype is torch.float32 and device.type == "cpu":
            pending = start_loading(source, progress)
        if pending is not None:
            arrays = pending.result()
            return Weights({name: tensor.to(device=device, dtype=dtype) for name, tensor in _wrapped(arrays)})
    # On a CPU the ranks share what is free; each GPU has its own.
    num_ranks = shard.size if shard is not None and device.type == "cuda" else 1
    where = "GPU memory" if device.type == "cuda" else "memory"
    check_room(source, source.num_weight_bytes(dtype.itemsize, quantization) // num_ranks, available_bytes(device), where)
    if source.format == "dummy":
        expected = list(expected_weights(source.config))
        places = _Places(_parts(source, expected, shard), dtype, device, quantization)
        for seed, weight in enumerate(expected):
            places.put(weight.name, dummy_weight(weight, seed, dtype, device), _part(source, weight.name, shard))
        return places.weights()
    pairs = list(source.weights())
    num_elements, num_done = source.num_parameters, 0
    places = _Places(_parts(source, [expected for expected, _ in pairs], shard), dtype, device, quantization)
    with ThreadPoolExecutor(NUM_LOADING_THREADS) as pool:
        loaded = pool.map(lambda pair: _load_one(source, pair[0], pair[1], places, dtype, shard), pairs)
        for (_, stored), _ in zip(pairs, loaded, strict=True):
            num_done += stored.num_elements
            if progress is not None:
                progress(num_done / num_elements)
    return places.weights()
