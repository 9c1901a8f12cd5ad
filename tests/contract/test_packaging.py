"""The distribution: what is in it, what the command costs to start, and documents that name things which exist."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services", "shared", "kernels")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
MAX_HELP_S = 0.5
# `path/with/slash`, `folder/`, or a file name with a known ending, in backticks; no blanks, no URL, no pattern.
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]*\.?[\w-]+\.(?:py|md|toml|yml|yaml|txt))`")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_ours_and_typed(package: str) -> None:
    """`kernels` is also the name of someone else's distribution."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / package / "__init__.py"
    assert (ROOT / package / "py.typed").is_file()


def test_wheel_holds_exactly_our_packages() -> None:
    assert sorted(pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(PACKAGES)


def test_installed_version_is_the_project_s() -> None:
    assert version("pagewire") == pyproject()["project"]["version"]


def test_base_install_has_no_torch() -> None:
    names = {re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower() for requirement in pyproject()["project"]["dependencies"]}
    assert not names & {"torch", "triton", "safetensors", "kernels", "transformers"}


def test_every_direct_requirement_has_a_tested_version() -> None:
    project = pyproject()["project"]
    requirements = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {normalised(requirement) for requirement in requirements}
    pinned = {normalised(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#")}
    assert sorted(names - pinned) == []


def normalised(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def test_help_is_instant() -> None:
    command = [sys.executable, "-m", "services.cli", "--help"]
    durations_s = []
    for _ in range(3):
        started_s = children_s()
        output = subprocess.run(command, cwd=ROOT, env=without_coverage(), capture_output=True, text=True, check=True, timeout=240).stdout
        durations_s.append(children_s() - started_s)
        assert "up" in output and "doctor" in output
    assert min(durations_s) < MAX_HELP_S


def children_s() -> float:
    """What the processes started so far have computed: whatever else the machine does is no part of it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def without_coverage() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_documents_exist(document: str) -> None:
    path = ROOT / document
    if not path.is_file():
        pytest.skip(f"there is no {document} yet")
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {match.group(1) for match in PATH.finditer(prose)}
    assert sorted(name for name in named if not (ROOT / name).exists() and not is_bare_forbidden_example(name)) == []


def is_bare_forbidden_example(name: str) -> bool:
    """Names the documents mention as what not to do, or as parts of a user's model directory."""
    return name in {"utils.py", "common.py", "helpers.py", "config.json", "tokenizer.json"}


def test_no_machine_of_ours_is_named_in_the_files() -> None:
    """A path below someone's home or workplace works for nobody else."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.split("\0")
    files = [name for name in listed if name and (ROOT / name).is_file() and not name.startswith("tests/data/")]
    local_path = re.compile(rb"(?<![\w.<])/(?:work|home|Users)/(?!pagewire)\w")
    assert [name for name in files if local_path.search((ROOT / name).read_bytes())] == []
