"""A grammar and its state, through llguidance: what the router's checker and decode's engine share.

A grammar is the library's own text form (Lark, or JSON around a schema). Nothing here may see a grammar from outside before the router's
checker has: a hostile one can take minutes, or overflow the stack, and with it end the process.
"""

from __future__ import annotations

import llguidance

from shared.errors import InvalidRequestError

_MAX_MESSAGE_CHARACTERS = 300
_MAX_LEXER_FUEL = 300_000
"""A third of the library's own limit, enough for an enum of 20,000 strings: what takes more can hold up a mask for seconds."""


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Compiled, at its start. Raises InvalidRequestError with the library's words for a grammar that is none or admits no text."""
    limits = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=_MAX_LEXER_FUEL)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask tells whether any text fits at all, and pays for what the library computes lazily.
        matcher.compute_bitmask()
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: llguidance.LLMatcher) -> None:
    """Raises InvalidRequestError when the library has given up on this grammar."""
    if not matcher.is_error():
        return
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        text = "no text can ever satisfy it"
    elif text.startswith(("panic", "lexer", "parser", "initial lexer", "Parser Error: Current row")) or "too big" in text:
        text = "it is too large or too complex; make it smaller or simpler"
    # The place is shown with the source around it, which the client knows.
    lines = [line.strip() for line in text.splitlines() if line.strip() and "|" not in line and line.strip() != "^"]
    raise InvalidRequestError(" ".join(lines)[:_MAX_MESSAGE_CHARACTERS] or "the library refuses it")
