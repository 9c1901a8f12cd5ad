"""The cases of the parity matrix: every parameter set with every shape of prompt it allows; streaming and cache states go round.

A new feature is one line in PARAMETERS. What a set does not mention is DEFAULTS; every case has a cache salt of its own, so that the
state of the cache is what the case says and nothing else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from local_stack import CNT, ids

CHUNK = 48
"""Tokens in one step of both systems: longer prompts are computed in chunks."""
DEFAULTS: dict[str, Any] = {"max_tokens": 7, "temperature": 0, "logprobs": 2, "return_token_ids": True}

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 1},
    "hot": {"temperature": 1.6, "seed": 2},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.7, "seed": 4},
    "min_p": {"temperature": 1.2, "min_p": 0.1, "seed": 5},
    "top_k, top_p and min_p": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "temperature": 0.7, "seed": 7},
    "logit_bias": {"logit_bias": {"28": -100, "216": 3}, "temperature": 0.6, "seed": 8},
    "allowed_token_ids": {"allowed_token_ids": [28, 33, 34, 216, 314, 504, 7042], "temperature": 1.0, "seed": 9},
    "min_tokens": {"min_tokens": 4, "logit_bias": {"2": 100}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 4}, "temperature": 0.9, "seed": 10},
    "stop": {"stop": ["is", " 7", "\U0001f999"], "max_tokens": 12},
    "stop in the text": {"stop": ["Paris", "8,"], "include_stop_str_in_output": True, "max_tokens": 12},
    "stop_token_ids": {"stop_token_ids": [282, 28], "temperature": 0.7, "seed": 11},
    "one token": {"max_tokens": 1, "temperature": 0.9, "seed": 12},
    "no logprobs": {"logprobs": None, "temperature": 0.8, "seed": 13},
    "logprobs of the token alone": {"logprobs": 0, "temperature": 0.8, "seed": 14},
    "five logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3, "temperature": 0.8, "seed": 15},
    "echo with logprobs": {"echo": True, "max_tokens": 4},
    "echo, nothing generated": {"echo": True, "max_tokens": 0},
    "three choices": {"n": 3, "temperature": 0.9, "seed": 16},
    "two greedy choices": {"n": 2, "max_tokens": 5},
    "best_of": {"n": 2, "best_of": 4, "temperature": 0.9, "seed": 21},
    "beam search": {"n": 2, "use_beam_search": True, "length_penalty": 1.4},
    "guided_regex": {"guided_regex": "[a-zA-Z0-9 ,.]*", "temperature": 0.9, "seed": 17},
    "guided_json": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 100}, "temperature": 0.9, "seed": 18},
    "guided_choice, two choices": {"guided_choice": ["red", "dark blue", "green"], "n": 2, "temperature": 0.9, "seed": 19},
    "bad_words": {"bad_words": ["the", "7"], "temperature": 0.8, "seed": 20},
}

SHAPES: dict[str, dict[str, Any]] = {
    "one token": {"prompt": [504]},
    "a line": {"prompt": "The capital of France is"},
    "numbers": {"prompt": CNT},
    "emoji": {"prompt": "\U0001f999" * 8},
    "one block": {"prompt": ids(16)},
    "a block and a token": {"prompt": ids(17)},
    "three chunks": {"prompt": ids(2 * CHUNK + 20)},
    "two prompts": {"prompt": ["1, 2, 3, 4,", "The capital of France is Paris.\n" * 2]},
    "a conversation": {"messages": [{"role": "user", "content": "Name three colours."}]},
}

TWICE = ("one token", "a line")

CacheState = Literal["cold", "warm", "half warm"]
CACHE_STATES: tuple[CacheState, ...] = ("cold", "warm", "half warm")
"""warm: the same prompt was answered before; half warm: its first half was."""

ENDING = {"stop", "stop_token_ids", "echo", "max_tokens", "guided_choice"}
WHOLE = {"prompt_logprobs", "best_of", "use_beam_search"}
"""Fields that do not go with a stream."""
UNDER_PRESSURE = [name for name, fields in PARAMETERS.items() if not (ENDING | {"best_of", "use_beam_search"}) & set(fields)]
"""Sets that run on until max_tokens: together they want more blocks than decode has, so some are preempted. Without best_of and beam
search, which would take minutes so."""
PRESSURE = {"max_tokens": 48, "min_tokens": 48}
SEEDED = {"prompt": "The capital of France is", "temperature": 0.9, "seed": 42, "max_tokens": 16, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    parameters: str
    shape: str
    is_streamed: bool
    cache_state: CacheState
    is_under_pressure: bool = False

    @property
    def name(self) -> str:
        how = "streamed" if self.is_streamed else "whole"
        pressure = ", under pressure" if self.is_under_pressure else ""
        return f"{self.parameters}: {self.shape}, {how}, {self.cache_state}{pressure}"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in SHAPES[self.shape] else "/v1/completions"

    def body(self) -> dict[str, Any]:
        body = {**DEFAULTS, **SHAPES[self.shape], **PARAMETERS[self.parameters], "cache_salt": self.name}
        if self.is_under_pressure:
            body |= PRESSURE
        if "messages" in body and body["logprobs"] is not None:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def warming_bodies(self) -> list[dict[str, Any]]:
        """What is sent before, to bring the cache into its state."""
        if self.cache_state == "cold":
            return []
        shape = SHAPES[self.shape]
        common = {"cache_salt": self.name, "max_tokens": 1, "temperature": 0}
        if self.cache_state == "warm" or "messages" in shape:
            return [{**shape, **common}]
        prompts = shape["prompt"] if isinstance(shape["prompt"][0], str) and isinstance(shape["prompt"], list) else [shape["prompt"]]
        return [{"prompt": prompt[: max(1, len(prompt) // 2)], **common} for prompt in prompts]


def is_allowed(parameters: str, shape: str, is_streamed: bool) -> bool:
    fields = PARAMETERS[parameters]
    if "echo" in fields and "messages" in SHAPES[shape]:
        return False
    return not (is_streamed and WHOLE & set(fields))


def matrix() -> list[Case]:
    """Every second case of a parameter set is streamed, those of TWICE both ways; each set meets all cache states."""
    cases: list[Case] = []
    for offset, parameters in enumerate(PARAMETERS):
        ways = [
            (shape, is_streamed)
            for index, shape in enumerate(SHAPES)
            for is_streamed in ((False, True) if shape in TWICE else ((offset + index) % 2 == 1,))
        ]
        allowed = [(shape, is_streamed) for shape, is_streamed in ways if is_allowed(parameters, shape, is_streamed)]
        for index, (shape, is_streamed) in enumerate(allowed):
            cases.append(Case(parameters, shape, is_streamed, CACHE_STATES[(offset + index) % 3]))
    return cases


def pressure() -> list[Case]:
    shapes = itertools.cycle(("numbers", "one block", "a block and a token", "emoji"))
    return [
        Case(parameters, shape, is_streamed=index % 2 == 1 and not WHOLE & set(PARAMETERS[parameters]), cache_state="cold",
             is_under_pressure=True)
        for index, (parameters, shape) in enumerate(zip(UNDER_PRESSURE * 2, shapes, strict=False))
    ]  # fmt: skip
