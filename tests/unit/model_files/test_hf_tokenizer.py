from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY_TOKENS, tiny_tokenizer_json, with_changes, write_tiny_hf

from shared.errors import ModelLoadError
from shared.model_files.hf_tokenizer import hf_chat_template, hf_tokenizer_facts, tokenizer_from_hf
from shared.model_files.model_source import resolve_model

HELLO = TINY_TOKENS.index("hello")


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


def test_ids_and_text(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    tokenizer = tokenizer_from_hf(tmp_path, (2,))
    assert tokenizer.encode("hello") == [HELLO]
    assert tokenizer.decode([1, HELLO, 2]) == "hello"
    assert (tokenizer.special_ids, tokenizer.bos_token_id, tokenizer.vocab_size) == (frozenset({0, 1, 2}), 1, len(TINY_TOKENS))


def test_bos_of_the_post_processor_is_added_exactly_once(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, with_changes(add_bos=True))
    tokenizer = tokenizer_from_hf(tmp_path, (2,))
    assert tokenizer.encode("hello") == [1, HELLO]
    assert tokenizer.encode("<s>hello") == [1, HELLO]


def test_declared_add_bos_has_the_last_word(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, with_changes(add_bos=True))
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)
    assert tokenizer_from_hf(tmp_path, ()).encode("hello") == [HELLO]
    assert hf_tokenizer_facts(tmp_path).add_bos is False


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json() | {"truncation": truncation}))
    assert tokenizer_from_hf(tmp_path, ()).encode("hello" * 9) == [HELLO] * 9


def test_chat_template_is_found_in_each_place(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    assert hf_chat_template(tmp_path) is None
    edit(tmp_path / "tokenizer_config.json", chat_template="one")
    assert hf_chat_template(tmp_path) == "one"
    edit(tmp_path / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert hf_chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert hf_chat_template(tmp_path) == "file"


def test_missing_and_damaged_tokenizer_files_are_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not valid JSON"):
        resolve_model(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        resolve_model(str(tmp_path))


def test_unsupported_decoder_is_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    word_piece = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json() | {"decoder": word_piece}))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        tokenizer_from_hf(tmp_path, ())


def test_export_keeps_bos(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "in", with_changes(add_bos=True))
    tokenizer_from_hf(tmp_path / "in", (2,)).save_pretrained(tmp_path / "out")
    again = tokenizer_from_hf(tmp_path / "out", (2,))
    assert again.encode("hello") == again._backend.encode("hello").ids == [1, HELLO]
