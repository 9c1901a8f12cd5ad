"""The shipped model cut into three files: any part or the directory is the model; without one of them nothing starts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shared.engine.reference_model import forward
from shared.engine.weights import load_weights
from shared.errors import ModelLoadError
from shared.model_files.gguf import open_gguf
from shared.model_files.model_source import ModelSource, resolve_model

PARIS = 7042


@pytest.fixture(scope="module")
def whole() -> ModelSource:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def parts(whole: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("split")
    model = open_gguf(whole.files[0])
    writer = gguf.GGUFWriter(directory / "smol.gguf", "llama", split_max_tensors=100)
    for key in model.parts[0].keys():  # noqa: SIM118
        value = model.get(key)
        if key == "general.architecture":
            continue
        if isinstance(value, (list, np.ndarray)):
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for tensor in model.tensors.values():
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(tensor.name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob("*.gguf"))


def test_any_part_or_the_directory_is_the_whole_model(whole: ModelSource, parts: list[Path]) -> None:
    assert len(parts) == 3
    for path in (parts[0], parts[1], parts[0].parent):
        source = resolve_model(str(path))
        assert source.config == whole.config
        assert all(np.array_equal(source.tensors[name].data, tensor.data) for name, tensor in whole.tensors.items())
    weights = load_weights(source, torch.float32, "cpu")
    assert forward(weights, source.config, source.load_tokenizer().encode("The capital of France is"))[-1].argmax() == PARIS


def test_missing_part_is_named_before_serving(parts: list[Path]) -> None:
    hidden = parts[2].rename(parts[2].with_suffix(".away"))
    try:
        with pytest.raises(ModelLoadError, match=parts[2].name):
            resolve_model(str(parts[0]))
    finally:
        hidden.rename(parts[2])
