"""Ranks of a tensor-parallel engine, as processes on the CPU: together they are the engine of one."""

from __future__ import annotations

import errno
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from family_models import CASES, make_model, write_model
from lost_time import LostTime
from test_engine_core import engine_for, greedy
from test_model_families import TOLERANCE, difference, prompt_of
from tiny_models import with_changes, write_tiny_hf

from shared.batch import SchedulerOutput
from shared.config import Settings
from shared.engine import engine_core
from shared.engine.engine_core import EngineCore
from shared.engine.kv_cache import KVCache
from shared.engine.memory_profile import GRAPHS_NBYTES, MemoryProfile, largest_step
from shared.engine.model_runner import ModelRunner
from shared.engine.models.causal_lm import CausalLM
from shared.engine.step_input import StepInput
from shared.engine.tensor_parallel import collectives
from shared.engine.tensor_parallel.collectives import RankLostError
from shared.engine.tensor_parallel.followers import Followers
from shared.engine.tensor_parallel.rank_messages import Kind
from shared.engine.tensor_parallel.sharding import Shard
from shared.errors import ConfigurationError
from shared.model_files.model_config import ModelConfig
from shared.model_files.model_source import ModelSource, resolve_model
from shared.request import Request
from shared.transport.wires.shared_segment import SharedSegment

HEADER_NBYTES = 9
"""All that a message without a payload is; its first byte is the kind."""
PROMPTS = [prompt_of(length) for length in (1, 3, 13, 30)]


@contextmanager
def engine_of(size: int, source: ModelSource, model: Path, **settings: Any) -> Iterator[EngineCore]:
    own = {"model": str(model), "num_blocks": 200, "num_threads": 1, "tensor_parallel_size": size}
    # A busy machine may keep a rank from saying anything for a second or two.
    engine = engine_for(source, **{**own, "kv_peer_timeout_s": 30.0, **settings})
    try:
        yield engine
    finally:
        engine.close()


def ranks_of(engine: EngineCore) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "shared.engine.tensor_parallel.follower" in child.cmdline()]


_LONG = [("qwen2", 4), ("phi3", 2), ("gemma3", 2)]


@pytest.mark.parametrize(
    ("name", "size"), [("llama", 4), ("mixtral", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [("llama", 2), *_LONG])]
)
def test_ranks_together_give_the_logits_and_tokens_of_one(tmp_path: Path, name: str, size: int) -> None:
    """Chunks of prompts, batches, blocks from the cache; 4 ranks share 2 KV heads."""
    case = CASES[name]
    write_model(make_model(case), tmp_path)
    source = resolve_model(str(tmp_path), max_model_len=case.max_model_len)
    answers, logits = greedy(engine_for(source, num_blocks=200, num_threads=1), PROMPTS, 8)
    with engine_of(size, source, tmp_path) as engine:
        assert len(ranks_of(engine)) == size - 1
        for _ in range(2):
            found, rows = greedy(engine, PROMPTS, 8)
            assert found == answers
            assert max(difference(ours, theirs) for ours, theirs in zip(rows, logits, strict=True)) < TOLERANCE
        assert engine.manager.num_hit_tokens > 0
    assert ranks_of(engine) == []


@pytest.fixture
def llama(tmp_path: Path) -> tuple[ModelSource, Path]:
    write_model(make_model(CASES["llama"]), tmp_path)
    return resolve_model(str(tmp_path)), tmp_path


