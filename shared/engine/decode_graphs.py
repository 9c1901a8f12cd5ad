"""Decode steps as CUDA graphs: the hundreds of kernels of a step are launched in one call.

A graph serves every batch of up to so many requests whose longest context is within its bound; what it reads stands at fixed places, which
are filled in one copy. Requests that pad a batch have no tokens: their K and V are written nowhere.
"""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.gpu_attention import GPUDecodeAttention
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.decode_batch import UNKNOWN, DecodeBatch
from shared.engine.kv_cache import KVCache
from shared.engine.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)

MIN_CONTEXT = 512
"""Shortest bound on the context that has graphs of its own."""
RAGGED_CONTEXT = 2048
"""From this bound on, batches of unlike lengths have graphs of their own: attention is divided otherwise."""
_NUM_STAGING = 3
"""Steps whose inputs may be on the way to the GPU."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Padded sizes, at most a quarter larger than what they serve from 16 on."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, max(320, max_num_seqs) + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class GraphKey:
    batch_size: int
    max_context: int
    is_ragged: bool


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [batch_size, hidden_size], written by each replay


class _Inputs:
    """The inputs of one key within a memory that all share."""

    def __init__(self, memory: torch.Tensor, key: GraphKey, block_size: int) -> None:
        """memory: uint8, on the GPU or pinned on the host."""
        size, width = key.batch_size, -(-key.max_context // block_size)
        self._start = 0
        self._memory = memory
        self.token_ids = self._take(torch.int64, size)
        self.sources = self._take(torch.int64, size)
        self.positions = self._take(torch.int64, size)
        self.slots = self._take(torch.int64, size)
        self.seq_lens = self._take(torch.int32, size)
        self.block_tables = self._take(torch.int32, size, width)
        self.nbytes = self._start

    @staticmethod
    def max_nbytes(key: GraphKey, block_size: int) -> int:
        return key.batch_size * (4 * 8 + 4 + 4 * -(-key.max_context // block_size)) + 6 * 16

    def _take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        end = self._start + count * dtype.itemsize
        part = self._memory[self._start : end].view(dtype).view(shape)
        self._start = -(-end // 16) * 16
        return part


class _Staging:
    """Pinned memory from which one step's inputs go to the GPU."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        self.copied = torch.cuda.Event()
        self.inputs: dict[GraphKey, dict[str, NDArray[np.int64 | np.int32]]] = {}

    def of(self, key: GraphKey, block_size: int) -> dict[str, NDArray[np.int64 | np.int32]]:
        if key not in self.inputs:
            views = _Inputs(self.memory, key, block_size)
            names = ("token_ids", "sources", "positions", "slots", "seq_lens", "block_tables")
            self.inputs[key] = {name: getattr(views, name).numpy() for name in names}
        return self.inputs[key]


class DecodeGraphs:
    """One stream and one thread at a time."""

    def __init__(self, model: CausalLM, cache: KVCache, max_num_seqs: int, max_model_len: int) -> None:
        self._model, self._cache = model, cache
        self._device = cache.tensor.device
        self._sizes = batch_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._graphs: dict[GraphKey, _Graph] = {}
        self._warm_sizes: set[int] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        nbytes = _Inputs.max_nbytes(GraphKey(max_num_seqs, max_model_len, False), cache.block_size)
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._previous = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._staging = [_Staging(nbytes) for _ in range(_NUM_STAGING)]

    def prepare(self) -> None:
        """Captures those that short contexts need, the largest first, whose memory the others share."""
        start_s = time.monotonic()
        for size in reversed(self._sizes):
            self._graph(GraphKey(size, min(MIN_CONTEXT, self._max_model_len), False))
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - start_s)

    def run(self, batch: DecodeBatch, previous: torch.Tensor | None) -> torch.Tensor:
        """Queues the step. The last hidden states, [len(batch), hidden_size], valid until the next call. `previous`: the tokens of the step
        before, which may be queued still."""
        key = self._key(batch)
        graph = self._graph(key)
        if previous is not None:
            self._previous[: len(previous)].copy_(previous)
        self._fill(key, batch)
        graph.graph.replay()
        return graph.hidden[: len(batch)]

    def _key(self, batch: DecodeBatch) -> GraphKey:
        size = self._sizes[bisect.bisect_left(self._sizes, len(batch))]
        longest = int(batch.seq_lens.max())
        bound = MIN_CONTEXT
        while bound < longest:
            bound *= 2
        is_ragged = bound >= RAGGED_CONTEXT and int(batch.seq_lens.sum()) < 0.8 * len(batch) * longest
        return GraphKey(size, min(bound, self._max_model_len), is_ragged)

    def _fill(self, key: GraphKey, batch: DecodeBatch) -> None:
        staging = self._staging[0]
        self._staging = [*self._staging[1:], staging]
        staging.copied.synchronize()
        inputs, count = staging.of(key, self._cache.block_size), len(batch)
        for name, values, padding in (
            ("token_ids", batch.token_ids, 0),
            ("sources", batch.sources, UNKNOWN),
            ("positions", batch.positions, 0),
            ("slots", batch.slots, -1),
            ("seq_lens", batch.seq_lens, 0),
        ):
            inputs[name][:count] = values
            inputs[name][count:] = padding
        tables = inputs["block_tables"]
        width = -(-int(batch.seq_lens.max()) // self._cache.block_size)
        tables[:count, :width] = batch.block_tables[batch.rows, :width]
        nbytes = _Inputs(staging.memory, key, self._cache.block_size).nbytes
        self._memory[:nbytes].copy_(staging.memory[:nbytes], non_blocking=True)
        staging.copied.record()

    def _graph(self, key: GraphKey) -> _Graph:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        return self._graphs[key]

    def _capture(self, key: GraphKey) -> _Graph:
        inputs = _Inputs(self._memory, key, self._cache.block_size)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            inputs.sources.fill_(UNKNOWN)
            for part, padding in ((inputs.token_ids, 0), (inputs.positions, 0), (inputs.slots, -1), (inputs.seq_lens, 0)):
                part.fill_(padding)
            if key.batch_size not in self._warm_sizes:
                self._forward(key, inputs)  # what is loaded at first use cannot be while a graph is captured
                self._warm_sizes.add(key.batch_size)
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which collects garbage and gives memory back each time. Threads that move KV go on meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                hidden = self._forward(key, inputs)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Graph(graph, hidden)

    def _forward(self, key: GraphKey, inputs: _Inputs) -> torch.Tensor:
        drawn = self._previous[inputs.sources.clamp_min(0)]
        token_ids = torch.where(inputs.sources < 0, inputs.token_ids, drawn)
        num_kv_tokens = key.batch_size * key.max_context // (2 if key.is_ragged else 1)
        attention = GPUDecodeAttention(inputs.block_tables, inputs.seq_lens, key.max_context, num_kv_tokens)
        metadata = AttentionMetadata(inputs.positions, inputs.slots, None, attention)
        return self._model.forward(token_ids, metadata, self._cache)
