"""The process of a rank other than the first: loads its part of the model and repeats each step it is told of.

python -m shared.engine.tensor_parallel.follower FD      FD: a socket, whose other end the first rank holds (followers.py)
"""

from __future__ import annotations

import logging
import signal
import socket
import struct
import sys
import threading
import time

import torch

from shared.available_cpus import available_cpus
from shared.engine.device import select_kv_dtype
from shared.engine.kv_cache import KVCache
from shared.engine.model_runner import ModelRunner
from shared.engine.models.registry import build_model
from shared.engine.rotary import RotaryTables
from shared.engine.step_input import StepInput
from shared.engine.tensor_parallel.collectives import Collectives
from shared.engine.tensor_parallel.rank_memory import RankMemory
from shared.engine.tensor_parallel.rank_messages import ALIVE_INTERVAL_S, Kind, RankChannel, RankSetup
from shared.engine.tensor_parallel.sharding import Shard
from shared.engine.weights import load_weights
from shared.errors import PagewireError
from shared.model_files.model_source import resolve_model
from shared.worker.process import set_up_process

logger = logging.getLogger(__name__)


def main(descriptor: int) -> int:
    """Exit code 0: the first rank ended, or closed the engine; 1: this rank cannot go on, the reason is in the log."""
    # Ctrl-C goes to the whole group; this process ends when the first rank closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = RankChannel(socket.socket(fileno=descriptor))
    message = channel.receive()
    if message is None:
        return 0
    setup = RankSetup.model_validate_json(message[1])
    set_up_process(f"rank {setup.rank}")
    try:
        _serve(channel, setup)
    except PagewireError as error:
        logger.error("%s", error.message)
        return 1
    except Exception:
        logger.exception("rank %d cannot go on", setup.rank)
        return 1
    return 0


def _serve(channel: RankChannel, setup: RankSetup) -> None:
    settings, device = setup.settings, torch.device(setup.device)
    if device.type == "cpu":
        threading.Thread(target=_say_alive, args=(channel,), name="rank-alive", daemon=True).start()
    shard = Shard(setup.rank, settings.tensor_parallel_size)
    torch.set_num_threads(settings.num_threads or max(1, available_cpus() // shard.size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve_model(settings.model, settings.load_format, settings.max_model_len)
    dtype: torch.dtype = getattr(torch, setup.dtype)
    config = shard.config(source.config)
    weights = load_weights(source, dtype, device, shard=shard, quantization=settings.quantization)
    kv_dtype = select_kv_dtype(settings, dtype, device)
    if setup.memory_descriptor is None:
        cache = KVCache(config, setup.num_blocks, settings.block_size, kv_dtype, device)
    else:
        size_bytes = setup.num_blocks * KVCache.bytes_per_block(source.config, settings.block_size, kv_dtype.itemsize)
        memory = RankMemory.inherited(source.config, shard, setup.memory_descriptor, size_bytes)
        cache = KVCache(source.config, setup.num_blocks, settings.block_size, kv_dtype, device, ranks=memory)
    channel.send(Kind.READY)
    if channel.receive() != (Kind.CONNECT, b""):
        return
    collectives = Collectives(shard, setup.store_port, device)
    model = build_model(config, weights, RotaryTables(config, setup.max_model_len, device), collectives.all_reduce)
    runner = ModelRunner(model, cache)
    while (message := channel.receive()) is not None:
        kind, payload = message
        if kind is Kind.STEP:
            runner.forward(StepInput.unpack(payload))
        elif kind is Kind.COPY_BLOCK:
            runner.cache.copy_block(*struct.unpack("<2q", payload))
        elif kind is Kind.NEW_CACHE:
            (num_blocks,) = struct.unpack("<q", payload)
            torch.cuda.empty_cache()  # what the step of the memory profile took
            runner = ModelRunner(model, KVCache(config, num_blocks, settings.block_size, kv_dtype, device))


def _say_alive(channel: RankChannel) -> None:
    """Thread: a process that is frozen stops saying so."""
    try:
        while True:
            channel.send(Kind.ALIVE)
            time.sleep(ALIVE_INTERVAL_S)
    except OSError:
        return  # the first rank is gone, which the other thread sees too


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
