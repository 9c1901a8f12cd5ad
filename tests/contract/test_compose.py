"""docker-compose.yml and the Dockerfile, without an engine: what is published, what is built from what, what depends on what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def stages() -> dict[str, tuple[str, str]]:
    """Name of a stage -> the stage it starts from, and its instructions."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)
    return {name: (base, body) for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}


def instructions_reaching(target: str) -> str:
    """All instructions whose result is in an image: its own, its bases', and those of the stages it copies from."""
    all_stages, seen, text = stages(), set(), ""
    waiting = [target]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in all_stages:
            continue
        seen.add(name)
        base, body = all_stages[name]
        text += body
        waiting += [base, *re.findall(r"--from=(\S+)", body)]
    return text


def installs_torch(instructions: str) -> bool:
    code = "\n".join(line for line in instructions.splitlines() if not line.lstrip().startswith("#"))
    return re.search(r"\btorch\b|requirements\.py worker", code) is not None


def test_router_image_installs_no_torch() -> None:
    assert not installs_torch(instructions_reaching("router"))
    assert installs_torch(instructions_reaching("worker")), "the check above looks for the wrong thing"


def test_only_the_router_is_published_and_on_loopback(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert list(published) == ["router"]
    assert all(port.startswith("127.0.0.1:${PAGEWIRE_PORT:-8000}:") for port in published["router"])


def test_the_overlay_gives_every_worker_the_keys_and_nobody_else(compose: dict[str, Any]) -> None:
    overlay = yaml.safe_load((ROOT / "docker" / "compose.keys.yml").read_text())
    workers = {name for name, service in compose["services"].items() if "PAGEWIRE_KV_TRANSPORT" in (service.get("environment") or {})}
    assert set(overlay["services"]) == workers - {"router"}
    for service in overlay["services"].values():
        assert service["secrets"] == list(overlay["secrets"])
        assert service["environment"] == {"PAGEWIRE_KV_KEY_FILE": f"/run/secrets/{service['secrets'][0]}"}


def test_plain_up_starts_the_cpu_services(compose: dict[str, Any]) -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    started = {name for name, service in compose["services"].items() if "gpu" not in service.get("profiles", [])}
    assert started == {"redis", "router", "prefill", "decode"}


def test_only_gpu_services_reserve_devices(compose: dict[str, Any]) -> None:
    """A reservation fails on a machine without NVIDIA, whatever the count."""
    for name, service in compose["services"].items():
        assert ("deploy" in service) == (service.get("profiles") == ["gpu"]), name


def test_every_service_has_a_health_check_and_comes_back(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["healthcheck"]["test"][1] in ("python3", "redis-cli"), f"{name}: the images have no other tool"
        assert service["restart"] == "unless-stopped" and service["init"] is True, name
        assert service["stop_grace_period"] == "10s", name


def test_router_starts_after_the_workers_it_may_have(compose: dict[str, Any]) -> None:
    conditions = compose["services"]["router"]["depends_on"]
    assert all(condition["condition"] == "service_healthy" for condition in conditions.values())
    assert {name for name, condition in conditions.items() if condition.get("required", True)} == {"redis"}


def test_dockerfile_pulls_no_frontend_and_runs_as_a_user() -> None:
    assert not DOCKERFILE.startswith("# syntax") and "\n# syntax=" not in DOCKERFILE
    for target in ("router", "worker"):
        assert "USER pagewire" in stages()[target][1]


def test_compose_keeps_to_what_version_2_26_knows(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert not {"gpus", "post_start", "pre_stop", "models", "provider"} & set(service), name


def test_worker_replicas_can_be_scaled(compose: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        service = compose["services"][name]
        assert "container_name" not in service and "hostname" not in service, name
        assert "PAGEWIRE_ADVERTISE_HOST" not in service["environment"], "each replica must advertise itself (docker/entrypoint.sh)"


def test_workers_get_kernels_built_ahead_and_no_compiler(compose: dict[str, Any]) -> None:
    all_stages = stages()
    assert [name for name, (_, body) in all_stages.items() if "g++" in body] == ["cpu-kernels"]
    for target, kernels in (("worker", "cpu-kernels"), ("worker-gpu", "cuda-kernels")):
        assert f"--mount=type=bind,from={kernels}," in all_stages[target][1]
        assert "FROM" not in all_stages[target][1] and all_stages[target][0] in ("runtime", "worker")
    targets = {name: service["build"]["target"] for name, service in compose["services"].items() if "build" in service}
    assert {targets["prefill-gpu"], targets["decode-gpu"]} == {"worker-gpu"}
    assert {targets["prefill"], targets["decode"]} == {"worker"}
