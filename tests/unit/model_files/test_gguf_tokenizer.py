from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import SPECIAL_TOKENS, TINY_CONFIG, TINY_TOKENS, with_changes, write_tiny_gguf

from shared.errors import ModelLoadError
from shared.model_files.gguf import open_gguf
from shared.model_files.gguf_tokenizer import gguf_special_tokens, tokenizer_from_gguf
from shared.model_files.model_source import resolve_model
from shared.text.detokenizer import IncrementalDetokenizer
from shared.text.pre_tokenizers import pre_tokenization
from shared.text.tokenizer import Tokenizer

SPM_WORDS = [
    "▁",
    "▁I",
    "▁am",
    "▁a",
    "m",
    "t",
    "e",
    "s",
    "i",
    "n",
    "g",
    "in",
    "ing",
    "te",
    "st",
    "test",
    "testing",
    "▁testing",
    "o",
    "k",
    "ok",
    "▁ok",
    "I",
    "a",
]
SPM_TOKENS = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + SPM_WORDS
SPM_METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS),
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(100 - len(word)) for word in SPM_WORDS],
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return resolve_model("smollm2").load_tokenizer()


def sentencepiece(tmp_path: Path, **metadata: object) -> Tokenizer:
    path = tmp_path / "spm.gguf"
    config = with_changes(vocab_size=len(SPM_TOKENS))
    write_tiny_gguf(path, config, metadata=SPM_METADATA | metadata, leave_out=("tokenizer.ggml.add_bos_token", "tokenizer.ggml.merges"))
    return tokenizer_from_gguf(open_gguf(path))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12345", [33, 34, 35, 36, 37]),
        (" 12345", [216, 33, 34, 35, 36, 37]),
        ("café", [83, 1939, 2756]),
        ("\n\n", [1116]),
        ("🦙", [10813, 116, 243]),
        ("ďábelské", [143, 233, 5415, 82, 1025, 91, 2756]),
        ("1, 2, 3, 4, 5,", [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]),
        ("Here is the English alphabet: ABC", [4590, 314, 260, 2321, 12567, 42, 17638]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("世界", [7906, 240, 178, 239, 230]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("", []),
    ],
)
def test_smollm2_ids_are_exact(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.eos_token_ids, smollm2.bos_token_id, smollm2.add_bos, smollm2.vocab_size) == ((2,), 1, False, 49152)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_token_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert smollm2.token_bytes(10813) == b"\xf0\x9f"
    assert (smollm2.token_text(7042), smollm2.token_text(10813), smollm2.token_bytes(60000)) == (" Paris", "�", b"")


def test_every_smollm2_token_decodes_as_the_library_does(smollm2: Tokenizer) -> None:
    ids = range(0, smollm2.vocab_size, 37)
    assert [smollm2.decode([i], False) for i in ids] == [smollm2._backend.decode([i], skip_special_tokens=False) for i in ids]


def test_special_tokens_are_skipped_on_request(smollm2: Tokenizer) -> None:
    assert smollm2.decode([1, 7042, 2]) == " Paris"
    assert smollm2.decode([1, 7042, 2], skip_special_tokens=False) == "<|im_start|> Paris<|im_end|>"


@pytest.mark.parametrize("name", ["no-such-splitter", "chatglm-bpe"])
def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": name})
    with pytest.raises(ModelLoadError, match=name):
        resolve_model(str(tmp_path / "m.gguf"))


