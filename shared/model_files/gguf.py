"""Reads GGUF v2/v3 model files through mmap: header and key-values at once, arrays and tensor bytes when asked for.

A model may be split over several files (`name-00001-of-00003.gguf`): any part, or the directory, opens all of them. Key-values
come from the first part: only it has the architecture and the tokenizer.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ModelLoadError
from shared.model_files.dequantize import TENSOR_TYPES, ggml_type_name
from shared.model_files.stored_tensor import StoredTensor

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_U64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class _PendingArray:
    element_type: int
    count: int
    start: int
    end: int


class GGUFFile:
    """One file. `get` returns a key-value; strings and scalars are Python values, arrays of numbers numpy arrays, others lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        if self._map[:4] != _MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file")
        self._position = 4
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read_header()
        except (struct.error, ValueError, OverflowError, IndexError) as error:
            raise ModelLoadError(f"{path} is damaged or cut short: {error}; download it again") from error

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if isinstance(value, _PendingArray):
            value = self._values[key] = self._read_array(value)
        return value

    def keys(self) -> list[str]:
        return list(self._values)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._map, self._position)
        self._position += struct.calcsize(code)
        return value

    def _string(self) -> str:
        size: int = self._scalar("<Q")
        if size > len(self._map) - self._position:
            raise ValueError(f"a string of {size} bytes at offset {self._position} passes the end of the file")
        start, self._position = self._position, self._position + size
        return self._map[start : start + size].decode("utf-8", errors="replace")

    def _value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._skip_array()
        if value_type not in _SCALARS:
            raise ValueError(f"unknown value type {value_type}")
        (value,) = np.frombuffer(self._map, dtype=_SCALARS[value_type], count=1, offset=self._position)
        self._position += value.nbytes
        return value.item()

    def _skip_array(self) -> _PendingArray:
        element_type, count = self._scalar("<I"), self._scalar("<Q")
        element_bytes = 8 if element_type == _STRING else np.dtype(_SCALARS[element_type]).itemsize if element_type in _SCALARS else 0
        if not element_bytes:
            raise ValueError(f"array of unsupported type {element_type}")
        if count * element_bytes > len(self._map) - self._position:
            raise ValueError(f"an array of {count} values at offset {self._position} passes the end of the file")
        start = self._position
        if element_type != _STRING:
            self._position += count * element_bytes
            return _PendingArray(element_type, count, start, self._position)
        # Trap: tokenizers have ~100 000 strings. This loop only hops from length to length; nothing is decoded yet.
        position, buffer, unpack = start, self._map, _U64.unpack_from
        for _ in range(count):
            position += 8 + unpack(buffer, position)[0]
        if position > len(buffer):
            raise ValueError("a string array passes the end of the file")
        self._position = position
        return _PendingArray(element_type, count, start, position)

    def _read_array(self, array: _PendingArray) -> Any:
        if array.element_type != _STRING:
            return np.frombuffer(self._map, dtype=_SCALARS[array.element_type], count=array.count, offset=array.start)
        position, buffer, unpack, strings = 0, self._map[array.start : array.end], _U64.unpack_from, []
        for _ in range(array.count):
            end = position + 8 + unpack(buffer, position)[0]
            strings.append(buffer[position + 8 : end].decode("utf-8", errors="replace"))
            position = end
        return strings

    def _read_header(self) -> None:
        version: int = self._scalar("<I")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            raise ModelLoadError(
                f"{self.path}: {'big-endian GGUF' if big_endian else f'GGUF version {version}'} is not supported, only 2 and 3"
            )
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_values):
            key = self._string()
            self._values[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self._values.get("general.alignment", 32))
        if alignment <= 0:
            raise ValueError(f"alignment {alignment}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, ggml_id, offset in infos:
            self.tensors[name] = self._tensor(name, shape, ggml_id, data_start + offset)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._scalar("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        dimensions = [self._scalar("<Q") for _ in range(num_dimensions)]
        # GGUF lists dimensions innermost first: [in, out] is our (out, in).
        return name, tuple(reversed(dimensions)), self._scalar("<I"), self._scalar("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], ggml_id: int, start: int) -> StoredTensor:
        type_name = ggml_type_name(ggml_id)
        tensor_type = TENSOR_TYPES.get(type_name)
        size = 0  # a type we cannot read has no size we know; using the tensor raises, listing it does not
        if tensor_type is not None:
            num_elements = 1
            for dimension in shape:
                num_elements *= dimension
            if shape and shape[-1] % tensor_type.block_size:
                raise ValueError(f"tensor {name}: rows of {shape[-1]} are not whole {type_name} blocks of {tensor_type.block_size}")
            size = num_elements // tensor_type.block_size * tensor_type.block_bytes
            if start + size > len(self._bytes):
                raise ValueError(f"tensor {name} ends at byte {start + size}, the file at {len(self._bytes)}")
        return StoredTensor(name, shape, type_name, self._bytes[start : start + size])


@dataclass(frozen=True)
class GGUFModel:
    """All parts of a model; `get` reads the first part's key-values."""

    parts: tuple[GGUFFile, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    def get(self, key: str, default: Any = None) -> Any:
        return self.parts[0].get(key, default)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts)


def _part_paths(path: Path) -> list[Path]:
    """Every part of the model that `path` (a part, a whole file, or a directory) belongs to, whether it is there or not."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files:
            raise ModelLoadError(f"there is no .gguf file in {path}")
        models = {match["stem"] if (match := _SPLIT_NAME.match(file.name)) else file.name for file in files}
        if len(models) > 1:
            raise ModelLoadError(f"{path} holds several models ({', '.join(sorted(models))}): name one file")
        path = files[0]
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def open_gguf(path: Path) -> GGUFModel:
    """Raises ModelLoadError for a foreign, damaged or incomplete model; the message names the file at fault."""
    paths = _part_paths(path)
    for number, part_path in enumerate(paths, start=1):
        if not part_path.is_file():
            if len(paths) > 1:
                raise ModelLoadError(f"part {number} of {len(paths)} of the model, {part_path}, is missing: all parts must lie together")
            raise ModelLoadError(f"there is no file {part_path}")
    parts = tuple(GGUFFile(part_path) for part_path in paths)
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        count, declared = int(part.get("split.count", 1) or 1), int(part.get("split.no", 0))
        if count != len(parts):
            name = f"<name>-{declared + 1:05d}-of-{count:05d}.gguf"
            raise ModelLoadError(f"{part.path} is part {declared + 1} of {count} but is not named like one: rename it to {name}")
        if count > 1 and declared != number:
            raise ModelLoadError(f"{part.path} says it is part {declared + 1}, its name says {number + 1}")
        tensors.update(part.tensors)
    expected = int(parts[0].get("split.tensors.count", len(tensors)))
    if len(parts) > 1 and expected != len(tensors):
        raise ModelLoadError(
            f"{parts[0].path}: {len(tensors)} tensors in all parts, the first part promises {expected}: parts of two models?"
        )
    return GGUFModel(parts, tensors)
