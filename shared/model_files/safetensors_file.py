"""Reads safetensors files through mmap: an 8-byte length, a JSON header, then the bytes of all tensors."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shared.errors import ModelLoadError
from shared.model_files.dequantize import TENSOR_TYPES
from shared.model_files.stored_tensor import StoredTensor

_MAX_HEADER_BYTES = 100 << 20


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor. Types other than F32, F16, BF16 are listed and refused when used."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    try:
        (header_bytes,) = struct.unpack_from("<Q", mapped, 0)
        if header_bytes > min(_MAX_HEADER_BYTES, len(mapped) - 8):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {len(mapped)}")
        header = json.loads(mapped[8 : 8 + header_bytes])
        data = np.frombuffer(mapped, dtype=np.uint8, offset=8 + header_bytes) if len(mapped) > 8 + header_bytes else np.empty(0, np.uint8)
        tensors: dict[str, StoredTensor] = {}
        for name, info in header.items():
            if name == "__metadata__":
                continue
            start, end = info["data_offsets"]
            tensor = StoredTensor(name, tuple(info["shape"]), info["dtype"], data[start:end])
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"tensor {name} ends at byte {end} of {len(data)}")
            known = TENSOR_TYPES.get(tensor.type_name)
            if known is not None and tensor.num_elements * known.block_bytes != end - start:
                raise ValueError(f"tensor {name} of shape {tensor.shape} has {end - start} bytes")
            tensors[name] = tensor
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file, or is cut short: {error}; download it again") from error
    return tensors


def safetensors_files(directory: Path, index: dict[str, str] | None) -> tuple[Path, ...]:
    """The weight files of a model; `index` maps tensors to file names where there is an index. ModelLoadError names a missing one."""
    if index:
        files = [directory / name for name in sorted(set(index.values()))]
    else:
        single = directory / "model.safetensors"
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"there is no .safetensors file in {directory} (PyTorch .bin files are not read: convert them)")
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing, though model.safetensors.index.json names it: download it")
    return tuple(files)


def read_all(files: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(read_safetensors(file))
    return tensors
