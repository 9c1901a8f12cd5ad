"""The process in which grammars from outside are looked at first: `python -m services.router.grammar.grammar_sandbox VOCAB_SIZE`.

One request and one answer a line, JSON. A request is {"kind", "text"}; the answer {"grammar"} in the library's form or {"error"}. It is
compiled against an alphabet of bytes, which is cheap and decides the same questions as the model's vocabulary. The parent ends this
process when an answer takes too long; a stack overflow or a lack of memory ends it by itself.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from services.router.grammar.schema_recursion import check_recursion
from shared.errors import InvalidRequestError
from shared.grammar import check_matcher, new_matcher

MAX_MEMORY_BYTES = 2 << 30
NUM_STEPS = 4
STACK_BYTES = 512 << 10
"""Much smaller than the stacks on which decode compiles, so that what passes here cannot overflow those."""


class _Bytes:
    """What llguidance asks of a tokenizer: every byte a token, EOS, and ids up to the vocabulary's that stand for nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.special_token_ids = [256]
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [b""] * (vocab_size - 257)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def grammar_of(kind: str, text: str) -> str:
    """`kind`: json (a schema), regex, choice (a JSON list of strings), lark, grammar (Lark or GBNF)."""
    if kind == "json":
        check_recursion(json.loads(text))
        return llguidance.LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        # One lexeme: as a rule, many choices would make the parser's rows too long.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text)) + "\n"
    return text if kind == "lark" else str(any_to_lark(text))


def answer(tokenizer: llguidance.LLTokenizer, request: dict[str, str]) -> dict[str, str]:
    try:
        grammar = grammar_of(request["kind"], request["text"])
        _walk(new_matcher(tokenizer, grammar))
    except InvalidRequestError as error:
        return {"error": error.message}
    except Exception as error:  # a converter's own way to refuse
        return {"error": str(error).partition("\n")[0][:300] or "it cannot be read"}
    return {"grammar": grammar}


def _walk(matcher: llguidance.LLMatcher) -> None:
    """A few steps into some text: grammars that are too complex mostly show it there."""
    for _ in range(NUM_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        check_matcher(matcher)
        token_id = (allowed & -allowed).bit_length() - 1
        if token_id < 0 or matcher.is_stopped() or not matcher.consume_token(token_id):
            return


def byte_tokenizer(vocab_size: int) -> llguidance.LLTokenizer:
    """Bytes as tokens 0 to 255, EOS as 256."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(max(257, vocab_size))), slices=[])


def _requests() -> Iterator[dict[str, str]]:
    for line in sys.stdin:
        yield json.loads(line)


def _serve() -> None:
    tokenizer = byte_tokenizer(int(sys.argv[1]))
    for request in _requests():
        print(json.dumps(answer(tokenizer, request)), flush=True)


def main() -> None:
    # Ctrl-C goes to the whole group; this process ends when its parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()


if __name__ == "__main__":
    main()
