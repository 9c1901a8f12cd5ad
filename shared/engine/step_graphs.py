"""Small steps as CUDA graphs: the hundreds of kernels of a step are launched in one call.

There are graphs for decode steps (one token for each of some requests) and for chunks (some tokens of one request). A graph serves every
step up to its size whose longest context is within its bound; what it reads stands at fixed places, which are filled in one copy. What pads
a step has no place in the KV cache: its K and V are written nowhere.
"""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.gpu_attention import GPUChunkAttention, GPUDecodeAttention
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.decode_batch import UNKNOWN, DecodeBatch
from shared.engine.kv_cache import KVCache
from shared.engine.models.causal_lm import CausalLM
from shared.engine.step_input import StepInput

logger = logging.getLogger(__name__)

CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
"""Padded tokens of a chunk. Longer ones keep the GPU busy for longer than their launches take."""
MIN_CONTEXT = 512
"""Shortest bound on the context that has graphs of its own."""
RAGGED_CONTEXT = 2048
"""From this bound on, decode batches of unlike lengths have graphs of their own: attention is divided otherwise."""
_NUM_STAGING = 3
"""Steps whose inputs may be on the way to the GPU."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Padded sizes of decode steps, at most a quarter larger than what they serve from 16 on."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, max(320, max_num_seqs) + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class GraphKey:
    num_tokens: int
    num_seqs: int
    """As many as tokens: a decode step; 1: a chunk of one request, or a decode step of one token."""
    max_context: int
    is_ragged: bool = False

    @property
    def is_chunk(self) -> bool:
        return self.num_tokens > self.num_seqs


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [num_seqs, hidden_size], written by each replay


class _Inputs:
    """The inputs of one graph within a memory that all share."""

    def __init__(self, memory: torch.Tensor, key: GraphKey, block_size: int) -> None:
        """memory: uint8, on the GPU or pinned on the host."""
        width = -(-key.max_context // block_size)
        self._start = 0
        self._memory = memory
        self.token_ids = self._take(torch.int64, key.num_tokens)
        self.sources = self._take(torch.int64, key.num_tokens)
        self.positions = self._take(torch.int64, key.num_tokens)
        self.slots = self._take(torch.int64, key.num_tokens)
        self.hidden_rows = self._take(torch.int64, key.num_seqs)
        self.query_start_loc = self._take(torch.int32, key.num_seqs + 1)
        self.seq_lens = self._take(torch.int32, key.num_seqs)
        self.block_tables = self._take(torch.int32, key.num_seqs, width)
        self.nbytes = self._start

    @staticmethod
    def max_nbytes(key: GraphKey, block_size: int) -> int:
        return 40 * key.num_tokens + key.num_seqs * (16 + 4 * -(-key.max_context // block_size)) + 8 * 16

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
        self._views: dict[GraphKey, tuple[dict[str, NDArray[np.int64 | np.int32]], int]] = {}

    def of(self, key: GraphKey, block_size: int) -> tuple[dict[str, NDArray[np.int64 | np.int32]], int]:
        """Its inputs by name, and how many bytes they take."""
        if key not in self._views:
            inputs = _Inputs(self.memory, key, block_size)
            parts = {name: part.numpy() for name, part in vars(inputs).items() if not name.startswith("_") and name != "nbytes"}
            self._views[key] = parts, inputs.nbytes
        return self._views[key]


class StepGraphs:
    """One stream and one thread at a time. What `run_...` returns is valid until the next call."""

    def __init__(self, model: CausalLM, cache: KVCache, max_num_seqs: int, max_model_len: int) -> None:
        self._model, self._cache = model, cache
        self._device = cache.tensor.device
        self._sizes = batch_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._graphs: dict[GraphKey, _Graph] = {}
        self._warm_sizes: set[tuple[int, int]] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        largest = (GraphKey(max_num_seqs, max_num_seqs, max_model_len), GraphKey(CHUNK_SIZES[-1], 1, max_model_len))
        nbytes = max(_Inputs.max_nbytes(key, cache.block_size) for key in largest)
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._previous = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._staging = [_Staging(nbytes) for _ in range(_NUM_STAGING)]

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def prepare(self) -> None:
        """Captures those that most steps need, the largest first, whose memory the others share; the rest when they are first needed."""
        start_s = time.monotonic()
        shortest = min(MIN_CONTEXT, self._max_model_len)
        for size in reversed(self._sizes):
            self._graph(GraphKey(size, size, shortest))
        for size in reversed(CHUNK_SIZES):
            bound = shortest
            while bound < self._max_model_len:
                self._graph(GraphKey(size, 1, bound))
                bound = min(2 * bound, self._max_model_len)
        logger.info("captured %d graphs in %.1f s", self.num_graphs, time.monotonic() - start_s)

    def run_decode(self, batch: DecodeBatch, previous: torch.Tensor | None) -> torch.Tensor:
        """Queues the step. The last hidden states, [len(batch), hidden_size]. `previous`: the tokens of the step before, which may be
        queued still."""
        size = self._sizes[bisect.bisect_left(self._sizes, len(batch))]
        longest = int(batch.seq_lens.max())
        bound = self._bound(longest)
        is_ragged = bound >= RAGGED_CONTEXT and int(batch.seq_lens.sum()) < 0.8 * len(batch) * longest
        key = GraphKey(size, size, bound, is_ragged)
        graph = self._graph(key)
        if previous is not None:
            self._previous[: len(previous)].copy_(previous)
        staging = self._next_staging()
        inputs, nbytes = staging.of(key, self._cache.block_size)
        _fill(inputs, len(batch), token_ids=batch.token_ids, sources=batch.sources, positions=batch.positions, slots=batch.slots)
        inputs["seq_lens"][: len(batch)] = batch.seq_lens
        inputs["seq_lens"][len(batch) :] = 0
        width = -(-longest // self._cache.block_size)
        inputs["block_tables"][: len(batch), :width] = batch.block_tables[batch.rows, :width]
        return self._replay(graph, staging, nbytes)[: len(batch)]

    def can_run_chunk(self, step: StepInput) -> bool:
        return len(step.starts) == 1 and len(step.token_ids) <= CHUNK_SIZES[-1] and step.hidden_rows in ([], [len(step.token_ids) - 1])

    def run_chunk(self, step: StepInput) -> torch.Tensor:
        """Queues a step that `can_run_chunk`. The hidden states of its hidden_rows, [0 or 1, hidden_size]."""
        count, (start,), (end,), (table,) = len(step.token_ids), step.starts, step.ends, step.block_tables
        key = GraphKey(CHUNK_SIZES[bisect.bisect_left(CHUNK_SIZES, count)], 1, self._bound(end))
        graph = self._graph(key)
        staging = self._next_staging()
        inputs, nbytes = staging.of(key, self._cache.block_size)
        positions = np.arange(start, end)
        blocks = np.array(table[: -(-end // self._cache.block_size)], np.int64)
        slots = blocks[positions // self._cache.block_size] * self._cache.block_size + positions % self._cache.block_size
        _fill(inputs, count, token_ids=np.array(step.token_ids), sources=np.full(count, UNKNOWN), positions=positions, slots=slots)
        inputs["hidden_rows"][:] = count - 1
        inputs["query_start_loc"][:] = (0, count)
        inputs["seq_lens"][:] = end
        inputs["block_tables"][0, : len(blocks)] = blocks
        return self._replay(graph, staging, nbytes)[: len(step.hidden_rows)]

    def _bound(self, longest: int) -> int:
        bound = MIN_CONTEXT
        while bound < longest:
            bound *= 2
        return min(bound, self._max_model_len)

    def _next_staging(self) -> _Staging:
        staging = self._staging[0]
        self._staging = [*self._staging[1:], staging]
        staging.copied.synchronize()
        return staging

    def _replay(self, graph: _Graph, staging: _Staging, nbytes: int) -> torch.Tensor:
        self._memory[:nbytes].copy_(staging.memory[:nbytes], non_blocking=True)
        staging.copied.record()
        graph.graph.replay()
        return graph.hidden

    def _graph(self, key: GraphKey) -> _Graph:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        return self._graphs[key]

    def _capture(self, key: GraphKey) -> _Graph:
        inputs = _Inputs(self._memory, key, self._cache.block_size)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for part, padding in (
                (inputs.token_ids, 0), (inputs.sources, UNKNOWN), (inputs.positions, 0), (inputs.slots, -1),
                (inputs.hidden_rows, 0), (inputs.query_start_loc, 0), (inputs.seq_lens, 0),
            ):  # fmt: skip
                part.fill_(padding)
            if (key.num_tokens, key.num_seqs) not in self._warm_sizes:
                self._forward(key, inputs)  # what is loaded at first use cannot be while a graph is captured
                self._warm_sizes.add((key.num_tokens, key.num_seqs))
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
        if key.is_chunk:
            batch = (inputs.block_tables, inputs.query_start_loc, inputs.seq_lens)
            chunk = GPUChunkAttention(*batch, key.num_tokens, key.max_context)
            return self._model.forward(
                inputs.token_ids, AttentionMetadata(inputs.positions, inputs.slots, inputs.hidden_rows, chunk), self._cache
            )
        drawn = self._previous[inputs.sources.clamp_min(0)]
        token_ids = torch.where(inputs.sources < 0, inputs.token_ids, drawn)
        num_kv_tokens = key.num_seqs * key.max_context // (2 if key.is_ragged else 1)
        attention = GPUDecodeAttention(inputs.block_tables, inputs.seq_lens, key.max_context, num_kv_tokens, is_even=True)
        return self._model.forward(token_ids, AttentionMetadata(inputs.positions, inputs.slots, None, attention), self._cache)


_PADDING = {"token_ids": 0, "sources": UNKNOWN, "positions": 0, "slots": -1}


def _fill(inputs: dict[str, NDArray[np.int64 | np.int32]], count: int, **values: NDArray[np.int64]) -> None:
    for name, value in values.items():
        inputs[name][:count] = value
        inputs[name][count:] = _PADDING[name]
