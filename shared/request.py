"""One request inside a worker: its tokens, how far its KV is computed, and where it stands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.block_hash import BlockHash, encode_extra_keys, hash_full_blocks
from shared.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = auto()
    """Holds no blocks; the scheduler may admit it."""
    WAITING_FOR_KV = auto()
    """Decode: holds its prompt's blocks, which a prefill worker is filling."""
    RUNNING = auto()
    PREEMPTED = auto()
    """Gave its blocks back for others; resumes like a waiting request, by prefix hit and recomputation."""
    SENDING = auto()
    """Prefill: computed; holds its blocks until decode has confirmed them."""
    FINISHED = auto()


@dataclass
class Request:
    """`token_ids` = prompt followed by what was generated. Positions below `num_computed_tokens` have their KV in the cache."""

    request_id: str
    token_ids: list[int]
    arrival_s: float
    deadline_at_s: float
    sampling: SamplingParams | None = None
    cache_salt: str | None = None
    priority: int = 0
    sequence_index: int = 0
    """Which sequence of its client's request this is, where one prompt has several answers."""
    transfer_id: str | None = None
    num_prompt_logprobs: int | None = None
    """Set where the prompt's log-probabilities are to be computed here."""
    num_scored_tokens: int = 0
    """Prompt positions, from the first on, whose row of logits has been used for that."""
    traceparent: str = ""
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; hits on resume are not counted again."""
    num_preemptions: int = 0
    num_bypasses: int = 0
    """Times a later request was admitted while this one waited for blocks."""
    status: RequestStatus = RequestStatus.WAITING
    block_hashes: list[BlockHash] = field(default_factory=list)
    extra_keys: bytes = b""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.extra_keys = encode_extra_keys(self.cache_salt)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens whose KV may be taken from the cache; of the others a hidden state is needed, so they are computed."""
        num_tokens = len(self.token_ids) - 1
        if self.num_prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1:
            return min(num_tokens, self.num_scored_tokens)
        return num_tokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: lower priority value, then earlier arrival, then the earlier sequence."""
        return (self.priority, self.arrival_s, self.sequence_index)

    def fork(self, request_id: str, sequence_index: int) -> Request:
        """Another sequence with the same tokens so far and nothing computed: it goes on by itself. What was reused is not counted twice,
        and the prompt's log-probabilities are the first sequence's business."""
        child = dataclasses.replace(
            self,
            request_id=request_id,
            sequence_index=sequence_index,
            token_ids=list(self.token_ids),
            block_hashes=list(self.block_hashes),
            transfer_id=None,
            num_prompt_logprobs=None,
            num_computed_tokens=0,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=0,
            num_bypasses=0,
            status=RequestStatus.WAITING,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        return child

    def update_block_hashes(self, root: BlockHash, block_size: int) -> None:
        """Extend the chain over the blocks that are full by now."""
        if len(self.token_ids) // block_size > len(self.block_hashes):
            self.block_hashes = hash_full_blocks(root, self.token_ids, block_size, self.extra_keys, known=self.block_hashes)
