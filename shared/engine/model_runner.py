"""Runs one step of the model on this rank's device."""

from __future__ import annotations

import torch

from shared.engine.attention_metadata import AttentionMetadata
from shared.engine.decode_batch import DecodeBatch
from shared.engine.device import to_device
from shared.engine.kv_cache import KVCache
from shared.engine.layer_groups import LayerGroups, OnLayers
from shared.engine.models.causal_lm import CausalLM
from shared.engine.step_graphs import StepGraphs
from shared.engine.step_input import StepInput

MAX_WHOLE_TOKENS = 128
"""Of a step whose KV may leave when all layers are computed: sending it takes less time than launching its kernels one by one does."""


class ModelRunner:
    """`graphs`: small steps are replayed from these; None: all kernels are launched one by one."""

    def __init__(self, model: CausalLM, cache: KVCache, num_layer_groups: int = 1, graphs: StepGraphs | None = None) -> None:
        self.model = model
        self.graphs = graphs
        self.cache = cache
        self._num_layer_groups = num_layer_groups
        self._device = cache.tensor.device

    @torch.inference_mode()
    def forward(self, step: StepInput, on_layers: OnLayers | None = None) -> torch.Tensor:
        """Computes the step's tokens and writes their KV. Returns the last hidden states of `step.hidden_rows`: [len, hidden_size].

        `on_layers`: called on this thread for each group of layers when its KV stands in the cache; all before this returns."""
        if self.graphs is not None and self.graphs.can_run_chunk(step) and (on_layers is None or len(step.token_ids) <= MAX_WHOLE_TOKENS):
            hidden = self.graphs.run_chunk(step)
            if on_layers is not None:
                groups = LayerGroups(self.model.config.num_layers, 1, self._device, on_layers)
                groups.after_layer(self.model.config.num_layers - 1)
                groups.wait()
            return hidden
        metadata = AttentionMetadata.build(step, self.cache.block_size, self.model.config, self._device)
        token_ids = to_device(torch.tensor(step.token_ids), self._device)
        if on_layers is None:
            return self.model.forward(token_ids, metadata, self.cache)
        groups = LayerGroups(self.model.config.num_layers, self._num_layer_groups, self._device, on_layers)
        hidden = self.model.forward(token_ids, metadata, self.cache, groups.after_layer)
        groups.wait()
        return hidden

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, previous: torch.Tensor | None = None) -> torch.Tensor:
        """One token for each request of the batch; writes its KV. The last hidden states [len(batch), hidden_size], valid until the next
        step. Waits for nothing where there are graphs. `previous`: the tokens of the step before, for rows that take theirs from it."""
        if self.graphs is not None:
            return self.graphs.run_decode(batch, previous)
        return self.forward(batch.step_input(previous))

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    @torch.inference_mode()
    def compute_raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_raw_logits(hidden)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()
