"""A Tokenizer from a Hugging Face directory: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import ModelLoadError
from shared.text.tokenizer import Tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file. ModelLoadError when it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class HFTokenizerFacts:
    vocab_size: int
    bos_token_id: int | None
    add_bos: bool
    eos_token_id: int | None
    """The one that chat templates know; a model may have more that end an answer."""


def _literal(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _bos_of_post_processor(processor: Mapping[str, Any] | None) -> str | None:
    """The token a post-processor puts in front of text, if any."""
    if processor is None:
        return None
    if processor.get("type") == "Sequence":
        return next(filter(None, (_bos_of_post_processor(inner) for inner in processor["processors"])), None)
    if processor.get("type") == "TemplateProcessing":
        first: dict[str, Any] = next(iter(processor.get("single", [])), {})
        return first["SpecialToken"]["id"] if "SpecialToken" in first else None
    return None


def hf_tokenizer_facts(directory: Path) -> HFTokenizerFacts:
    """What the model configuration needs to know, from the JSON alone. `add_bos_token` in the config, where it is, has the last word."""
    path = directory / "tokenizer.json"
    data = read_json(path)
    # Older files have the names of their special tokens in one of the two alone.
    config = {**read_json(directory / "special_tokens_map.json"), **read_json(directory / "tokenizer_config.json")}
    if not data:
        raise ModelLoadError(f"{path} is missing: convert the tokenizer to the fast format (tokenizer.json)")
    vocabulary: dict[str, int] = data.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):
        raise ModelLoadError(f"{path}: tokenizer model {data['model'].get('type')!r} is not supported; supported: BPE")
    ids = vocabulary | {token["content"]: token["id"] for token in data.get("added_tokens", [])}
    template_bos = _bos_of_post_processor(data.get("post_processor"))
    declared = config.get("add_bos_token")
    bos, eos = _literal(config.get("bos_token")) or template_bos, _literal(config.get("eos_token"))
    return HFTokenizerFacts(
        vocab_size=max(ids.values(), default=-1) + 1,
        bos_token_id=ids.get(bos) if bos else None,
        add_bos=template_bos is not None if declared is None else bool(declared),
        eos_token_id=ids.get(eos) if eos else None,
    )


def hf_chat_template(directory: Path) -> str | None:
    """chat_template.jinja, or the one in tokenizer_config.json (named "default" where there are several)."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def tokenizer_from_hf(directory: Path, eos_token_ids: tuple[int, ...], max_model_len: int | None = None) -> Tokenizer:
    """Raises ModelLoadError when tokenizer.json is missing or unreadable."""
    facts = hf_tokenizer_facts(directory)
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        eos_token_ids=eos_token_ids,
        bos_token_id=facts.bos_token_id,
        add_bos=facts.add_bos,
        chat_template=hf_chat_template(directory),
        max_model_len=max_model_len,
    )
