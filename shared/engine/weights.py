"""Model weights as torch tensors under Hugging Face's Llama names, from GGUF or safetensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shared.available_memory import available_memory_bytes
from shared.engine.dummy_weights import dummy_weight
from shared.engine.tensor_parallel.sharding import Shard
from shared.model_files.model_source import ModelSource
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_names import ExpectedWeight, expected_weights
from shared.model_files.weight_reader import NUM_LOADING_THREADS, PendingWeights, check_fits, read_weight, start_loading

_SAME_TYPE = {"F16": torch.float16, "BF16": torch.bfloat16}


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None: unknown."""
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    return available_memory_bytes()


def _check_fits(source: ModelSource, dtype: torch.dtype, device: torch.device, shard: Shard | None) -> None:
    where = "GPU memory" if device.type == "cuda" else "memory"
    # On a CPU the ranks share what is free; each GPU has its own.
    num_ranks = shard.size if shard is not None and device.type == "cuda" else 1
    check_fits(source, dtype.itemsize / num_ranks, available_bytes(device), where)


def _load_one(
    source: ModelSource, expected: ExpectedWeight, stored: StoredTensor, dtype: torch.dtype, device: torch.device, shard: Shard | None
) -> tuple[str, torch.Tensor]:
    if source.format == "safetensors" and _SAME_TYPE.get(stored.type_name) is dtype:
        # Already what is wanted: no way round through float32. The copy detaches it from the read-only map.
        tensor = torch.from_numpy(np.array(stored.data).view(np.int16)).view(dtype).reshape(expected.shape)
    else:
        tensor = torch.from_numpy(read_weight(source, expected, stored)).to(dtype)
    if shard is not None:
        tensor = shard.part_of(expected.name, tensor, source.config)
    return expected.name, tensor.to(device)


def load_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
    pending: PendingWeights | None = None,
    shard: Shard | None = None,
) -> dict[str, torch.Tensor]:
    """Name -> tensor; `lm_head.weight` is absent when it is tied to the embedding.

    `pending`: float32 weights already being read (`start_loading`), wrapped without a copy when float32 on the CPU is wanted.
    Otherwise tensors are converted one by one, so at most a few are held in float32. `progress`: 0..1. `shard`: only what it holds.
    Raises ModelLoadError when the weights cannot fit in memory.
    """
    device = torch.device(device)
    if source.format == "dummy":
        _check_fits(source, dtype, device, shard)
        whole = ((w.name, dummy_weight(w, seed, dtype, device)) for seed, w in enumerate(expected_weights(source.config)))
        return {name: weight if shard is None else shard.part_of(name, weight, source.config) for name, weight in whole}
    if pending is None and shard is None and dtype is torch.float32 and device.type == "cpu":
        pending = start_loading(source, progress)
    if pending is not None:
        arrays = pending.result()
        return {name: torch.from_numpy(arrays.pop(name)).to(device=device, dtype=dtype) for name in list(arrays)}
    _check_fits(source, dtype, device, shard)
    pairs = list(source.weights())
    num_elements, num_done = source.num_parameters, 0
    weights: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(NUM_LOADING_THREADS) as pool:
        loaded = pool.map(lambda pair: _load_one(source, pair[0], pair[1], dtype, device, shard), pairs)
        for name, tensor in loaded:
            weights[name] = tensor
            num_done += tensor.numel() * (1 if shard is None else shard.size)
            if progress is not None:
                progress(min(1.0, num_done / num_elements))
    return weights