def test_ranks_take_part_in_the_memory_profile_and_get_the_cache_that_it_gives(
    llama: tuple[ModelSource, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where each has a cache of its own, whose size is known last; what is free is made up here."""
    source, path = llama
    expected, _ = greedy(engine_for(source, num_blocks=200, num_threads=1), PROMPTS, 4)
    room_nbytes = 200 * KVCache.bytes_per_block(source.config, 4, 4)

    def profile(model: CausalLM, settings: Settings, max_model_len: int, cache: KVCache, before_step: Any) -> MemoryProfile:
        step = largest_step(settings.max_num_batched_tokens, settings.max_num_seqs, max_model_len, settings.block_size)
        before_step(step)
        ModelRunner(model, cache).forward(step)
        return MemoryProfile(1 << 40, room_nbytes + GRAPHS_NBYTES, 0, 0)

    monkeypatch.setattr(EngineCore, "is_kv_whole", False)
    monkeypatch.setattr(EngineCore, "_asked_num_blocks", lambda _self: None)
    monkeypatch.setattr(engine_core, "profile_memory", profile)
    with engine_of(2, source, path) as engine:
        assert len(engine.manager.pool.blocks) == 2 * 200, "each rank has half of the heads"
        assert greedy(engine, PROMPTS, 4)[0] == expected


def test_ranks_with_fp8_weights_are_the_model_that_one_rank_is(llama: tuple[ModelSource, Path]) -> None:
    """Their blocks have the same hashes, so a share of a row has the factor of the whole row."""
    source, path = llama
    _, wanted = greedy(engine_for(source, num_blocks=200, num_threads=1, quantization="fp8"), PROMPTS, 1)
    with engine_of(2, source, path, quantization="fp8") as engine:
        _, found = greedy(engine, PROMPTS, 1)
    assert max(difference(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)) < TOLERANCE


def test_a_system_that_cannot_seal_what_ranks_share_is_told_what_to_do(
    llama: tuple[ModelSource, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_segment: SharedSegment) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(SharedSegment, "seal", refuse)
    source, path = llama
    with pytest.raises(ConfigurationError, match=r"sealed.*set it to 1"), engine_of(2, source, path):
        pass


def test_a_block_that_is_copied_is_copied_on_every_rank(llama: tuple[ModelSource, Path]) -> None:
    """Two sequences that go on from one prompt each get their own last block."""
    source, path = llama
    prompt = prompt_of(9)

    def fork(engine: EngineCore) -> torch.Tensor:
        request = Request("parent", list(prompt), arrival_s=0.0, deadline_at_s=1e9)
        engine.scheduler.add(request)
        while request.num_computed_tokens != len(prompt):
            output = engine.schedule()
            assert output is not None
            engine.run(output)
        child = request.fork("child", 1)
        engine.manager.fork("parent", "child")
        child.num_computed_tokens = request.num_computed_tokens
        engine.scheduler.add_running(child)
        rows = []
        for step in range(4):
            for number, sequence in enumerate((request, child)):
                sequence.token_ids.append(5 + 3 * step + 7 * number)
            output = engine.schedule()
            assert output is not None
            result = engine.run(output)
            rows.append(engine.runner.compute_logits(result.hidden))
        return torch.cat(rows)

    expected = fork(engine_for(source, num_blocks=200, num_threads=1))
    with engine_of(2, source, path) as engine:
        assert difference(fork(engine), expected) < TOLERANCE


def test_a_block_comes_back_from_host_memory_for_every_rank(llama: tuple[ModelSource, Path]) -> None:
    source, path = llama
    prompts = [prompt_of(40), [5, *prompt_of(40)]]
    names = (f"request {number}" for number in itertools.count())

    def logits_after(engine: EngineCore, prompt: list[int]) -> torch.Tensor:
        request = Request(next(names), list(prompt), arrival_s=0.0, deadline_at_s=1e9)
        engine.scheduler.add(request)
        give_up_s = time.monotonic() + 60
        while request.num_computed_tokens != len(prompt):
            output = engine.schedule()
            if output is not None:
                result = engine.run(output)
            assert time.monotonic() < give_up_s, "the copy from host memory does not end"
        engine.scheduler.remove(request.request_id)
        return engine.runner.compute_logits(result.hidden)

    alone = engine_for(source, num_blocks=200, num_threads=1)
    expected = [logits_after(alone, prompt) for prompt in prompts]
    with engine_of(2, source, path, num_blocks=14, kv_host_cache_gib=0.001) as engine:
        for index in (0, 1, 0):  # the second takes the blocks of the first
            assert difference(logits_after(engine, prompts[index]), expected[index]) < TOLERANCE
        assert engine.manager.num_host_hit_tokens > 0


def test_a_chunk_of_which_no_row_is_wanted_ends_when_all_ranks_have_written_its_kv(tmp_path: Path) -> None:
    """Its blocks leave at once, with the heads of all ranks. In a model of one layer nothing else makes the first rank wait."""
    write_tiny_hf(tmp_path, with_changes(num_layers=1))
    source = resolve_model(str(tmp_path))
    with engine_of(2, source, tmp_path, max_num_batched_tokens=8) as engine:
        [rank] = ranks_of(engine)
        engine.scheduler.add(Request("1", prompt_of(20), arrival_s=0.0, deadline_at_s=1e9))
        output = engine.schedule()
        assert output is not None and not output.scheduled[0].completes
        os.kill(rank.pid, signal.SIGSTOP)
        step = threading.Thread(target=engine.run, args=(output,))
        step.start()
        step.join(0.5)
        assert step.is_alive(), "the step has ended without the other rank"
        os.kill(rank.pid, signal.SIGCONT)
        step.join(60)
        assert not step.is_alive()
        first, second = engine.cache.tensor[engine.manager.block_ids("1")[0]].unbind(2)
        assert bool(first.any()) and bool(second.any())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_whose_rank_is_gone_or_frozen_says_so_in_time(llama: tuple[ModelSource, Path], number: signal.Signals) -> None:
    source, path = llama
    with engine_of(2, source, path, kv_peer_timeout_s=1.5) as engine:
        [rank] = ranks_of(engine)
        os.kill(rank.pid, number)
        engine.scheduler.add(Request("1", prompt_of(9), arrival_s=0.0, deadline_at_s=1e9))
        output = engine.schedule()
        assert isinstance(output, SchedulerOutput)
        with LostTime() as lost:
            start_s = time.monotonic()
            with pytest.raises(RankLostError, match=r"^(a rank|rank 1) of the engine [\w ,-]+$"):  # no word of the library below
                engine.run(output)
            assert time.monotonic() - start_s < 2.5 + lost.so_far_s
        assert engine.is_broken
    assert not rank.is_running()


def test_an_interrupt_at_the_terminal_leaves_it_to_the_first_rank_to_end(llama: tuple[ModelSource, Path]) -> None:
    source, path = llama
    with engine_of(2, source, path) as engine:
        [rank] = ranks_of(engine)
        os.kill(rank.pid, signal.SIGINT)
        assert len(greedy(engine, PROMPTS[:1], 2)[0][0]) == 2
        engine.check_ranks()


def test_a_rank_ends_when_the_first_one_is_killed(llama: tuple[ModelSource, Path]) -> None:
    _, path = llama
    root = Path(__file__).parents[3]
    script = f"""
import sys, time
sys.path[:0] = [{str(root / "tests/unit/engine")!r}, {str(root / "tests/support")!r}]
from shared.config import Settings
from shared.engine.engine_core import EngineCore
from shared.model_files.model_source import resolve_model
settings = Settings(model={str(path)!r}, num_blocks=20, tensor_parallel_size=2, num_threads=1)
engine = EngineCore(resolve_model({str(path)!r}), settings, lambda *_: None, lambda *_: None)
print("ready", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    killer = threading.Timer(240, process.kill)
    killer.start()
    assert process.stdout.readline() == "ready\n"
    ranks = [child for child in psutil.Process(process.pid).children() if "shared.engine.tensor_parallel.follower" in child.cmdline()]
    assert len(ranks) == 1
    process.kill()
    process.wait()
    killer.cancel()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


def test_a_rank_that_cannot_start_ends_the_start(llama: tuple[ModelSource, Path]) -> None:
    source, path = llama
    # The first rank has the source already; the others look for it where the settings say.
    with pytest.raises((ConfigurationError, RankLostError), match="rank 1"), engine_of(2, source, path / "nowhere"):
        pass
    assert ranks_of(None) == []  # type: ignore[arg-type]


@contextmanager
def rank_that_loads(model: Path) -> Iterator[tuple[Followers, psutil.Process]]:
    """The second of two, which has said its first word."""
    settings = Settings(model=str(model), num_blocks=20, tensor_parallel_size=2, num_threads=1)
    started = Followers(settings, "float32", torch.device("cpu"), 20, 64)
    try:
        assert select.select([started._channels[1].sock], [], [], 60)[0]
        yield started, psutil.Process(started._processes[1].pid)
    finally:
        started.close()


def test_a_rank_that_has_loaded_connects_when_all_have(llama: tuple[ModelSource, Path]) -> None:
    """However much longer another takes: one that compiles kernels at the very first start, say."""
    with rank_that_loads(llama[1]) as (started, rank):
        num_keys = started._store.num_keys()
        while started._channels[1].receive() != (Kind.READY, b""):
            pass
        time.sleep(0.5)
        assert started._store.num_keys() == num_keys and rank.is_running(), "it waits for the others with a deadline running"


def test_a_rank_frozen_while_it_loads_is_given_up_soon_and_a_slow_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    loads_for_ever = """
import socket, sys
from shared.engine.tensor_parallel.follower import _say_alive
from shared.engine.tensor_parallel.rank_messages import RankChannel
_say_alive(RankChannel(socket.socket(fileno=int(sys.argv[1]))))
"""
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", loads_for_ever, command[-1]], **more))
    with rank_that_loads(tmp_path) as (started, rank):
        started._max_silence_s = 2.0
        error: list[RankLostError] = []

        def join() -> None:
            with pytest.raises(RankLostError, match="rank 1 of the engine has said nothing for 2 s") as raised:
                started.join()
            error.append(raised.value)

        joining = threading.Thread(target=join)
        joining.start()
        joining.join(3.0)
        assert joining.is_alive(), "it is slow and speaks"
        rank.suspend()
        joining.join(10.0)
        assert error


def test_a_rank_frozen_before_it_connects_is_given_up_soon(llama: tuple[ModelSource, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CONNECT_TIMEOUT_S", 1.0)
    with rank_that_loads(llama[1]) as (started, rank):
        while Kind.READY not in started._channels[1].sock.recv(1 << 16, socket.MSG_PEEK)[::HEADER_NBYTES]:
            time.sleep(0.05)
        rank.suspend()
        start_s = time.monotonic()
        with pytest.raises(RankLostError, match="the ranks of the engine could not connect"):
            started.join()
        assert time.monotonic() - start_s < 10.0


def test_a_rank_frozen_in_the_first_steps_ends_the_start_soon(llama: tuple[ModelSource, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = llama
    warm_up = EngineCore._warm_up
    frozen_s: list[float] = []

    def freeze_first(engine: EngineCore) -> None:
        assert engine._followers is not None
        engine._followers._max_silence_s = 1.0
        os.kill(engine._followers._processes[1].pid, signal.SIGSTOP)
        frozen_s.append(time.monotonic())
        warm_up(engine)

    monkeypatch.setattr(EngineCore, "_warm_up", freeze_first)
    with pytest.raises(RankLostError), engine_of(2, source, path):
        pass
    assert time.monotonic() - frozen_s[0] < 10.0


@pytest.mark.parametrize(("size", "match"), [(3, "4 query heads"), (8, "4 query heads"), (5, "choose a divisor of 4")])
def test_a_model_that_cannot_be_shared_evenly_is_refused(llama: tuple[ModelSource, Path], size: int, match: str) -> None:
    source, path = llama
    with pytest.raises(ConfigurationError, match=match), engine_of(size, source, path):
        pass


def test_parts_of_a_weight_make_up_the_whole() -> None:
    config = small_config()
    query = torch.arange(config.num_heads * config.head_dim * 3.0).view(-1, 3)
    parts = [Shard(rank, 2).part_of("model.layers.0.self_attn.q_proj.weight", query, config) for rank in range(2)]
    assert torch.equal(torch.cat(parts), query)
    bias = torch.ones(8)
    biases = [Shard(rank, 2).part_of("model.layers.0.mlp.down_proj.bias", bias, config) for rank in range(2)]
    assert torch.equal(sum(biases), bias)
    heads = torch.arange(config.num_kv_heads).repeat_interleave(config.head_dim)
    held = [Shard(rank, 4).part_of("model.layers.0.self_attn.k_proj.weight", heads, config).unique().tolist() for rank in range(4)]
    assert held == [[0], [0], [1], [1]]


def small_config() -> ModelConfig:
    return ModelConfig(
        architecture="llama", num_layers=1, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=32,
        tokenizer_vocab_size=32, max_model_len=64, rope_theta=1e4, rms_norm_eps=1e-5,
    )  # fmt: skip


def test_a_step_arrives_as_it_was_sent() -> None:
    step = StepInput([5, 6, 7], [0, 9], [2, 10], [[3], [1, 4, 1]], [1, 2])
    assert StepInput.unpack(step.pack()) == step
