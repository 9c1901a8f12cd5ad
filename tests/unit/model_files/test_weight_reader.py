from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_models import permute, tiny_weights, write_tiny_gguf, write_tiny_hf

import shared.model_files.weight_reader
from shared.errors import ModelLoadError
from shared.model_files.model_source import ModelSource, resolve_model
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_reader import check_room, start_loading, unpermuted_rows


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    write_tiny_gguf(tmp_path / "m.gguf")
    return resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_unpermuted_rows_undo_the_converter(num_heads: int) -> None:
    rows = np.random.default_rng(0).normal(size=(num_heads * 8, 5)).astype(np.float32)
    np.testing.assert_array_equal(permute(rows, num_heads)[unpermuted_rows(len(rows), num_heads)], rows)


def test_gguf_weights_come_back_under_their_hugging_face_names(source: ModelSource) -> None:
    arrays, expected = start_loading(source).result(), tiny_weights()
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("num_files", [1, 3])
def test_safetensors_weights_are_the_same(tmp_path: Path, num_files: int) -> None:
    write_tiny_hf(tmp_path, num_files=num_files)
    arrays = start_loading(resolve_model(str(tmp_path))).result()
    for name, array in tiny_weights().items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


def test_progress_rises_to_one(source: ModelSource) -> None:
    seen: list[float] = []
    pending = start_loading(source, seen.append)
    pending.result()
    assert seen == sorted(seen) and seen[-1] == pending.fraction_done == 1.0


def test_error_in_a_loading_thread_reaches_the_caller(source: ModelSource) -> None:
    tensors = dict(source.tensors)
    good = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = StoredTensor(good.name, good.shape, good.type_name, good.data[:-4])
    with pytest.raises(ValueError):
        start_loading(dataclasses.replace(source, tensors=tensors)).result()


def test_model_larger_than_memory_is_refused_in_one_line(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.model_files.weight_reader, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ModelLoadError, match=r"m needs .* GiB of memory .* choose a smaller model") as caught:
        start_loading(source)
    assert "\n" not in str(caught.value)


def test_unknown_memory_lets_the_model_try(source: ModelSource) -> None:
    check_room(source, 1 << 60, None)
