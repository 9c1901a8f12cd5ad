"""How many KV blocks a GPU has room for: what weights and the largest step take is measured, the rest of the worker's share is theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.config import Settings
from shared.engine.kv_cache import KVCache
from shared.engine.model_runner import ModelRunner
from shared.engine.models.causal_lm import CausalLM
from shared.engine.sampler import SamplingRow, sample
from shared.engine.step_input import StepInput
from shared.errors import ConfigurationError
from shared.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

PROFILE_NUM_BLOCKS = 2
"""Of the cache that serves the profile: all its requests have the same block, whose contents mean nothing."""
PROCESS_NBYTES = 1 << 30
"""What a process takes of a GPU beside torch's tensors: CUDA's context, loaded kernels, library handles, what NCCL and a peer's KV transfer
keep. It cannot be measured while another worker loads its weights to the same GPU."""
GRAPHS_NBYTES = 1 << 30
"""Room for captured CUDA graphs."""
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryProfile:
    """Of one worker on one GPU, in bytes."""

    total_nbytes: int
    free_nbytes: int
    """With the weights loaded and nothing else."""
    weights_nbytes: int
    activations_nbytes: int
    """Of the largest step, its logits and its sampling."""

    def num_blocks(self, block_nbytes: int, utilization: float, num_workers: int) -> int:
        """That fit into an equal share of `utilization` of the GPU, and into what is free of it. Raises ConfigurationError."""
        share = int(self.total_nbytes * utilization) // num_workers
        transient = self.activations_nbytes + GRAPHS_NBYTES
        room = share - self.weights_nbytes - PROCESS_NBYTES - transient
        is_crowded = self.free_nbytes - transient < room
        if is_crowded:
            room = self.free_nbytes - transient
        num_blocks = room // block_nbytes
        if num_blocks < 2:
            raise ConfigurationError(
                f"no room for a KV cache: of the GPU's {self.total_nbytes // _MIB} MiB this worker's share is {share // _MIB}, "
                f"{self.free_nbytes // _MIB} are free, its weights take {self.weights_nbytes // _MIB}, its largest step "
                f"{self.activations_nbytes // _MIB}, and {(PROCESS_NBYTES + GRAPHS_NBYTES) // _MIB} are kept for CUDA; raise "
                "PAGEWIRE_GPU_MEMORY_UTILIZATION, lower PAGEWIRE_MAX_NUM_BATCHED_TOKENS or PAGEWIRE_MAX_NUM_SEQS, put fewer workers on a "
                "GPU, choose a smaller model, or say how much it may take with PAGEWIRE_KV_CACHE_GIB"
            )
        if is_crowded:
            logger.warning(
                "only %d MiB of the GPU are free, less than this worker's share of %d MiB: another program holds them",
                self.free_nbytes // _MIB,
                share // _MIB,
            )
        return num_blocks


def largest_step(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> StepInput:
    """As many decoding requests as may be, at the end of the longest context, which their attention divides among workspaces, and prompts
    for the rest of the tokens. All have block 0."""
    num_decode = min(max_num_seqs, max_num_batched_tokens) - 1
    lengths = [max_model_len] * num_decode
    num_left = max_num_batched_tokens - num_decode
    while num_left:
        lengths.append(min(num_left, max_model_len))
        num_left -= lengths[-1]
    return StepInput(
        token_ids=[0] * max_num_batched_tokens,
        starts=[max_model_len - 1] * num_decode + [0] * (len(lengths) - num_decode),
        ends=lengths,
        block_tables=[[0] * -(-length // block_size) for length in lengths],
        hidden_rows=list(range(min(max_num_seqs, max_num_batched_tokens))),
    )


def profile_memory(
    model: CausalLM, settings: Settings, max_model_len: int, cache: KVCache, before_step: Callable[[StepInput], None] = lambda _step: None
) -> MemoryProfile:
    """Runs the largest step on the GPU. `cache`: of PROFILE_NUM_BLOCKS. `before_step`: tells other ranks to run it as well."""
    device = cache.tensor.device
    runner = ModelRunner(model, cache)
    step = largest_step(settings.max_num_batched_tokens, settings.max_num_seqs, max_model_len, settings.block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=20)
    rows = [SamplingRow(params, 0, [0], 1, frozenset()) for _ in step.hidden_rows]
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights_nbytes, reserved_nbytes = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free_nbytes, total_nbytes = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_step(step)
    sample(runner.compute_logits(runner.forward(step)), rows)
    # What the allocator took from the GPU, not what the tensors have: the difference is lost to every later step too.
    activations_nbytes = torch.cuda.max_memory_reserved(device) - reserved_nbytes
    torch.cuda.empty_cache()
    return MemoryProfile(total_nbytes, free_nbytes, weights_nbytes, activations_nbytes)
