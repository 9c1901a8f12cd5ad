"""An answer, streamed or not, completion or chat, in one form; and in which respects two of them differ."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from local_stack import LocalStack
from parity_cases import Case

TOLERANCE = 1e-3
TIMEOUT_S = 120.0
RESPECTS = ("token ids", "text", "logprobs", "finish reasons", "usage")


@dataclass
class ChoiceAnswer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[float | None, dict[str, float]]] = field(default_factory=list)
    """Of each listed token its own, and those of the alternatives by name; the prompt's tokens first where they were echoed."""
    prompt_logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    num_finished: int = 0

    def add(self, part: dict[str, Any]) -> None:
        """A whole answer, or one event of a stream."""
        for choice in part["choices"]:
            mine = self.choices.setdefault(choice["index"], ChoiceAnswer())
            message = choice.get("message") or choice.get("delta") or {}
            mine.text += choice["text"] if "text" in choice else message.get("content") or ""
            mine.token_ids += choice["token_ids"]
            mine.logprobs += listed_logprobs(choice["logprobs"])
            mine.prompt_logprobs = choice.get("prompt_logprobs", part.get("prompt_logprobs"))
            if choice["finish_reason"] is not None:
                self.num_finished += 1
                mine.finish_reason, mine.stop_reason = choice["finish_reason"], choice["stop_reason"]
        if part.get("usage"):
            self.usage = part["usage"]


def listed_logprobs(logprobs: dict[str, Any] | None) -> list[tuple[float | None, dict[str, float]]]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (entry["logprob"], {str(other["bytes"]) + other["token"]: other["logprob"] for other in entry["top_logprobs"]})
            for entry in logprobs["content"]
        ]
    return [(own, top or {}) for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)]


def ask(stack: LocalStack, case: Case) -> Answer:
    for body in case.warming_bodies():
        stack.post(case.path, body, timeout_s=TIMEOUT_S)
    return answer_to(stack, case.path, case.body())


def answer_to(stack: LocalStack, path: str, body: dict[str, Any]) -> Answer:
    answer = Answer()
    if not body.get("stream"):
        answer.add(stack.post(path, body, timeout_s=TIMEOUT_S))
    else:
        request = urllib.request.Request(stack.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    answer.add(json.loads(line[6:]))
    assert answer.num_finished == len(answer.choices), "a choice ended twice, or never"
    return answer


def differences(one: Answer, other: Answer) -> set[str]:
    """Some of RESPECTS."""
    found: set[str] = set()
    if one.usage != other.usage:
        found.add("usage")
    if one.choices.keys() != other.choices.keys():
        return {*found, "token ids"}
    for index, mine in one.choices.items():
        theirs = other.choices[index]
        if mine.token_ids != theirs.token_ids:
            found.add("token ids")
        if mine.text != theirs.text:
            found.add("text")
        if (mine.finish_reason, mine.stop_reason) != (theirs.finish_reason, theirs.stop_reason):
            found.add("finish reasons")
        if not (_are_near(mine.logprobs, theirs.logprobs) and _are_near(_pairs(mine), _pairs(theirs))):
            found.add("logprobs")
    return found


def _pairs(choice: ChoiceAnswer) -> list[tuple[float | None, dict[str, float]]]:
    """prompt_logprobs as the other logprobs are: the prompt's own token is the first of each."""
    return [
        (None, {}) if entry is None else (next(iter(entry.values()))["logprob"], {name: value["logprob"] for name, value in entry.items()})
        for entry in choice.prompt_logprobs or ()
    ]


def _are_near(mine: list[tuple[float | None, dict[str, float]]], theirs: list[tuple[float | None, dict[str, float]]]) -> bool:
    """Alternatives too, but for two that are so near that either may be the last of the list."""
    if len(mine) != len(theirs):
        return False
    for (own, top), (their_own, their_top) in zip(mine, theirs, strict=True):
        if (own is None) != (their_own is None) or len(top) != len(their_top):
            return False
        pairs = [(own or 0.0, their_own or 0.0), *zip(sorted(top.values()), sorted(their_top.values()), strict=True)]
        pairs += [(value, their_top[name]) for name, value in top.items() if name in their_top]
        if any(abs(a - b) > TOLERANCE for a, b in pairs):
            return False
    return True
