"""The engine both services share: block pool, scheduler and model. A step is schedule, run, and what the service does then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kernels import (
    cpu_attention,
    cpu_decoder_layer,
    cpu_elementwise,
    cpu_rotary_embedding,
    cpu_sampling,
    engine_libraries,
    gpu_attention,
    sampling,
)
from kernels.checked_copy import compiled_copies
from shared.available_cpus import available_cpus
from shared.batch import ScheduledRequest, SchedulerOutput
from shared.block_hash import BlockHash
from shared.cache.block_pool import BlockPool
from shared.cache.host_tier import HostTier
from shared.cache.kv_cache_manager import KVCacheManager, cdiv
from shared.cache.prefix_index import Tier
from shared.config import CPU_KV_CACHE_GIB, Settings
from shared.engine.decode_batch import UNKNOWN, BlockTableRows
from shared.engine.device import default_dtype, select_device, select_kv_dtype
from shared.engine.host_block_store import new_host_block_store
from shared.engine.kv_cache import KVCache, kv_dtype_name
from shared.engine.layer_groups import OnLayers, num_groups
from shared.engine.memory_profile import PROFILE_NUM_BLOCKS, profile_memory
from shared.engine.model_runner import ModelRunner
from shared.engine.models.causal_lm import CausalLM
from shared.engine.models.registry import build_model
from shared.engine.overlapped_decode import DecodedStep, LaunchedStep, OverlappedDecode, decode_batch, is_decode
from shared.engine.prompt_logprobs import score_prompts
from shared.engine.rotary import RotaryTables
from shared.engine.step_graphs import StepGraphs
from shared.engine.step_input import StepInput
from shared.engine.tensor_parallel.followers import Followers
from shared.engine.tensor_parallel.rank_memory import RankMemory
from shared.engine.tensor_parallel.sharding import Shard
from shared.engine.weights import available_bytes, cpu_storage, load_for_cpu, load_weights
from shared.errors import ConfigurationError
from shared.messages import PromptLogprobs
from shared.model_files.model_config import ModelConfig
from shared.model_files.model_source import ModelSource
from shared.model_files.weight_reader import PendingWeights
from shared.request import Request
from shared.scheduler import Scheduler, SchedulerLimits
from shared.startup_phase import startup_phase
from shared.transport.protocol.kv_format import KVFormat

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (16, 128)
"""Sizes of the two steps that calibrate the step-time model."""
GPU_WARM_UP_TOKENS = (256, 2048)
"""The same where fewer tokens than a few hundred take no less time."""
MAX_STORED_NBYTES_PER_STEP = 128 << 20
"""Of evicted blocks, to host memory: 25 ms of a core, which makes the copies beside a CPU engine (more while the memory is new)."""
LOAD_OVERHEAD_S = 2e-3
"""Of a copy from host memory, whatever its size: a turn of the engine that the request misses."""
LOAD_BYTES_PER_S = 25e9
"""Of the 50e9 over PCIe, which evicted blocks want too."""


@dataclass(frozen=True)
class StepResult:
    output: SchedulerOutput
    hidden: torch.Tensor
    """[num_completing, hidden_size]: one row for each scheduled request that is complete, in order."""
    prompt_logprobs: list[PromptLogprobs]
    start_ns: int
    end_ns: int

    def completed(self) -> list[Request]:
        return [row.request for row in self.output.scheduled if row.completes]


class EngineCore:
    """Single-threaded but for `manager`, which has its own lock."""

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        on_cached: Callable[[Iterable[BlockHash], Tier], None],
        on_evicted: Callable[[Iterable[BlockHash]], None],
        progress: Callable[[float], None] | None = None,
        pending: PendingWeights | None = None,
        is_cache_shared: bool = False,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_cache_shared`: other processes of this host may read the KV cache. `on_loaded`, on any thread: see KVCacheManager."""
        self.settings = settings
        self.config = source.config
        self.shard = Shard(0, settings.tensor_parallel_size) if settings.tensor_parallel_size > 1 else None
        self._rank_config = self.config if self.shard is None else self.shard.config(self.config)
        self.device = select_device(settings, self._rank_config)
        self.dtype = default_dtype(self.device) if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.kv_dtype = select_kv_dtype(settings, self.dtype, self.device)
        torch.set_num_threads(settings.num_threads or max(1, available_cpus() // settings.tensor_parallel_size))
        num_blocks = self._asked_num_blocks()
        self.max_model_len = min(self.config.max_model_len, settings.max_model_len or self.config.max_model_len)
        if num_blocks is not None:
            self.max_model_len = min(self.max_model_len, num_blocks * settings.block_size)
        self._followers: Followers | None = None
        self._rank_memory: RankMemory | None = None
        if self.shard is not None:
            first_num_blocks = PROFILE_NUM_BLOCKS if num_blocks is None else num_blocks
            if self.is_kv_whole:
                self._rank_memory = RankMemory.new(self.config, self.shard, first_num_blocks * self._block_nbytes)
            self._followers = Followers(settings, self.dtype_name, self.device, first_num_blocks, self.max_model_len, self._rank_memory)
        self.is_broken = False
        """A rank may have stopped in the middle of a step: no other can be computed."""
        try:
            self._set_up(source, num_blocks, on_cached, on_evicted, progress, pending, is_cache_shared, on_loaded)
        except BaseException:
            if self._followers is not None:
                self._followers.close()
            raise

    def _set_up(
        self,
        source: ModelSource,
        num_blocks: int | None,
        on_cached: Callable[[Iterable[BlockHash], Tier], None],
        on_evicted: Callable[[Iterable[BlockHash]], None],
        progress: Callable[[float], None] | None,
        pending: PendingWeights | None,
        is_cache_shared: bool,
        on_loaded: Callable[[], None],
    ) -> None:
        settings = self.settings
        with ThreadPoolExecutor(1) as builder:  # a compiler's few seconds, where the kernel was never built, beside the weights
            builder.submit(compiled_copies)
            if self.device.type == "cpu":
                builder.submit(cpu_attention.prepare, self.dtype, self.config.head_dim)
                builder.submit(cpu_rotary_embedding.prepare, self.dtype)
                builder.submit(cpu_sampling.prepare)
                builder.submit(cpu_elementwise.prepare)
                builder.submit(cpu_decoder_layer.prepare)
            else:
                builder.submit(engine_libraries.prepare, self.config.head_dim, self.dtype, self.kv_dtype)
            storage = cpu_storage(settings, self.dtype, self.device)
            with startup_phase("the weights"):
                if storage is None:
                    weights = load_weights(source, self.dtype, self.device, progress, pending, self.shard, settings.quantization)
                else:
                    weights = load_for_cpu(source, storage, progress, pending)
        if num_blocks is not None:
            self._check_room(num_blocks)
        reduce = self._followers.join() if self._followers is not None else None
        with startup_phase("the model"):
            model = build_model(self._rank_config, weights, RotaryTables(self.config, self.max_model_len, self.device), reduce)
        if num_blocks is None:
            with startup_phase("the memory profile"):
                num_blocks = self._profiled_num_blocks(model)
        with startup_phase("the KV cache"):
            self.cache = KVCache(
                self._cache_config, num_blocks, settings.block_size, self.kv_dtype, self.device, is_cache_shared, self._rank_memory
            )
        self.root = KVFormat(self.kv_dtype_name, settings.block_size, settings.kv_wire_dtype).root(source.fingerprint)
        host_tier = self._new_host_tier()
        pool = BlockPool(num_blocks, lambda h, tier: on_cached([h], tier), lambda h: on_evicted([h]), host_tier)
        self.manager = KVCacheManager(
            pool,
            settings.block_size,
            self.root,
            settings.enable_prefix_caching,
            self._copy_block,
            host_tier,
            self._is_worth_loading,
            on_loaded,
        )
        self.scheduler = Scheduler(
            self.manager,
            SchedulerLimits(
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                max_step_s=settings.max_step_ms / 1000,
                block_size=settings.block_size,
            ),
        )
        self.num_layer_groups = num_groups(settings.kv_layer_groups, self.config.num_layers, self.device)
        graphs = self._new_graphs(model)
        self.runner = ModelRunner(model, self.cache, self.num_layer_groups, graphs)
        self._tables = BlockTableRows(self.manager, settings.max_num_seqs, cdiv(self.max_model_len, settings.block_size))
        self.overlapped: OverlappedDecode | None = None
        """Where steps may be queued while others run."""
        is_overlapped = settings.async_scheduling if settings.async_scheduling is not None else self.device.type == "cuda"
        if is_overlapped and self.shard is None:
            self.overlapped = OverlappedDecode(self.manager, self.scheduler, self.runner, self._tables, self.max_model_len)
        self.num_steps = 0
        with startup_phase("the first steps"):
            self._warm_up()
        if self._followers is not None:
            self._followers.expect_answers()
        if self.device.type == "cuda":
            logger.info("with all prepared %d MiB of the GPU are free", (available_bytes(self.device) or 0) >> 20)

    @property
    def is_kv_whole(self) -> bool:
        """All heads of a block stand in memory of this process, as the KV transfer wants them: not where ranks are on several GPUs."""
        return self.shard is None or self.device.type == "cpu"

    @property
    def _cache_config(self) -> ModelConfig:
        """Of a model that has the heads of which `cache` has the KV."""
        return self.config if self.is_kv_whole else self._rank_config

    def _new_graphs(self, model: CausalLM) -> StepGraphs | None:
        # fp32 is the exact mode, whose attention is the prefill kernel's; sums over ranks are not captured.
        is_capturable = self.device.type == "cuda" and self.dtype is not torch.float32 and model.is_capturable and self.shard is None
        if not is_capturable or self.settings.enforce_eager:
            return None
        return StepGraphs(model, self.cache, self.settings.max_num_seqs, self.max_model_len)

    def _asked_num_blocks(self) -> int | None:
        """None: as many as the GPU has room for. kv_cache_gib is of each rank."""
        settings = self.settings
        if settings.num_blocks is not None:
            return settings.num_blocks
        if settings.kv_cache_gib is None and self.device.type == "cuda":
            return None
        block_nbytes = KVCache.bytes_per_block(self._rank_config, settings.block_size, self.kv_dtype.itemsize)
        gib = settings.kv_cache_gib or CPU_KV_CACHE_GIB
        num_blocks = int(gib * (1 << 30)) // block_nbytes
        if num_blocks < 2:
            raise ConfigurationError(f"kv_cache_gib = {gib} holds {num_blocks} blocks of {block_nbytes >> 10} KiB; 2 are the least")
        return num_blocks

    def _profiled_num_blocks(self, model: CausalLM) -> int:
        """Ends with a model whose longest sequence fits into them."""
        settings = self.settings
        cache = KVCache(self._rank_config, PROFILE_NUM_BLOCKS, settings.block_size, self.kv_dtype, self.device)
        before_step = self._followers.step if self._followers is not None else lambda _step: None
        profile = profile_memory(model, settings, self.max_model_len, cache, before_step)
        num_blocks = profile.num_blocks(self._block_nbytes, settings.gpu_memory_utilization, settings.num_gpu_workers)
        if self._followers is not None:
            self._followers.new_cache(num_blocks)
        self.max_model_len = min(self.max_model_len, num_blocks * settings.block_size)
        logger.info("%d KV blocks of %d KiB by %s", num_blocks, self._block_nbytes >> 10, profile)
        return num_blocks

    @property
    def kv_dtype_name(self) -> str:
        """As KVFormat names it."""
        return kv_dtype_name(self.kv_dtype)

    @property
    def _block_nbytes(self) -> int:
        return KVCache.bytes_per_block(self._cache_config, self.settings.block_size, self.kv_dtype.itemsize)

    def _check_room(self, num_blocks: int) -> None:
        available, needed = available_bytes(self.device), num_blocks * self._block_nbytes
        if available is not None and needed > available:
            raise ConfigurationError(
                f"a KV cache of {num_blocks} blocks takes {needed >> 20} MiB and {available >> 20} MiB are free on the "
                f"{self.device.type}; set PAGEWIRE_KV_CACHE_GIB or PAGEWIRE_NUM_BLOCKS lower"
            )

    def _copy_block(self, source: int, target: int) -> None:
        if self._followers is not None and not self.is_kv_whole:
            self._followers.copy_block(source, target)
        self.cache.copy_block(source, target)

    def check_ranks(self) -> None:
        """Raises RankLostError when another rank has ended."""
        if self._followers is not None:
            self._followers.check()

    def _new_host_tier(self) -> HostTier | None:
        settings = self.settings
        if not settings.kv_host_cache_gib:
            return None
        if not settings.enable_prefix_caching:
            raise ConfigurationError("kv_host_cache_gib is of no use with enable_prefix_caching off: blocks are found by their hash")
        if not self.is_kv_whole:
            raise ConfigurationError(
                "kv_host_cache_gib does not go with tensor_parallel_size on GPUs: only the first rank's heads would be kept"
            )
        store = new_host_block_store(self.cache.tensor, int(settings.kv_host_cache_gib * (1 << 30)))
        max_blocks_per_step = max(1, MAX_STORED_NBYTES_PER_STEP // self.cache.block_nbytes)
        executor = ThreadPoolExecutor(1, thread_name_prefix="kv-host-load")
        return HostTier(store, executor, max_blocks_per_step, checks_contents=settings.debug)

    def _is_worth_loading(self, num_blocks: int) -> bool:
        """On a CPU always: computing a block takes a hundred times as long as copying it (bench/host_tier.py)."""
        step_time = self.scheduler.step_time
        if self.device.type == "cpu" or not step_time.is_calibrated:
            return True
        compute_s = step_time.predict_s(num_blocks * self.settings.block_size) - step_time.predict_s(0)
        return LOAD_OVERHEAD_S + num_blocks * self.cache.block_nbytes / LOAD_BYTES_PER_S < compute_s

    def _warm_up(self) -> None:
        """Prompts through the model before anyone waits for one; their times are the scheduler's first estimate."""
        longest = min(self.max_model_len, self.settings.max_num_batched_tokens)
        sizes = GPU_WARM_UP_TOKENS if self.device.type == "cuda" else WARM_UP_TOKENS
        small, large = max(1, min(sizes[0], longest - 1)), min(sizes[1], longest)
        if self.device.type == "cuda":
            with startup_phase("kernels and graphs"):
                self._prepare_gpu_kernels()
        self._time_step(large)
        timings = [(num_tokens, min(self._time_step(num_tokens) for _ in range(2))) for num_tokens in (small, large)]
        self.manager.num_queried_tokens = self.manager.num_hit_tokens = 0
        if small < large:
            self.scheduler.step_time.calibrate(*timings)

    def _prepare_gpu_kernels(self) -> None:
        """Compile and load what requests would otherwise wait for."""
        config = self._rank_config
        row_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        rows = torch.zeros(1, row_size, dtype=self.dtype, device=self.device)
        query = rows[:, : config.num_heads * config.head_dim].view(1, config.num_heads, config.head_dim)
        if self.runner.graphs is not None:
            with torch.inference_mode():
                self.runner.graphs.prepare()
        for window in {config.sliding_window(layer) for layer in range(config.num_layers)}:
            gpu_attention.prepare(query, *self.cache.layer(0), sliding_window=window, soft_cap=config.attention_soft_cap)

    def _time_step(self, num_tokens: int) -> float:
        request = Request("warm-up", [0] * num_tokens, arrival_s=0.0, deadline_at_s=0.0)
        if self.manager.reserve(request) is None:
            raise ConfigurationError("the KV cache is too small for one prompt; raise PAGEWIRE_NUM_BLOCKS")
        try:
            start_s = time.monotonic()
            hidden = self._forward(SchedulerOutput([ScheduledRequest(request, 0, num_tokens)]))
            sampling.greedy_tokens(self.runner.compute_logits(hidden))
            self.runner.wait()
            return time.monotonic() - start_s
        finally:
            self.manager.free(request.request_id)

    def _forward(self, output: SchedulerOutput, on_layers: OnLayers | None = None) -> torch.Tensor:
        """The last hidden states of the requests that complete, then those to score."""
        if self.runner.graphs is not None and on_layers is None and self._is_decode_batch(output):
            token_ids = np.array([row.request.token_ids[row.start] for row in output.scheduled], np.int64)
            sources = np.full(len(token_ids), UNKNOWN, np.int64)
            return self.runner.decode(decode_batch(self._tables, output.scheduled, token_ids, sources, self.settings.block_size))
        step = StepInput.of(output, [self.manager.block_ids(row.request.request_id) for row in output.scheduled])
        if self._followers is None:
            return self.runner.forward(step, on_layers)
        try:
            self._followers.step(step)
            return self.runner.forward(step, on_layers)
        except BaseException:
            self.is_broken = True
            raise

    def schedule(self) -> SchedulerOutput | None:
        """None when nothing can run now."""
        self.manager.begin_step()
        output = self.scheduler.schedule()
        return output if output is not None and output.scheduled else None

    def run(self, output: SchedulerOutput, on_layers: OnLayers | None = None) -> StepResult:
        """Compute what was scheduled and book it. `on_layers`: see ModelRunner.forward."""
        start_ns, start_s = time.time_ns(), time.monotonic()
        hidden = self._forward(output, on_layers)
        num_completing = sum(row.completes for row in output.scheduled)
        scored = [row for row in output.scheduled if row.scored_positions]
        hidden, to_score = hidden[:num_completing], hidden[num_completing:]
        prompt_logprobs = score_prompts(to_score, scored, self.runner.compute_logits, self.config.tokenizer_vocab_size)
        self.runner.wait()  # whoever gives blocks back after this knows that nothing reads or writes them any more
        self.scheduler.update(output, time.monotonic() - start_s)
        self.num_steps += 1
        if self.settings.debug:
            self.manager.check_invariants()
        return StepResult(output, hidden, prompt_logprobs, start_ns, time.time_ns())

    def collect(self, step: LaunchedStep) -> DecodedStep:
        """See OverlappedDecode.collect."""
        assert self.overlapped is not None
        result = self.overlapped.collect(step)
        self.num_steps += 1
        if self.settings.debug:
            self.manager.check_invariants()
        return result

    def can_run_ahead(self, output: SchedulerOutput) -> bool:
        """Its step may be queued by `overlapped.launch`."""
        return self.overlapped is not None and not output.preempted and self._is_decode_batch(output)

    def _is_decode_batch(self, output: SchedulerOutput) -> bool:
        """What DecodeBatch can say: sequences whose KV came by transfer may be more than a step has places."""
        return len(output.scheduled) <= self.settings.max_num_seqs and is_decode(output)

    def close(self) -> None:
        """When nothing is to run any more: the other ranks end as well, if there are any. Safe to call again."""
        self.manager.close()
        if self._followers is not None:
            self._followers.close()
