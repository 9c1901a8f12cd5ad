"""What is known of GPUs without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import nvidia_driver
from shared.config import Settings, load_settings
from shared.errors import ConfigurationError
from shared.nvidia_driver import count_gpus, gpu_index, may_use_gpu


@pytest.mark.parametrize(
    ("device", "index"), [("auto", None), ("cpu", None), ("cuda", None), ("cuda:0", 0), ("cuda:11", 11), ("auto:2", 2)]
)
def test_a_device_names_a_gpu_or_none(device: str, index: int | None) -> None:
    assert gpu_index(Settings(device=device).device) == index


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:0,1", "cuda:0\n"])
def test_what_names_no_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match="device"):
        load_settings("decode", {"PAGEWIRE_DEVICE": device})


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvidia_driver, "_VERSION", tmp_path / "version")
    assert count_gpus() == 0
    assert [may_use_gpu(device) for device in ("auto", "auto:1", "cpu", "cuda", "cuda:1")] == [False, False, False, True, True]


def test_a_driver_whose_library_cannot_be_loaded_counts_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "version").write_text("NVRM")
    monkeypatch.setattr(nvidia_driver, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(nvidia_driver, "_DRIVER_LIBRARY", "libcuda-of-nowhere.so.1")
    assert count_gpus() == 0
    assert "libcuda-of-nowhere" in caplog.text
    assert [may_use_gpu(device) for device in ("auto", "auto:1", "cpu")] == [True, True, False]


@pytest.mark.gpu
def test_the_driver_counts_the_gpus_that_torch_sees() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    assert count_gpus() == torch.cuda.device_count()
