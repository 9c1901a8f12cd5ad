"""What the launcher says, before anything starts, of services that would never work together."""

from __future__ import annotations

import pytest

from services.local.stack import Stack, StackPlan
from shared.config import load_settings
from shared.errors import ConfigurationError


def check(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], num_prefill: int = 1, **overrides: str) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    Stack(StackPlan(load_settings("router", **overrides), num_prefill, 1, None, is_json=True))._check_roles_agree()


@pytest.mark.parametrize("environ", [{}, {"PAGEWIRE_CPU_WEIGHTS": "fp16"}, {"PAGEWIRE_DECODE_CPU_WEIGHTS": "fp32"}])
def test_weights_of_the_same_values_work_together(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    check(monkeypatch, environ)


def test_a_mode_given_to_the_command_is_that_of_all_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, {}, cpu_weights="fp16")


def test_fp16_weights_in_one_role_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="router auto, prefill auto, decode fp16"):
        check(monkeypatch, {"PAGEWIRE_DECODE_CPU_WEIGHTS": "fp16"})


@pytest.mark.parametrize(("device", "num_prefill"), [("cpu", 1), ("cuda", 0)])
def test_roles_may_have_unequal_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch, device: str, num_prefill: int) -> None:
    check(monkeypatch, {"PAGEWIRE_DECODE_TENSOR_PARALLEL_SIZE": "2", "PAGEWIRE_DEVICE": device}, num_prefill)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_on_gpus_are_refused_where_kv_would_have_to_travel(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    with pytest.raises(ConfigurationError, match=f"2 for {role}.*--aggregated"):
        check(monkeypatch, {f"PAGEWIRE_{role.upper()}_TENSOR_PARALLEL_SIZE": "2", "PAGEWIRE_DEVICE": "cuda"})
