"""Token ids to text while they arrive: O(1) a token, never a broken character.

Policy for text that ends in the middle of a character: `flush` gives one U+FFFD at the very end, as `Tokenizer.decode` does, so a
streamed answer and a whole one are the same text. Bytes that can never become a character are U+FFFD as soon as that is known.
"""

from __future__ import annotations

import codecs

from shared.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """All pushes + flush = `tokenizer.decode(all ids, skip_special_tokens)`, but for special tokens that are `shown` all the same.

    `continues_text`: the ids go on after other text (a completion after its prompt), so the leading space that SentencePiece-style
    tokenizers drop at the start of a text is kept. Byte-level tokenizers have no such rule.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        continues_text: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._utf8 = _new_utf8_decoder("replace")
        self._holds_bytes = False
        self._at_start = tokenizer.strips_leading_space and not continues_text

    def skips(self, token_id: int) -> bool:
        """Whether it is a special token that has no text here."""
        return token_id in self._skipped

    def push(self, token_id: int) -> str:
        """Text that became complete with this token: often all of it, "" in the middle of a character."""
        if self.skips(token_id):
            return ""
        # Nearly every token is whole characters after whole characters.
        text = None if self._holds_bytes else self._tokenizer.whole_text(token_id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            self._holds_bytes = bool(self._utf8.getstate()[0])
        return self._from_start(text) if self._at_start else text

    def flush(self) -> str:
        """What was held back: "" or one U+FFFD. The detokenizer then starts anew, in the middle of a text."""
        self._holds_bytes = False
        return self._from_start(self._utf8.decode(b"", final=True))

    def _from_start(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
