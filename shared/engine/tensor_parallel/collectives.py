"""What the ranks of one engine say to each other: sums over all of them, by NCCL on GPUs and by gloo on CPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shared.engine.tensor_parallel.sharding import Shard
from shared.errors import PagewireError

TIMEOUT_S = 20.0
"""A rank that is silent for so long in the middle of a step is dead or stopped: the others give up."""
CONNECT_TIMEOUT_S = 5.0
"""On CPUs, for all ranks to find each other: they are told to when all have loaded."""


class RankLostError(PagewireError):
    """A rank has ended, or does not answer: the engine cannot go on."""


class Collectives:
    """One for each engine; on GPUs one for each process, as NCCL's group is torch's default one."""

    def __init__(self, shard: Shard, port: int, device: torch.device) -> None:
        """Waits until all ranks are here, on CPUs; raises RankLostError. `port`: of the store that the first rank keeps on this machine."""
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        self._gloo: dist.ProcessGroupGloo | None = None
        if device.type == "cuda":
            dist.init_process_group("nccl", store=store, rank=shard.rank, world_size=shard.size, timeout=timeout)
        else:
            self._options = dist.AllreduceOptions()
            self._options.timeout = timeout
            try:
                self._gloo = dist.ProcessGroupGloo(store, shard.rank, shard.size, timedelta(seconds=CONNECT_TIMEOUT_S))
            except RuntimeError as error:
                raise RankLostError("the ranks of the engine could not connect: one of them has ended, or does not answer") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in x. Raises RankLostError when a rank is gone."""
        try:
            if self._gloo is not None:
                self._gloo.allreduce([x], self._options).wait()  # type: ignore[attr-defined]
            else:
                dist.all_reduce(x)
        except RuntimeError as error:
            if self._gloo is None and not isinstance(error, dist.DistError):
                raise  # of the device itself, by a kernel launched before
            raise RankLostError("a rank of the engine has ended, or does not answer") from error
        return x

    def close(self) -> None:
        if self._gloo is None:
            dist.destroy_process_group()
        self._gloo = None
