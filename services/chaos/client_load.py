"""Clients that ask a stack for answers they know: a steady load whose every outcome is judged.

An answer is the known text, a proper error, or cut short by an error event behind a part of the known text. Anything else, silence
included, is a violation.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import orjson

from services.chaos.known_answers import MIN_GAP, KnownAnswer, draw_prompts, fixtures, smallest_gap
from shared.errors import ConfigurationError

ANSWER_TIMEOUT_S = 30.0
"""A client that has no answer after this was forgotten."""
_PROPER_ERRORS = frozenset({408, 429, 500, 502, 503, 504})
_MAX_PAUSE_S = 0.4
"""Between two requests of a client: a stack that has no moment to breathe tells nothing about deadlines."""
_SALTED_SHARE = 0.7
"""Requests with a salt of their own: nothing of their prompt is cached, so their KV has to travel."""


class ClientLoad:
    """`run` keeps `num_clients` requests going until `stop`. All on one event loop."""

    def __init__(self, url: str, seed: int, num_clients: int) -> None:
        self._url = f"{url}/v1/completions"
        self._random = random.Random(seed)
        self._num_clients = num_clients
        self._answers: list[KnownAnswer] = []
        self._client = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._in_flight: set[asyncio.Task[None]] = set()
        self._hung_up: set[asyncio.Task[None]] = set()
        self._is_running = False
        self.violations: list[str] = []
        self.num_right = 0
        self.num_hung_up = 0
        self.errors: Counter[str] = Counter()
        self.latencies_s: list[float] = []

    async def learn(self, seed: int, num_prompts: int) -> None:
        """Ask everything once, before any fault. ConfigurationError when the stack answers a fixture wrongly."""
        self._answers = fixtures()
        found = await asyncio.gather(*(self._ask(answer.prompt, answer.max_tokens) for answer in self._answers))
        for answer, (text, _) in zip(self._answers, found, strict=True):
            if text != answer.text:
                raise ConfigurationError(f"the stack answers {text!r} to {answer.prompt!r} before any fault; {answer.text!r} is right")
        prompts = draw_prompts(seed, num_prompts)
        found = await asyncio.gather(*(self._ask(*prompt) for prompt in prompts))
        for (prompt, max_tokens), (text, gap) in zip(prompts, found, strict=True):
            if gap >= MIN_GAP:
                self._answers.append(KnownAnswer(prompt, max_tokens, text))

    async def _ask(self, prompt: str, max_tokens: int) -> tuple[str, float]:
        """(greedy answer, smallest lead of its tokens)."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
        response = await self._client.post(self._url, json=body)
        if response.status_code != 200:
            raise ConfigurationError(f"the stack answers {response.status_code} before any fault: {response.text[:300]}")
        choice = response.json()["choices"][0]
        return choice["text"], smallest_gap(choice["logprobs"]["top_logprobs"])

    @property
    def num_known(self) -> int:
        return len(self._answers)

    async def run(self) -> None:
        """Until `stop`, and until the last answer is there."""
        self._is_running = True
        await asyncio.gather(*(self._keep_asking() for _ in range(self._num_clients)))

    def stop(self) -> None:
        self._is_running = False

    async def close(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        await self._client.aclose()

    def hang_up(self) -> bool:
        """One client leaves in the middle of its request. False: none was waiting."""
        waiting = sorted(self._in_flight - self._hung_up, key=id)
        if not waiting:
            return False
        task = self._random.choice(waiting)
        self._hung_up.add(task)
        task.cancel()
        self.num_hung_up += 1
        return True

    async def _keep_asking(self) -> None:
        while self._is_running:
            task = asyncio.create_task(self._one(self._random.choice(self._answers)))
            self._in_flight.add(task)
            await asyncio.wait({task})
            self._in_flight.discard(task)
            self._hung_up.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self.violations.append(f"a client failed: {task.exception()!r}")
            await asyncio.sleep(self._random.uniform(0.0, _MAX_PAUSE_S))

    async def _one(self, answer: KnownAnswer) -> None:
        body: dict[str, Any] = {"prompt": answer.prompt, "max_tokens": answer.max_tokens, "temperature": 0}
        if self._random.random() < _SALTED_SHARE:
            body["cache_salt"] = f"{self._random.getrandbits(64):x}"
        if self._random.random() < 0.5:
            body["stream"] = True
        start_s = time.monotonic()
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    self._judge_error(response.status_code, await response.aread())
                elif "stream" in body:
                    self._judge_stream(answer, [line async for line in response.aiter_lines()])
                else:
                    self._judge_text(answer, orjson.loads(await response.aread())["choices"][0]["text"])
        except httpx.TimeoutException:
            self.violations.append(f"no answer to {_shown(answer)} within {ANSWER_TIMEOUT_S:g} s")
        except httpx.HTTPError as error:
            self.violations.append(f"the router broke a connection off ({error!r}) on {_shown(answer)}")
        self.latencies_s.append(time.monotonic() - start_s)

    def _judge_error(self, status: int, content: bytes) -> None:
        self.errors[str(status)] += 1
        try:
            is_proper = status in _PROPER_ERRORS and bool(orjson.loads(content)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            is_proper = False
        if not is_proper:
            self.violations.append(f"an improper error: {status} {content[:300]!r}")

    def _judge_stream(self, answer: KnownAnswer, lines: Sequence[str]) -> None:
        text = ""
        for line in lines:
            if line == "data: [DONE]":
                self._judge_text(answer, text)
                return
            if not line.startswith("data: "):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                self.errors["event"] += 1
                if not answer.text.startswith(text):
                    self.violations.append(f"a wrong text before an error: {text!r} to {_shown(answer)}")
                return
            text += "".join(choice["text"] for choice in event["choices"])
        self.violations.append(f"a stream ended with neither an end nor an error: {_shown(answer)}")

    def _judge_text(self, answer: KnownAnswer, text: str) -> None:
        if text == answer.text:
            self.num_right += 1
        else:
            self.violations.append(f"a wrong answer with status 200: {text!r} to {_shown(answer)}")


def _shown(answer: KnownAnswer) -> str:
    return f"...{answer.prompt[-40:]!r} ({len(answer.prompt)} characters, right is {answer.text!r})"
