"""Answers held to a grammar, or kept from bad words: which tokens each sequence may go on with, computed beside the step loop.

A grammar is compiled once, on a thread of its own, and kept while it is among the last used. The mask for the token after next is
computed on another thread while the model runs. A sequence whose mask is late is left out of sampling until it comes; others go on.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRequestError
from shared.grammar import check_matcher, new_matcher
from shared.sampling_params import SamplingParams
from shared.text.tokenizer import Tokenizer

TokenMask = NDArray[np.uint32]
"""A bit per token, token t at bit t % 32 of word t // 32; [ceil(vocab_size / 32)]."""
MASK_GRACE_S = 0.002
"""How long a step waits for masks at least; nearly all are there long before."""
MAX_NUM_COMPILED = 128
_STACK_BYTES = 64 << 20
"""Address space, of which only what is used takes memory. The router's checker compiles on far less (services/router/grammar)."""


class _Vocabulary:
    """What llguidance asks of a tokenizer. The bytes of a token are those the detokenizer shows."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class Grammars:
    """The grammars of a worker. `load_tokenizer` is called once, by the first request that needs it, on the compiling thread."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._special_ids: frozenset[int] = frozenset()
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._compiler = _executor("grammar-compiler")
        self._masker = _executor("grammar-masks")
        self.num_compiled = 0

    def guide(self, params: SamplingParams, output_token_ids: Sequence[int] = ()) -> SequenceGuide | None:
        """The state of a sequence after `output_token_ids`; any thread, at once. What is wrong with a grammar its mask will raise.
        None: any token will do."""
        uses: list[_Use] = []
        if params.structured_output is not None:
            # The answer goes on while the grammar lets it, as without one it goes on after EOS.
            uses.append(_Use(params.structured_output.grammar, unwanted=self._eos_token_ids if params.ignore_eos else ()))
        if params.bad_words:
            uses.append(_Use(_grammar_without(params.bad_words), lets_special_through=True))
        if not uses:
            return None
        with self._lock:
            executor = self._masker if all(use.grammar in self._compiled for use in uses) else self._compiler
        return SequenceGuide(self._masker, executor.submit(self._start, uses, tuple(output_token_ids)))

    def close(self) -> None:
        for executor in (self._compiler, self._masker):
            executor.shutdown(wait=False, cancel_futures=True)

    # ---- threads that compute ---------------------------------------------------------------------------------------
    def _start(self, uses: Sequence[_Use], output_token_ids: Sequence[int]) -> _State:
        state = _State([(use, self._matcher(use.grammar)) for use in uses], self._special_ids, self._vocab_size)
        return state.advance(output_token_ids)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        matcher = new_matcher(self._loaded_vocabulary(), grammar)
        with self._lock:
            self.num_compiled += 1
            self._compiled[grammar] = matcher.deep_copy()
            while len(self._compiled) > MAX_NUM_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _loaded_vocabulary(self) -> llguidance.LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                if not self._eos_token_ids:
                    raise InvalidRequestError("this model has no end-of-sequence token, which structured output needs")
                tokenizer = self._load_tokenizer()
                self._special_ids = tokenizer.special_ids | set(self._eos_token_ids)
                wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids[0]))
                self._vocabulary = llguidance.LLTokenizer(wrapped, eos_token=list(self._eos_token_ids))
            return self._vocabulary


@dataclass(frozen=True)
class _Use:
    """A grammar and how a sequence follows it."""

    grammar: str
    unwanted: Sequence[int] = ()
    """Left out of the mask while it has others."""
    lets_special_through: bool = False
    """Special tokens are no text: always allowed, and not shown to the grammar."""


class _State:
    """Where a sequence stands in its grammars, and the mask of its next token. One thread at a time."""

    def __init__(self, grammars: Sequence[tuple[_Use, llguidance.LLMatcher]], special_ids: frozenset[int], vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        self.mask: TokenMask = np.zeros(0, np.uint32)

    def advanced_copy(self, token_ids: Sequence[int]) -> _State:
        """Another sequence's state: this one's, and `token_ids`."""
        copied = [(use, matcher.deep_copy()) for use, matcher in self._grammars]
        return _State(copied, self._special_ids, self._vocab_size).advance(token_ids)

    def advance(self, token_ids: Sequence[int]) -> _State:
        masks = [self._advance(use, matcher, token_ids) for use, matcher in self._grammars]
        self.mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        return self

    def _advance(self, use: _Use, matcher: llguidance.LLMatcher, token_ids: Sequence[int]) -> TokenMask:
        shown = [token for token in token_ids if token not in self._special_ids] if use.lets_special_through else list(token_ids)
        if shown:
            matcher.consume_tokens(shown)
        # The library's masks may end with a word too many.
        mask: TokenMask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: -(-self._vocab_size // 32)]
        check_matcher(matcher)
        if use.lets_special_through:
            mask = mask.copy()
            for token_id in self._special_ids:
                mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        if use.unwanted:
            wanted = without(mask, use.unwanted)
            mask = wanted if wanted.any() else mask
        return mask


class SequenceGuide:
    """The grammar of one sequence, engine thread: `push` every token it got, then read `mask` for the next one."""

    def __init__(self, executor: ThreadPoolExecutor, pending: Future[_State]) -> None:
        self._executor = executor
        self._pending = pending
        self._is_shared = False

    @property
    def is_ready(self) -> bool:
        return self._pending.done()

    @property
    def mask(self) -> TokenMask:
        """Only when ready. Raises InvalidRequestError when the grammar cannot be used, or has become too complex on the way."""
        return self._pending.result(timeout=0).mask

    def push(self, token_id: int) -> None:
        """Only when ready and not failed; `token_id` was allowed by the mask."""
        state = self._pending.result()
        self._pending = self._executor.submit(state.advanced_copy if self._is_shared else state.advance, (token_id,))
        self._is_shared = False

    def fork(self) -> SequenceGuide:
        """Only when ready: another sequence that stands where this one does. What they share is copied at the next token of each."""
        self._is_shared = True
        other = SequenceGuide(self._executor, self._pending)
        other._is_shared = True
        return other

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Called once, from any thread, now if it is ready already."""
        self._pending.add_done_callback(lambda _: callback())

    def close(self) -> None:
        """Computes nothing more."""
        self._pending.cancel()


def wait_until_ready(guides: Iterable[SequenceGuide], timeout_s: float) -> None:
    """At most `timeout_s`, whether or not all are ready then."""
    pending = [guide._pending for guide in guides if not guide.is_ready]
    if pending:
        wait(pending, timeout_s)


def _grammar_without(words: Sequence[str]) -> str:
    """Any text in which none of `words` occurs."""
    alternatives = " | ".join(json.dumps(word) for word in words)
    return f"start: TEXT\nTEXT: ALL & ~(ALL ({alternatives}) ALL)\nALL: /(?s:.*)/\n"


def without(mask: TokenMask, token_ids: Iterable[int]) -> TokenMask:
    """A copy with the bits of `token_ids` cleared; those outside the vocabulary are skipped."""
    cleared = mask.copy()
    for token_id in token_ids:
        if 0 <= token_id < len(cleared) * 32:
            cleared[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return cleared


def _executor(name: str) -> ThreadPoolExecutor:
    """One thread with a deep stack: compiling recurses into the grammar."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    previous = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(lambda: None).result()
    finally:
        threading.stack_size(previous)
    return executor
