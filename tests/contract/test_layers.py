"""The layers of the house, beyond what import-linter (`make check`) sees."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "triton", "transformers"}
TORCH_FOLDERS = ("shared/engine/", "kernels/", "services/prefill/", "services/decode/")
MAY_ASK_FOR_TORCH = {"services/local/doctor.py"}
BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton"}:
            raise ImportError("this process must not need " + name)
sys.meta_path.insert(0, Block())
"""


def python_files() -> Iterator[tuple[str, Path]]:
    for package in ("services", "shared", "kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module}
    return names


@pytest.mark.parametrize("module", ["services.router.__main__", "services.cli", "services.local.stack", "services.local.doctor"])
def test_starts_without_torch(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"{BLOCK_TORCH}\nimport {module}"], cwd=ROOT, check=True, timeout=60)


def test_only_the_engine_kernels_and_workers_import_torch() -> None:
    offenders = [
        name
        for name, path in python_files()
        if not name.startswith(TORCH_FOLDERS)
        and name not in MAY_ASK_FOR_TORCH
        and HEAVY & {imported.split(".")[0] for imported in imported_names(path)}
    ]
    assert offenders == []


def test_nothing_imports_pickle() -> None:
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    assert [name for name, path in python_files() if unsafe & {imported.split(".")[0] for imported in imported_names(path)}] == []


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert [name for name, path in python_files() if path.name in drawers] == []


def test_every_module_of_shared_has_its_layer() -> None:
    """A module the layers contract does not name, alone or with its package, is checked by nothing: give it a place there."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {module.strip() for layer in layers for module in layer.replace("|", ":").split(":")}
    unnamed = []
    for path in sorted((ROOT / "shared").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name != "__init__.py" and not any(".".join(parts[:length]) in named for length in range(2, len(parts) + 1)):
            unnamed.append(".".join(parts))
    assert unnamed == []


def test_resolving_needs_no_torch() -> None:
    code = "import sys; from shared.model_files.model_source import resolve_model; import shared.model_files.weight_reader"
    code += "; resolve_model('smollm2').load_tokenizer()"
    code += "; sys.exit('torch' in sys.modules or 'llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
