"""A Tokenizer from the key-values of a GGUF file: byte-level BPE ("gpt2") or SentencePiece-style BPE ("llama")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from shared.errors import ModelLoadError
from shared.model_files.gguf import GGUFModel
from shared.model_files.model_config import ending_ids
from shared.text.pre_tokenizers import pre_tokenization
from shared.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that end a turn in the families' chat formats, even where the file's EOS is another one.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


def _token_ids(model: GGUFModel, *names: str) -> list[int]:
    """Of keys that hold an id, or several."""
    found: list[int] = []
    for name in names:
        value = model.get(_PREFIX + name)
        if value is not None and (isinstance(value, str) or np.asarray(value).dtype.kind not in "iu"):
            raise ModelLoadError(f"{_PREFIX}{name} = {value!r} must be a token id")
        found += [] if value is None else np.atleast_1d(value).tolist()
    return found


def gguf_special_tokens(model: GGUFModel) -> SpecialTokens:
    """Facts about the vocabulary, without building the tokenizer."""
    tokens: list[str] = model.get(_PREFIX + "tokens")
    if not tokens:
        raise ModelLoadError(f"{model.paths[0]} has no tokenizer (tokenizer.ggml.tokens)")
    types = model.get(_PREFIX + "token_type")
    if types is not None and len(types) != len(tokens):
        raise ModelLoadError(
            f"{model.paths[0]} has {len(types)} items in tokenizer.ggml.token_type for {len(tokens)} tokens: the file is damaged"
        )
    eos = _token_ids(model, "eos_token_id", "eot_token_id", "eom_token_id")
    if types is not None:
        controls = {tokens[token_id]: token_id for token_id in (types == _CONTROL).nonzero()[0].tolist()}
        eos += [controls[name] for name in _END_OF_TURN if name in controls]
    is_sentencepiece = model.get(_PREFIX + "model") == "llama"
    default_add_bos = True if is_sentencepiece else pre_tokenization(model.get(_PREFIX + "pre")).add_bos
    return SpecialTokens(
        vocab_size=len(tokens),
        eos_token_ids=ending_ids(eos, len(tokens)),
        bos_token_id=next(iter(_token_ids(model, "bos_token_id")), None),
        add_bos=bool(model.get(_PREFIX + "add_bos_token", default_add_bos)),
    )


def _byte_level_backend(model: GGUFModel, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    pre = pre_tokenization(model.get(_PREFIX + "pre"))
    merges: list[str] = model.get(_PREFIX + "merges") or []
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges, byte_fallback=False, fuse_unk=False))
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_merges(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; as a merge list: every split of every token, best score first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token_id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, (token[:cut], token[cut:])))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for _, _, _, pair in ranked]


def _sentencepiece_backend(model: GGUFModel, tokens: list[str], vocabulary: dict[str, int], is_text: list[bool]) -> tokenizers.Tokenizer:
    scores = model.get(_PREFIX + "scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{model.paths[0]}: a 'llama' tokenizer needs one score a token (tokenizer.ggml.scores)")
    ordinary = {token: token_id for token, token_id in vocabulary.items() if is_text[token_id]}
    unknown = next((tokens[token_id] for token_id in _token_ids(model, "unknown_token_id") if token_id < len(tokens)), None)
    merges = _sentencepiece_merges(tokens, scores.tolist(), ordinary)
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_prefix = bool(model.get(_PREFIX + "add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if add_prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_prefix else steps)
    return backend


def tokenizer_from_gguf(model: GGUFModel) -> Tokenizer:
    """Raises ModelLoadError for a tokenizer or pre-tokenizer we do not know, naming it."""
    special = gguf_special_tokens(model)
    tokens: list[str] = model.get(_PREFIX + "tokens")
    types = model.get(_PREFIX + "token_type")
    kinds: list[int] = [1] * len(tokens) if types is None else types.tolist()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    kind = model.get(_PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"tokenizer {kind!r} (tokenizer.ggml.model) is not supported; supported are gpt2 and llama")
    try:
        if kind == "gpt2":
            backend = _byte_level_backend(model, vocabulary)
        else:
            backend = _sentencepiece_backend(model, tokens, vocabulary, [value not in (_CONTROL, _USER_DEFINED) for value in kinds])
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception, for merges of tokens that are not there
        raise ModelLoadError(f"{model.paths[0]}: tokenizer.ggml.tokens and tokenizer.ggml.merges do not fit together: {error}") from error
    added = [
        AddedToken(token, special=value == _CONTROL, normalized=False)
        for token, value in zip(tokens, kinds, strict=True)
        if value in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return Tokenizer(
        backend,
        eos_token_ids=special.eos_token_ids,
        bos_token_id=special.bos_token_id,
        add_bos=special.add_bos,
        chat_template=model.get("tokenizer.chat_template"),
        max_model_len=model.get(f"{model.get('general.architecture')}.context_length"),
    )
