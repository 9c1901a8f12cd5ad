"""Which CUDA libraries are compiled before an engine asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import engine_libraries
from kernels.build import KernelBuildError, Library


def test_one_of_each_kind_is_compiled_and_none_of_another_type_head_size_or_gpu() -> None:
    found = engine_libraries.engine_libraries(128, torch.bfloat16, torch.bfloat16, "sm_90a")
    assert len({library.source for library in found}) == len(found)
    assert {"paged_attention.cu", "flash_attention_sm90.cu", "rms_norm.cu", "sampling.cu", "cache_ops.cu"} <= {one.source for one in found}
    attention = next(library for library in found if library.source == "paged_attention.cu")
    assert (attention.defines["HEAD_SIZE"], attention.defines["SCALAR"], attention.defines["KV_CACHE"]) == (128, 1, 0)
    (of_fp8,) = (
        one
        for one in engine_libraries.engine_libraries(64, torch.float16, torch.float8_e4m3fn, "sm_90a")
        if one.source == "paged_attention.cu"
    )
    assert (of_fp8.defines["HEAD_SIZE"], of_fp8.defines["SCALAR"], of_fp8.defines["KV_CACHE"]) == (64, 0, 1)
    assert "flash_attention_sm90.cu" not in {
        one.source for one in engine_libraries.engine_libraries(128, torch.bfloat16, torch.bfloat16, "sm_80")
    }


def test_what_is_missing_is_compiled_and_a_failure_is_left_to_whoever_loads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []

    def build(library: Library, arch: str, folder: Path) -> Path:
        built.append(library.source)
        if library.source == "sampling.cu":
            raise KernelBuildError("no compiler")
        return folder / library.source

    monkeypatch.setenv("PAGEWIRE_CUDA_ARCH", "sm_90a")
    monkeypatch.setenv("PAGEWIRE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(engine_libraries, "build", build)
    monkeypatch.setattr(engine_libraries, "find_prebuilt", lambda library, _arch: tmp_path if library.source == "rms_norm.cu" else None)
    engine_libraries.prepare(64, torch.float16, torch.float8_e4m3fn)
    expected = {library.source for library in engine_libraries.engine_libraries(64, torch.float16, torch.float8_e4m3fn, "sm_90a")}
    assert set(built) == expected - {"rms_norm.cu"}
    assert len(built) == len(set(built))
