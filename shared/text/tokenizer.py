"""Text to token ids and back. Encoding is the `tokenizers` library's; decoding is ours: the bytes of the tokens, joined.

Decoding by bytes is what makes streaming exact: `decode(ids)` and an IncrementalDetokenizer fed the same ids give the same text,
and an invalid or incomplete UTF-8 sequence becomes one U+FFFD in both. No clean-up of spaces is ever done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from shared.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPACE_MARK = "▁"


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)] if decoder["type"] == "Sequence" else [decoder]


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":  # a model that prepends nothing has none to take away
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


class Tokenizer:
    """`backend` encodes; ids of `eos_token_ids` end a generation. `add_bos`: text starts with BOS, exactly once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        add_bos: bool,
        chat_template: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        self.max_model_len = max_model_len
        steps = _decoder_steps(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else []
        kinds = {step["type"] for step in steps}
        self.is_byte_level = "ByteLevel" in kinds
        if not self.is_byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise ModelLoadError(f"tokenizer decoder {sorted(kinds)} is not supported; supported: byte-level BPE and SentencePiece style")
        self.strips_leading_space = not self.is_byte_level and any(map(_strips_leading_space, steps))
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._bytes_of_id: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in `text` become their ids. With `add_special_tokens` a model that wants BOS gets it
        unless the text starts with one already, so it is right for rendered chat templates too: never two."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on all cores, and other threads go on: the library keeps the interpreter's lock for as long as a text takes
        but in a batch."""
        batch = [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self._with_bos(ids) for ids in batch] if add_special_tokens else batch

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; each invalid or incomplete UTF-8 sequence is one U+FFFD. Ids outside the vocabulary add nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes a token stands for: not always valid UTF-8 on their own. Empty for ids outside the vocabulary."""
        cached = self._bytes_of_id.get(token_id)
        if cached is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            cached = self._bytes_of_id[token_id] = b"" if token is None else self._bytes_of(token_id, token)
        return cached

    def whole_text(self, token_id: int) -> str | None:
        """The token's bytes as text; None if they are not valid UTF-8 on their own."""
        if token_id not in self._whole_texts:
            raw = self.token_bytes(token_id)
            try:
                self._whole_texts[token_id] = raw.decode()
            except UnicodeDecodeError:
                self._whole_texts[token_id] = None
        return self._whole_texts[token_id]

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        if self.is_byte_level:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, for showing; bytes that are not UTF-8 on their own show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def special_token_texts(self) -> dict[str, str]:
        """bos_token and eos_token as chat templates name them; "" where the model has none."""
        names = {"bos_token": self.bos_token_id, "eos_token": next(iter(self.eos_token_ids), None)}
        return {name: self._literal(token_id) or "" for name, token_id in names.items()}

    def save_pretrained(self, directory: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and a minimal config.json, which transformers' AutoTokenizer can load."""
        directory.mkdir(parents=True, exist_ok=True)
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        bos, eos = (self._literal(token_id) for token_id in (self.bos_token_id, next(iter(self.eos_token_ids), None)))
        if self.add_bos and bos is not None:
            backend.post_processor = TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, self.bos_token_id)]
            )
        backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": eos,
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.max_model_len,
            "chat_template": self.chat_template,
        }
        _write_json(directory / "tokenizer_config.json", {name: value for name, value in config.items() if value is not None})
        eos_ids = list(self.eos_token_ids)
        minimal = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": self.vocab_size}
        _write_json(directory / "config.json", minimal | {"bos_token_id": self.bos_token_id, "eos_token_id": eos_ids})

    def _literal(self, token_id: int | None) -> str | None:
        found: str | None = None if token_id is None else self._backend.id_to_token(token_id)
        return found


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
