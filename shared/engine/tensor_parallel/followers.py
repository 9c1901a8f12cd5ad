"""The other ranks of a tensor-parallel engine, as the first one sees them: processes of its own that repeat each of its steps."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from shared.config import Settings
from shared.engine.step_input import StepInput
from shared.engine.tensor_parallel.collectives import TIMEOUT_S, Collectives, RankLostError
from shared.engine.tensor_parallel.rank_memory import RankMemory
from shared.engine.tensor_parallel.rank_messages import ALIVE_INTERVAL_S, Kind, RankChannel, RankSetup
from shared.engine.tensor_parallel.sharding import Reduce, Shard
from shared.errors import ConfigurationError
from shared.worker.process import DIE_WITH_PARENT_VARIABLE, STATUS_FD_VARIABLE

logger = logging.getLogger(__name__)

_LOADING_TIMEOUT_S = 600.0
"""For what other ranks take longer to load than the first one, which does the same work."""
_IMPORTS_TIMEOUT_S = 120.0
"""On CPUs, until a rank says its first word: what it does before is import torch."""
_LOADING_SILENCE_S = 5.0
"""While a rank loads, a library that is opened or a machine that is busy may keep it from speaking for longer than later."""
_CLOSE_TIMEOUT_S = 2.0
_POLL_S = 0.2


class Followers:
    def __init__(
        self,
        settings: Settings,
        dtype_name: str,
        device: torch.device,
        num_blocks: int,
        max_model_len: int,
        memory: RankMemory | None = None,
    ) -> None:
        """Starts a process for each, which begins to load its part. `memory`: of the KV cache, where all share it. Raises
        ConfigurationError when there are too few GPUs."""
        self._size = settings.tensor_parallel_size
        self._device = device
        self._timeout_s = settings.kv_peer_timeout_s
        self._max_silence_s = max(_LOADING_SILENCE_S, self._timeout_s)
        self._segment = memory.segment if memory is not None else None
        self._watcher: threading.Thread | None = None
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
                memory_descriptor=self._segment.offer.fd if self._segment is not None else None,
            )
            self._start(rank, setup)

    def _start(self, rank: int, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        command = [sys.executable, "-m", "shared.engine.tensor_parallel.follower", str(theirs.fileno())]
        environ = {name: value for name, value in os.environ.items() if name != STATUS_FD_VARIABLE}
        environ[DIE_WITH_PARENT_VARIABLE] = str(os.getpid())
        inherited = [theirs.fileno()] + ([setup.memory_descriptor] if setup.memory_descriptor is not None else [])
        with theirs:
            self._processes[rank] = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=environ)
        self._channels[rank] = RankChannel(ours)
        self._tell(rank, Kind.SET_UP, setup.model_dump_json(exclude={"settings": {"api_keys"}}).encode())

    def join(self) -> Reduce:
        """Waits until all have loaded their part, which takes as long as ours did. Gives the sum over all ranks. Raises ConfigurationError
        when one of them cannot start, RankLostError when one has ended or does not go on."""
        give_up_s = time.monotonic() + _LOADING_TIMEOUT_S
        for rank in self._channels:
            self._wait_until_ready(rank, give_up_s)
        if self._segment is not None:
            try:
                self._segment.seal()
            except OSError as error:
                raise ConfigurationError(
                    f"tensor_parallel_size = {self._size} on a CPU needs memory that can be sealed against later writers (Linux 5.1): "
                    f"{error.strerror}; set it to 1"
                ) from error
        for rank in self._channels:
            self._tell(rank, Kind.CONNECT, b"")
        self._collectives = Collectives(Shard(0, self._size), self._store.port, self._device)
        if self._device.type == "cpu":
            self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
            self._watcher.start()
        return self._collectives.all_reduce

    def _wait_until_ready(self, rank: int, give_up_s: float) -> None:
        channel, heard_s, max_silence_s = self._channels[rank], time.monotonic(), _IMPORTS_TIMEOUT_S
        while True:
            self._check(rank)
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise RankLostError(f"rank {rank} of the engine has not loaded its part within {_LOADING_TIMEOUT_S:g} s")
            if self._device.type == "cpu" and now_s - heard_s > max_silence_s:
                raise RankLostError(f"rank {rank} of the engine has said nothing for {max_silence_s:g} s while it was loading")
            if not select.select([channel.sock], [], [], _POLL_S)[0]:
                continue
            message = channel.receive()
            if message is None:
                raise ConfigurationError(f"rank {rank} of the engine could not start; its reason stands above")
            if message[0] is Kind.READY:
                return
            heard_s, max_silence_s = time.monotonic(), self._max_silence_s

    def expect_answers(self) -> None:
        """From now on, with all kernels prepared, a rank on a CPU that is silent for kv_peer_timeout_s is taken for frozen and killed: then
        whoever waits for it learns so at once. Before, for longer. On GPUs a sum ends by its own deadline alone, since a kernel that is
        compiled when it is first wanted may keep a process from speaking."""
        self._max_silence_s = self._timeout_s

    def _watch(self) -> None:
        looked_s = time.monotonic()
        heard_s = dict.fromkeys(self._channels, looked_s)
        while heard_s:
            readable = select.select([self._channels[rank].sock for rank in heard_s], [], [], ALIVE_INTERVAL_S)[0]
            now_s = time.monotonic()
            if now_s - looked_s > 2 * ALIVE_INTERVAL_S:  # held up ourselves: what they said meanwhile is still to be read
                heard_s = dict.fromkeys(heard_s, now_s)
            looked_s = now_s
            for rank in list(heard_s):
                channel = self._channels[rank]
                if channel.sock not in readable:
                    if now_s - heard_s[rank] > self._max_silence_s:
                        logger.error("rank %d of the engine has said nothing for %g s; it is killed", rank, self._max_silence_s)
                        self._processes[rank].kill()
                        del heard_s[rank]
                elif not _has_spoken(channel):  # it has ended, as _check will find, or close() was called
                    del heard_s[rank]
                else:
                    heard_s[rank] = now_s

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
            with contextlib.suppress(OSError):  # closed already
                channel.sock.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()
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
            raise RankLostError(f"rank {rank} of the engine does not take its steps: {error.strerror or 'it reads nothing'}") from error

    def _check(self, rank: int) -> None:
        code = self._processes[rank].poll()
        if code is not None:
            raise RankLostError(f"rank {rank} of the engine ended with exit code {code}")


def _has_spoken(channel: RankChannel) -> bool:
    """False: the other end is gone. There is something to read."""
    try:
        return channel.receive() is not None
    except OSError:
        return False