def test_missing_pre_tokenizer_is_refused_and_not_guessed(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", leave_out=["tokenizer.ggml.pre"])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.model": "t5"})
    with pytest.raises(ModelLoadError, match="t5"):
        tokenizer_from_gguf(open_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("pre", "num_digits"), [("smollm", 1), ("qwen2", 1), ("llama-bpe", 3), ("llama3", 3), ("gpt-2", 8), ("default", 3), ("tekken", 1)]
)
def test_pre_tokenizer_decides_how_digits_group(tmp_path: Path, pre: str, num_digits: int) -> None:
    tokens = [*TINY_TOKENS, "12", "123", "1234", "12345", "123456", "1234567", "12345678"]
    merges = ["1 2", "12 3", "123 4", "1234 5", "12345 6", "123456 7", "1234567 8"]
    kinds = [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS))
    metadata = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    tokenizer = tokenizer_from_gguf(open_gguf(tmp_path / "m.gguf"))
    first = tokenizer.encode("12345678", add_special_tokens=False)[0]
    assert len(tokenizer.token_bytes(first)) == num_digits


def test_bos_is_added_exactly_once(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", with_changes(add_bos=True))
    tokenizer = tokenizer_from_gguf(open_gguf(tmp_path / "m.gguf"))
    hello = TINY_TOKENS.index("hello")
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.encode("<s>hello") == [1, hello]
    assert tokenizer.encode("hello", add_special_tokens=False) == [hello]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode_batch(["hello", "<s>hello"]) == [[1, hello], [1, hello]]


@pytest.mark.parametrize("end_of_turn", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
def test_end_of_turn_tokens_end_generation_too(tmp_path: Path, end_of_turn: str) -> None:
    tokens = [*TINY_TOKENS, end_of_turn]
    kinds = [3] * 3 + [1] * (len(TINY_TOKENS) - 3) + [3]
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds})
    assert gguf_special_tokens(open_gguf(tmp_path / "m.gguf")).eos_token_ids == (2, len(TINY_TOKENS))


def test_sentencepiece_style_round_trip(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("I am testing 🦙 ok")
    words = [SPM_TOKENS.index(word) for word in ("▁I", "▁am", "▁testing")]
    assert ids[:4] == [1, *words]  # BOS by default
    assert [SPM_TOKENS[i] for i in ids[4:]] == ["▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>", "▁ok"]
    assert tokenizer.decode(ids) == "I am testing 🦙 ok"
    assert tokenizer._backend.decode(ids, skip_special_tokens=True) == "I am testing 🦙 ok"


def test_sentencepiece_spaces_survive_streaming(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("I am testing 🦙 ok")
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert pieces == ["", "I", " am", " testing", " ", "", "", "", "🦙", " ok"]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_text_that_continues_a_prompt_keeps_its_leading_space(tmp_path: Path) -> None:
    stream = IncrementalDetokenizer(sentencepiece(tmp_path), continues_text=True)
    assert stream.push(SPM_TOKENS.index("▁ok")) == " ok"


def test_no_space_is_added_or_dropped_when_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("ok", add_special_tokens=False) == [SPM_TOKENS.index("ok")]
    assert tokenizer.decode([SPM_TOKENS.index("▁ok")]) == " ok"


def test_vocabulary_of_the_tiny_model_is_smaller_than_its_embedding(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    source = resolve_model(str(tmp_path / "m.gguf"))
    assert (
        source.config.tokenizer_vocab_size
        == source.load_tokenizer().vocab_size
        == TINY_CONFIG.tokenizer_vocab_size
        < source.config.vocab_size
    )


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("dbrx", ["HelloWorld", "'s", " ", "123", "45", "  ", " end", "./\n"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "45", "  ", " end", "./\n"]),
        ("qwen2", ["HelloWorld", "'s", " ", "1", "2", "3", "4", "5", "  ", " end", "./\n"]),
    ],
)
def test_pre_tokenizers_split_as_their_family_does(name: str, pieces: list[str]) -> None:
    text = "HelloWorld's 12345   end./\n"
    assert [text[start:end] for _, (start, end) in pre_tokenization(name).build().pre_tokenize_str(text)] == pieces


def test_merges_of_tokens_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata={"tokenizer.ggml.tokens": [*TINY_TOKENS[:-1], TINY_TOKENS[5]]})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.merges do not fit together"):
        resolve_model(str(path)).load_tokenizer()
