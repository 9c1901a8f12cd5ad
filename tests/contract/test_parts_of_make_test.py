"""Who reads only the end of `make test` learns of failures in its first part too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_early.py").write_text("def test_fine(): pass\ndef test_broken(): assert False\n")
    (tmp_path / "test_late.py").write_text("def test_fine(): pass\n")
    return tmp_path


def run(project: Path, *arguments: str) -> list[str]:
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-ra", *arguments]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout.splitlines()


def test_the_last_part_names_what_failed_in_the_first_and_ends_with_its_own_summary(project: Path) -> None:
    run(project, "--part", "first", "test_early.py")
    lines = run(project, "--part", "last", "test_late.py")
    assert "test_early.py::test_broken" in lines
    assert "test_early.py::test_fine" not in lines
    assert "1 passed" in lines[-1]


def test_a_first_part_without_failures_is_not_mentioned(project: Path) -> None:
    run(project, "--part", "first", "test_late.py")
    assert not [line for line in run(project, "--part", "last", "test_late.py") if "first part" in line]


def test_a_first_part_that_was_broken_off_is_said_to_be(project: Path) -> None:
    run(project, "--part", "first", "test_late.py")
    (project / "test_early.py").write_text("import os\ndef test_it(): os._exit(1)\n")
    run(project, "--part", "first", "test_early.py")
    assert "it was broken off: see its output above" in run(project, "--part", "last", "test_late.py")
