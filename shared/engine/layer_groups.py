"""Tells when the KV of a group of layers stands in the cache, so that it can leave while later layers run."""

from __future__ import annotations

from collections.abc import Callable

import torch

OnLayers = Callable[[int, int], None]
"""(layer_start, layer_count): the step's KV of these layers is complete in memory, and will not change."""

GPU_NUM_GROUPS = 8
"""Of an 8B model 256 KiB a block, which still copies at 39 of 55 GB/s. Fewer leave more exposed, where prefill and decode have a GPU each
(bench/kv_transfer_gpu.py --parts exposed)."""


def num_groups(setting: int | None, num_layers: int, device: torch.device) -> int:
    """None: one on a CPU, where the step and the transfer share the cores and nothing would be gained."""
    wanted = setting if setting is not None else GPU_NUM_GROUPS if device.type == "cuda" else 1
    return min(wanted, num_layers)


class LayerGroups:
    """One step. The model calls `after_layer` as it goes; on a GPU, where layers are only queued by then, `wait` reports them."""

    def __init__(self, num_layers: int, num_groups: int, device: torch.device, on_layers: OnLayers) -> None:
        """Groups of equal size but for the last, which may be smaller: the last is what a transfer leaves exposed."""
        size = -(-num_layers // num_groups)
        self._count_at_end = {min(start + size, num_layers): min(size, num_layers - start) for start in range(0, num_layers, size)}
        self._is_cuda = device.type == "cuda"
        self._on_layers = on_layers
        self._queued: list[tuple[torch.cuda.Event, int, int]] = []

    def after_layer(self, index: int) -> None:
        """Layer `index` has written its KV, or on a GPU has been queued to."""
        count = self._count_at_end.get(index + 1)
        if count is None:
            return
        if self._is_cuda:
            event = torch.cuda.Event(blocking=True)  # waiting for it leaves the core and the interpreter lock to others
            event.record()
            self._queued.append((event, index + 1 - count, count))
        else:
            self._on_layers(index + 1 - count, count)

    def wait(self) -> None:
        """Report what is queued, each group as soon as the GPU has come to its end. This is our own work, no peer's: no deadline."""
        for event, start, count in self._queued:
            event.synchronize()
            self._on_layers(start, count)
        self._queued.clear()
