"""How a byte-level BPE splits text before merging, by the name a GGUF file gives it (`tokenizer.ggml.pre`).

The map is explicit: a wrong splitter changes token ids without an error, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shared.errors import ModelLoadError

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> PreTokenizer:
    """GPT-2's own splitting, bytes written as printable characters."""
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_one_by_one() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _byte_level()])


def _regexes(*patterns: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


@dataclass(frozen=True, slots=True)
class PreTokenization:
    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    """A whole piece that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Whether text starts with BOS when the file does not say."""


_SMOLLM = PreTokenization(_digits_one_by_one)
_LLAMA_BPE = PreTokenization(_regexes(_LLAMA3), ignore_merges=True, add_bos=True)
_GPT_2 = PreTokenization(_byte_level)
_QWEN_2 = PreTokenization(_regexes(_QWEN2))
_DEFAULT = PreTokenization(_regexes(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "gpt-2": _GPT_2,
    "gpt2": _GPT_2,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "falcon3": _LLAMA_BPE,
    "dbrx": PreTokenization(_regexes(_LLAMA3)),
    "smaug-bpe": PreTokenization(_regexes(_LLAMA3)),
    "gpt-4o": PreTokenization(_regexes(_O200K)),
    "tekken": PreTokenization(_regexes(_TEKKEN), ignore_merges=True, add_bos=True),
    "default": _DEFAULT,
}


def pre_tokenization(name: str | None) -> PreTokenization:
    """Raises ModelLoadError for a name we do not know, or none at all."""
    known = ", ".join(PRE_TOKENIZATIONS)
    if name is None:
        raise ModelLoadError(
            f"the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): convert it again; known names are {known}"
        )
    found = PRE_TOKENIZATIONS.get(name)
    if found is None:
        raise ModelLoadError(f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known names are {known}")
    return found
