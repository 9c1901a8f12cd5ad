"""Weights as float32 numpy arrays, read by threads of their own: torch can be imported meanwhile, and wrap them without a copy."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.available_memory import available_memory_bytes
from shared.errors import ModelLoadError
from shared.model_files.dequantize import dequantize
from shared.model_files.model_source import ModelSource
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_layout import weight_buffers
from shared.model_files.weight_names import ExpectedWeight

Floats = NDArray[np.float32]
Progress = Callable[[float], None]
NUM_LOADING_THREADS = 2
_GIB = 1 << 30


def check_room(source: ModelSource, needed: int, available_bytes: int | None, where: str = "memory") -> None:
    """ModelLoadError when the weights, of so many bytes, are more than what is free. None: unknown, let it try."""
    if available_bytes is not None and needed > available_bytes:
        raise ModelLoadError(
            f"{source.name} needs {needed / _GIB:.1f} GiB of {where} for its weights and {available_bytes / _GIB:.1f} GiB is free: "
            "free some, choose a smaller model, or a 16-bit dtype"
        )


def unpermuted_rows(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Row i of the half-split (NeoX) layout is row `result[i]` of GGUF's interleaved one: head-wise (pair, half) -> (half, pair).

    Trap: k has its own number of heads; with the query heads' the model still speaks, nonsense.
    """
    half = num_rows // num_heads // 2
    return np.arange(num_rows, dtype=np.intp).reshape(num_heads, half, 2).swapaxes(1, 2).reshape(-1)


def row_order(source: ModelSource, expected: ExpectedWeight) -> NDArray[np.intp] | None:
    """Row i of a weight, in Hugging Face's order, is row `result[i]` in the file; None: as they lie."""
    permuted = source.format == "gguf" and expected.permuted_heads > 0
    return unpermuted_rows(expected.shape[0], expected.permuted_heads) if permuted else None


def read_weight(source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, out: Floats | None = None) -> Floats:
    """One tensor as float32, rows in Hugging Face's order; written to `out` when given."""
    array = dequantize(stored, out, row_order(source, expected))
    if source.format == "gguf" and expected.gguf_offset:
        array -= np.float32(expected.gguf_offset)
    return array


def _places(expected: list[ExpectedWeight]) -> dict[str, Floats]:
    shapes = {weight.name: weight.shape for weight in expected}
    places: dict[str, Floats] = {}
    for buffer in weight_buffers(expected):
        memory = np.empty(buffer.size, np.float32)
        for name, start in buffer.starts.items():
            places[name] = memory[start : start + math.prod(shapes[name])].reshape(shapes[name])
    return places


class PendingWeights:
    """Weights being read by daemon threads (a process that is told to stop does not wait for them)."""

    def __init__(self, source: ModelSource, num_threads: int, progress: Progress | None) -> None:
        self._source = source
        self._queue = deque(source.weights())
        self._num_elements = sum(stored.num_elements for _, stored in self._queue)
        self._num_done = 0
        self._arrays: dict[str, Floats] = {}
        self._places = _places([expected for expected, _ in self._queue])
        self._error: BaseException | None = None
        self._progress = progress
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name=f"weights-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def fraction_done(self) -> float:
        return self._num_done / self._num_elements

    def _run(self) -> None:
        try:
            while self._error is None:
                expected, stored = self._queue.popleft()
                place = self._places.pop(expected.name)
                array = read_weight(self._source, expected, stored, place)
                with self._lock:
                    self._arrays[expected.name] = array
                    self._num_done += stored.num_elements
                    if self._progress is not None:
                        self._progress(self.fraction_done)
        except IndexError:
            return
        except BaseException as error:
            self._error = error

    def result(self) -> dict[str, Floats]:
        """Waits for all of them (this is disk and arithmetic, no peer). Hands the arrays over: a second call gives an empty dict."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        arrays, self._arrays = self._arrays, {}
        return arrays


def start_loading(source: ModelSource, progress: Progress | None = None, num_threads: int = NUM_LOADING_THREADS) -> PendingWeights:
    """Begins to read all weights as float32. ModelLoadError when they cannot fit in memory. `progress`: 0..1, from the threads."""
    check_room(source, source.num_weight_bytes(np.dtype(np.float32).itemsize), available_memory_bytes())
    return PendingWeights(source, num_threads, progress)
