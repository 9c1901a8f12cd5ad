"""Runs one step of the model for what the scheduler decided."""

from __future__ import annotations

import torch

from shared.batch import SchedulerOutput
from shared.cache.kv_cache_manager import KVCacheManager
from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.device import to_device
from shared.engine.kv_cache import KVCache
from shared.engine.layer_groups import LayerGroups, OnLayers
from shared.engine.models.causal_lm import CausalLM
from shared.engine.prompt_logprobs import score_prompts
from shared.messages import PromptLogprobs


class ModelRunner:
    def __init__(self, model: CausalLM, cache: KVCache, manager: KVCacheManager, num_layer_groups: int) -> None:
        self.model = model
        self.cache = cache
        self._manager = manager
        self._num_layer_groups = num_layer_groups
        self._device = cache.tensor.device

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, on_layers: OnLayers | None = None) -> tuple[torch.Tensor, list[PromptLogprobs]]:
        """Computes the scheduled tokens. Returns [num_completing, hidden_size], the last hidden state of each scheduled request
        that is complete after this step, in the order of `output.scheduled`; and what was asked for about the prompts.

        `on_layers`: called on this thread for each group of layers when its KV stands in the cache; all before this returns."""
        tables = [self._manager.block_ids(row.request.request_id) for row in output.scheduled]
        tokens = [token for row in output.scheduled for token in row.request.token_ids[row.start : row.end]]
        metadata = AttentionMetadata.build(output, tables, self.cache.block_size, self.model.config, self._device)
        token_ids = to_device(torch.tensor(tokens), self._device)
        if on_layers is None:
            hidden = self.model.forward(token_ids, metadata, self.cache)
        else:
            groups = LayerGroups(self.model.config.num_layers, self._num_layer_groups, self._device, on_layers)
            hidden = self.model.forward(token_ids, metadata, self.cache, groups.after_layer)
            groups.wait()
        num_completing = sum(row.completes for row in output.scheduled)
        scored = [row for row in output.scheduled if row.scored_positions]
        vocab_size = self.model.config.tokenizer_vocab_size
        return hidden[:num_completing], score_prompts(hidden[num_completing:], scored, self.compute_logits, vocab_size)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()
