"""The KV cache of one worker: one tensor, a block contiguous over all layers, so that a block travels as one piece of memory.

Shape [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]. Ranks of an engine on a CPU share one such tensor, and each
computes some of the heads (`tensor_parallel/rank_memory.py`); on GPUs each has its own, of its heads.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from kernels.cache_ops import copy_blocks
from kernels.checked_copy import compiled_copies
from shared.config import Settings
from shared.engine.device_blocks import DeviceBlocks
from shared.engine.tensor_parallel.rank_memory import RankMemory
from shared.model_files.model_config import ModelConfig
from shared.transport.connector import BlockMemory
from shared.transport.host_blocks import HostBlocks
from shared.transport.protocol.frames import MAX_NOTICE_BYTES, KVDtype
from shared.transport.protocol.kv_layout import KVLayout
from shared.transport.wires.shared_segment import SharedSegment

logger = logging.getLogger(__name__)


class KVCache:
    """`is_shared`: other workers of this host may read it, where this system has such memory. `ranks`: where it is, if ranks share it;
    then `config` is of the whole model."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - a value, like a string
        is_shared: bool = False,
        ranks: RankMemory | None = None,
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self.block_size = block_size
        self.block_nbytes = self.bytes_per_block(config, block_size, dtype.itemsize)
        # Zeros, not empty: attention masks unused slots, and a mask does not silence a NaN. numpy's zeros come from the system
        # untouched, so a block costs memory when it is first used; torch.zeros would write all of it at start.
        self._segment: SharedSegment | None = None
        if device.type == "cuda":
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self._layers = self._views(0, config.num_kv_heads)
            return
        size_bytes = num_blocks * self.block_nbytes
        if ranks is not None:
            self._segment = ranks.segment if is_shared else None
            memory = np.frombuffer(ranks.view, np.uint8)
        else:
            self._segment = _new_segment(size_bytes) if is_shared else None
            memory = np.zeros(size_bytes, dtype=np.uint8) if self._segment is None else np.frombuffer(self._segment.view, np.uint8)
        self.tensor = torch.from_numpy(memory).view(dtype).view(shape)
        self._bytes = memory.data
        self._layers = self._views(*(ranks.heads if ranks is not None else (0, config.num_kv_heads)))

    def _views(self, first_head: int, num_heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Made once: on a CPU two views take as long as many a kernel.
        heads = slice(first_head, first_head + num_heads)
        return [(layer[:, 0, heads], layer[:, 1, heads]) for layer in self.tensor.unbind(1)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of one layer, of the heads that this rank computes: each a view [num_blocks, num_kv_heads, block_size,
        head_dim]."""
        return self._layers[index]

    def copy_block(self, source: int, target: int) -> None:
        """Copy block `source`, all layers of it, over block `target`."""
        copy_blocks(self.tensor, torch.tensor([[source, target]], device=self.tensor.device))
        if self.tensor.is_cuda:  # the source may be given back, and filled from elsewhere, as soon as this returns
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def blocks(self, layout: KVLayout, settings: Settings) -> BlockMemory:
        """The same memory, as the KV transfer reads and writes it."""
        if self.tensor.is_cuda:
            return DeviceBlocks(
                self.tensor,
                staging_nbytes=settings.kv_staging_mib << 20,
                max_chunk_nbytes=max(settings.kv_max_chunk_bytes, MAX_NOTICE_BYTES),
                is_debug=settings.debug,
                sums_on_gpu=_sums_on_gpu(settings),
            )
        segment = self._segment.offer if self._segment is not None else None
        return HostBlocks(layout, self._bytes, segment, compiled_copies())

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, itemsize: int) -> int:
        return config.kv_bytes_per_token(itemsize) * block_size


_KV_DTYPES = {
    torch.float32: KVDtype.FLOAT32,
    torch.float16: KVDtype.FLOAT16,
    torch.bfloat16: KVDtype.BFLOAT16,
    torch.float8_e4m3fn: KVDtype.FLOAT8_E4M3,
}


def hidden_state_dtype(kv_dtype: KVDtype) -> torch.dtype:
    """In which the last hidden state of a prompt travels with KV of `kv_dtype`: the engine's, and fp32 where KV in FP8 does not tell it."""
    return next((dtype for dtype, code in _KV_DTYPES.items() if code is kv_dtype and code.itemsize > 1), torch.float32)


def kv_dtype_name(dtype: torch.dtype) -> str:
    """What the KV transfer calls it."""
    return _KV_DTYPES[dtype].name.lower()


def _sums_on_gpu(settings: Settings) -> bool:
    """Two processes that compute on one GPU take turns: then each checksum makes the other wait."""
    is_own = settings.num_gpu_workers == 1 and torch.cuda.device_count() > 1
    return settings.kv_checksum_device == "cuda" or (settings.kv_checksum_device == "auto" and is_own)


def _new_segment(size_bytes: int) -> SharedSegment | None:
    try:
        return SharedSegment(size_bytes)
    except OSError as error:
        logger.info("the KV cache cannot be shared with other processes: %s", error)
        return None
