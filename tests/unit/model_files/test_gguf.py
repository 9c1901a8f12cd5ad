from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import TINY_TOKENS, add_value, finish, tiny_weights, write_tiny_gguf

from shared.errors import ModelLoadError
from shared.model_files.dequantize import dequantize
from shared.model_files.gguf import open_gguf


def test_key_values_of_every_kind_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    for key, value in {"a.strings": ["", "ß", "🦙", "x" * 1000], "a.numbers": [3, -4], "a.floats": [0.5, 1.5], "a.text": "hé"}.items():
        add_value(writer, key, value)
    writer.add_tensor("t", np.zeros(4, np.float32))
    finish(writer)
    model = open_gguf(path)
    assert [model.get(key) for key in ("a.u8", "a.i64", "a.f64", "a.yes", "a.text")] == [200, -(2**40), 0.1, True, "hé"]
    assert model.get("a.strings") == ["", "ß", "🦙", "x" * 1000]
    assert model.get("a.numbers").tolist() == [3, -4]
    assert model.get("a.floats").tolist() == [0.5, 1.5]
    assert model.get("not.there", 7) == 7


def test_shapes_are_outermost_first_and_values_unchanged(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(192, 576)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", weight)
    writer.add_tensor("h", weight.astype(np.float16))
    finish(writer)
    tensors = open_gguf(tmp_path / "m.gguf").tensors
    assert tensors["w"].shape == (192, 576)
    np.testing.assert_array_equal(dequantize(tensors["w"]), weight)
    np.testing.assert_array_equal(dequantize(tensors["h"]), weight.astype(np.float16).astype(np.float32))


def test_custom_alignment_is_honoured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    arrays = {f"t{n}": np.full(n, n, np.float32) for n in (1, 5, 9)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    finish(writer)
    tensors = open_gguf(tmp_path / "m.gguf").tensors
    assert all(np.array_equal(dequantize(tensors[name]), array) for name, array in arrays.items())


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG"])
def test_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        open_gguf(path)


@pytest.mark.parametrize(("version", "word"), [(1, "version 1"), (3 << 24, "big-endian")])
def test_other_versions_are_named(tmp_path: Path, version: int, word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelLoadError, match=word):
        open_gguf(path)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    write_tiny_gguf(whole)
    content = whole.read_bytes()
    for size in [*range(4, 2000, 61), *range(2000, len(content) - 64, 4001)]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match="cut short"):
            open_gguf(cut)


def test_absurd_counts_do_not_hang_or_allocate(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for value in (struct.pack("<IIQ", 9, 8, 2**60), struct.pack("<IIQ", 9, 4, 2**62), struct.pack("<IQ", 8, 2**63)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value + bytes(64))
        with pytest.raises(ModelLoadError, match="cut short"):
            open_gguf(path)


def split_model(directory: Path) -> list[Path]:
    write_tiny_gguf(directory / "m.gguf", tensors_per_file=9)
    paths = sorted(directory.glob("m-*.gguf"))
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return paths


@pytest.mark.parametrize("named", [0, 1, 2, None])
def test_any_part_or_the_directory_opens_all_parts(tmp_path: Path, named: int | None) -> None:
    paths = split_model(tmp_path)
    model = open_gguf(tmp_path if named is None else paths[named])
    assert model.paths == tuple(paths)
    assert model.get("tokenizer.ggml.tokens") == TINY_TOKENS
    np.testing.assert_array_equal(dequantize(model.tensors["blk.1.ffn_up.weight"]), tiny_weights()["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = split_model(tmp_path)
    paths[missing].unlink()
    with pytest.raises(ModelLoadError, match=rf"part {missing + 1} of 3.*{paths[missing].name}"):
        open_gguf(paths[(missing + 1) % 3])


def test_renamed_part_is_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="part 1 of 3"):
        open_gguf(tmp_path / "model.gguf")


def test_exchanged_parts_are_refused(tmp_path: Path) -> None:
    _, second, third = split_model(tmp_path)
    second.rename(tmp_path / "other")
    third.rename(second)
    (tmp_path / "other").rename(third)
    with pytest.raises(ModelLoadError, match="says it is part 3"):
        open_gguf(tmp_path)


def test_directory_of_two_models_asks_for_one(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        open_gguf(tmp_path)
