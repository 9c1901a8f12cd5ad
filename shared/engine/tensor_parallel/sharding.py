"""How a model is divided among ranks (Shoeybi et al. 2019): heads of attention and rows of the feed-forward part, so that each of the two
needs one sum over all ranks. Embedding, norms, routers of experts and the head are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shared.errors import ConfigurationError
from shared.model_files.model_config import ModelConfig
from shared.transport.protocol.kv_layout import head_range

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum over all ranks, which may be written over its argument."""

_INNER_ROWS = ("gate_proj", "up_proj", "w1", "w3")
_INNER_COLUMNS = ("down_proj", "w2")


@dataclass(frozen=True)
class Shard:
    """What one rank of `size` holds. More ranks than KV heads: each head stands on several."""

    rank: int
    size: int

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of a model that has only what this rank holds. Raises ConfigurationError when it cannot be divided evenly."""
        self._check(config)
        experts = config.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=head_range(config.num_kv_heads, self.rank, self.size)[1],
            intermediate_size=config.intermediate_size // self.size,
            experts=experts,
        )

    def _check(self, config: ModelConfig) -> None:
        num_inner = [config.intermediate_size] if config.experts is None else [config.intermediate_size, config.experts.intermediate_size]
        for what, number in [("query heads", config.num_heads), *(("rows of the feed-forward part", number) for number in num_inner)]:
            if number % self.size:
                raise ConfigurationError(
                    f"tensor_parallel_size = {self.size}: {number} {what} cannot be shared evenly; choose a divisor of {number}"
                )
        if max(config.num_kv_heads, self.size) % min(config.num_kv_heads, self.size):
            raise ConfigurationError(
                f"tensor_parallel_size = {self.size}: {config.num_kv_heads} KV heads cannot be shared evenly; choose a divisor or "
                "a multiple"
            )

    def part_of(self, name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        """Of the weight `name` (Hugging Face's) of the whole model: what this rank holds, in memory of its own where that is not all.

        A bias that is added after the sum stands on the first rank and is zero on others."""
        layer, kind = name.split(".")[-2:]
        if layer in ("o_proj", *_INNER_COLUMNS) and kind == "bias":
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        size = config.head_dim
        query = self._range(config.num_heads * size)
        first, count = head_range(config.num_kv_heads, self.rank, self.size)
        key = slice(first * size, (first + count) * size)
        if layer == "q_proj":
            return tensor[query].clone()
        if layer in ("k_proj", "v_proj"):
            return tensor[key].clone()
        if layer == "qkv_proj":
            parts = torch.split(tensor, [config.num_heads * size, config.num_kv_heads * size, config.num_kv_heads * size])
            return torch.cat([part[rows] for part, rows in zip(parts, (query, key, key), strict=True)])
        if layer == "o_proj":
            return tensor[:, query].clone()
        if layer == "gate_up_proj":
            return torch.cat([part[self._range(len(part))] for part in tensor.chunk(2)])
        if layer in _INNER_ROWS:
            return tensor[self._range(len(tensor))].clone()
        if layer in _INNER_COLUMNS:
            return tensor[:, self._range(tensor.shape[1])].clone()
        return tensor

    def _range(self, total: int) -> slice:
        count = total // self.size
        return slice(self.rank * count, (self.rank + 1) * count)
