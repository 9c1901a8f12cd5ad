"""What the ranks of one engine say to each other: sums over all of them, by NCCL on GPUs and by gloo on CPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shared.engine.tensor_parallel.sharding import Shard

TIMEOUT_S = 20.0
"""A rank that is silent for so long in the middle of a step is dead or stopped: the others give up."""


class Collectives:
    """One for each process."""

    def __init__(self, shard: Shard, port: int, device: torch.device) -> None:
        """Waits until all ranks are here. `port`: of the store that the first rank keeps on this machine."""
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size, timeout=timeout)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in x. Raises RuntimeError when a rank is gone."""
        dist.all_reduce(x)
        return x

    def close(self) -> None:
        dist.destroy_process_group()
