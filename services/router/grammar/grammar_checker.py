"""Grammars from clients, checked in a process of their own (services/router/grammar/grammar_sandbox.py); what was learnt is remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from shared.errors import InvalidRequestError, OverloadedError, UnavailableError

GrammarKind = Literal["json", "regex", "choice", "lark", "grammar"]
MAX_GRAMMAR_BYTES = 128 << 10
CHECK_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
"""The first answer of a new process waits for its imports too."""
MAX_NUM_WAITING = 64
MAX_NUM_REMEMBERED = 1024
MAX_REMEMBERED_BYTES = 16 << 20
DOUBTFUL_S = 60.0
"""How long a refusal is remembered that may be the machine's fault: it was busy, or short of memory."""


@dataclass(frozen=True)
class _Verdict:
    grammar: str = ""
    """In the library's form."""
    error: str = ""
    expires_s: float = math.inf
    """Monotonic."""

    @property
    def size_bytes(self) -> int:
        return len(self.grammar) + len(self.error)


class GrammarChecker:
    """One sandbox process, started when it is first needed and after each grammar that ended it."""

    def __init__(self, vocab_size: int, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._command = [sys.executable, "-m", "services.router.grammar.grammar_sandbox", str(vocab_size)]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checker")
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._remembered: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._remembered_bytes = 0

    async def check(self, kind: GrammarKind, text: str, param: str) -> str:
        """The grammar in the library's form. Raises InvalidRequestError naming `param` for one that is wrong, impossible, or too
        large or slow to use; OverloadedError when too many wait to be checked."""
        size_bytes = len(text.encode(errors="surrogatepass"))
        if size_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"{param} has {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param=param)
        key = hashlib.sha256(f"{kind}\n{text}".encode(errors="surrogatepass")).digest()
        verdict = self._recalled(key)
        if verdict is None:
            if self._num_waiting >= MAX_NUM_WAITING:
                raise OverloadedError("too many grammars wait to be checked; try again shortly", param=param, retry_after_s=1.0)
            self._num_waiting += 1
            try:
                line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
                verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, line)
            finally:
                self._num_waiting -= 1
            self._remember(key, verdict)
        if verdict.error:
            raise InvalidRequestError(f"{param} cannot be used: {verdict.error}", param=param)
        return verdict.grammar

    def close(self) -> None:
        """Ends the process, also in the middle of a check."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _recalled(self, key: bytes) -> _Verdict | None:
        verdict = self._remembered.get(key)
        if verdict is None:
            return None
        if verdict.expires_s <= time.monotonic():
            self._forget(key)
            return None
        self._remembered.move_to_end(key)
        return verdict

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        if key in self._remembered:  # the same grammar was checked meanwhile for another request
            return
        self._remembered[key] = verdict
        self._remembered_bytes += verdict.size_bytes
        while len(self._remembered) > MAX_NUM_REMEMBERED or self._remembered_bytes > MAX_REMEMBERED_BYTES:
            self._forget(next(iter(self._remembered)))

    def _forget(self, key: bytes) -> None:
        self._remembered_bytes -= self._remembered.pop(key).size_bytes

    # ---- the checker's thread -----------------------------------------------------------------------------------------
    def _ask(self, line: bytes) -> _Verdict:
        for _ in range(2):
            process, timeout_s = self._running()
            try:
                answer: dict[str, str] = json.loads(_exchange(process, line, timeout_s))
            except TimeoutError:
                self._drop(process)
                return _doubtful(f"it takes longer than {timeout_s:g} s to compile; make it smaller or simpler")
            except OSError:
                self._drop(process)  # ended by this grammar (stack, memory) or by something else: one that ends the next too is to blame
            else:
                return _Verdict(answer.get("grammar", ""), answer.get("error", ""))
        return _doubtful("it is nested too deeply or too large; make it smaller or simpler")

    def _running(self) -> tuple[subprocess.Popen[bytes], float]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process, self._timeout_s
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        probe = json.dumps({"kind": "regex", "text": "a"}).encode() + b"\n"
        try:
            _exchange(process, probe, START_TIMEOUT_S)
        except OSError as error:
            _end(process)
            raise UnavailableError("the process that checks grammars does not start", retry_after_s=1.0) from error
        with self._lock:
            self._process = process
        return process, self._timeout_s

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is process:
                self._process = None
        _end(process)


def _doubtful(error: str) -> _Verdict:
    return _Verdict(error=error, expires_s=time.monotonic() + DOUBTFUL_S)


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    """One line to the process and one back. Raises TimeoutError, or another OSError when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    descriptor = process.stdout.fileno()
    reply = b""
    # The process reads its whole line before it computes, so this write waits for nothing but its scheduling.
    process.stdin.write(line)
    process.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not reply.endswith(b"\n"):
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise BrokenPipeError("the process has ended")
            reply += piece
    return reply


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
