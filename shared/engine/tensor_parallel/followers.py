"""The other ranks of a tensor-parallel engine, as the first one sees them: processes of its own that repeat each of its steps."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from shared.config import Settings
from shared.engine.step_input import StepInput
from shared.engine.tensor_parallel.collectives import TIMEOUT_S, Collectives
from shared.engine.tensor_parallel.rank_messages import Kind, RankChannel, RankSetup
from shared.engine.tensor_parallel.sharding import Reduce, Shard
from shared.errors import ConfigurationError, PagewireError
from shared.worker.process import DIE_WITH_PARENT_VARIABLE, STATUS_FD_VARIABLE

_LOADING_TIMEOUT_S = 600.0
"""For what other ranks take longer to load than the first one, which does the same work."""
_CLOSE_TIMEOUT_S = 2.0
_POLL_S = 0.2


class RankLostError(PagewireError):
    """A rank has ended, or does not answer: the engine cannot go on."""


class Followers:
    def __init__(self, settings: Settings, dtype_name: str, device: torch.device, num_blocks: int, max_model_len: int) -> None:
        """Starts a process for each, which begins to load its part. Raises ConfigurationError when there are too few GPUs."""
        self._size = settings.tensor_parallel_size
        self._device = device
        if device.type == "cuda" and torch.cuda.device_count() < device.index + self._size:
            raise ConfigurationError(
                f"tensor_parallel_size = {self._size} from {device} on: there are {torch.cuda.device_count()} GPUs here"
            )
        self._store = dist.TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._collectives: Collectives | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, RankChannel] = {}
        for rank in range(1, self._size):
            setup = RankSetup(
                settings=settings,
                rank=rank,
                store_port=self._store.port,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                dtype=dtype_name,
                device=f"cuda:{device.index + rank}" if device.type == "cuda" else "cpu",
            )
            self._start(rank, setup)

    def _start(self, rank: int, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        command = [sys.executable, "-m", "shared.engine.tensor_parallel.follower", str(theirs.fileno())]
        environ = {name: value for name, value in os.environ.items() if name != STATUS_FD_VARIABLE}
        environ[DIE_WITH_PARENT_VARIABLE] = str(os.getpid())
        with theirs:
            self._processes[rank] = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environ)
        self._channels[rank] = RankChannel(ours)
        self._tell(rank, Kind.SET_UP, setup.model_dump_json(exclude={"settings": {"api_keys"}}).encode())

    def join(self) -> Reduce:
        """Waits until all have loaded their part, which takes as long as ours did. Gives the sum over all ranks. Raises ConfigurationError
        when one of them cannot start, RankLostError when one has ended or does not go on."""
        give_up_s = time.monotonic() + _LOADING_TIMEOUT_S
        for rank, channel in self._channels.items():
            while not select.select([channel.sock], [], [], _POLL_S)[0]:
                self._check(rank)
                if time.monotonic() > give_up_s:
                    raise RankLostError(f"rank {rank} of the engine has not loaded its part within {_LOADING_TIMEOUT_S:g} s")
            if channel.receive() != (Kind.READY, b""):
                raise ConfigurationError(f"rank {rank} of the engine could not start; its reason stands above")
        self._collectives = Collectives(Shard(0, self._size), self._store.port, self._device)
        return self._collectives.all_reduce

    def step(self, step: StepInput) -> None:
        """Raises RankLostError."""
        packed = step.pack()
        for rank in self._channels:
            self._tell(rank, Kind.STEP, packed)

    def copy_block(self, source: int, target: int) -> None:
        """Raises RankLostError."""
        for rank in self._channels:
            self._tell(rank, Kind.COPY_BLOCK, struct.pack("<2q", source, target))

    def new_cache(self, num_blocks: int) -> None:
        """Raises RankLostError."""
        for rank in self._channels:
            self._tell(rank, Kind.NEW_CACHE, struct.pack("<q", num_blocks))

    def check(self) -> None:
        """Raises RankLostError when one of them has ended."""
        for rank in self._processes:
            self._check(rank)

    def close(self) -> None:
        """They end when nobody speaks to them any more; after two seconds they are killed."""
        for channel in self._channels.values():
            channel.sock.close()
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _tell(self, rank: int, kind: Kind, payload: bytes) -> None:
        self._check(rank)
        try:
            self._channels[rank].send(kind, payload)
        except OSError as error:
            raise RankLostError(f"rank {rank} of the engine does not take its steps: {error}") from error

    def _check(self, rank: int) -> None:
        code = self._processes[rank].poll()
        if code is not None:
            raise RankLostError(f"rank {rank} of the engine ended with exit code {code}")
