"""A virtual environment per client, outside the repository: their pins exclude each other's and ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALL_TIMEOUT_S = 3600

PACKAGES: dict[str, Sequence[Sequence[str]]] = {
    "openai": [["openai==3.57.0"]],
    "langchain-openai": [["langchain-openai==1.7.4"]],
    "litellm": [["litellm==1.110.2"]],
    "llm": [["llm==0.36"]],
    "aiperf": [["aiperf==0.13.0", "transformers==5.24.0"]],
    # Torch first: guidellm needs it, and asked for together pip would take a CUDA build of several GB.
    "guidellm": [["torch==2.13.0"], ["guidellm==0.8.1", "transformers==5.24.0"]],
}
"""What each client's environment holds: one list for each call of pip, in order."""


class InstallError(Exception):
    """pip or venv failed; the message ends with what it said."""


def version_of(client: str) -> str:
    """The pinned version of the client itself."""
    return next(package.partition("==")[2] for call in PACKAGES[client] for package in call if package.startswith(f"{client}=="))


def build(client: str, folder: Path, torch_index_url: str | None = None) -> Path:
    """Makes `folder` unless it is complete already, and returns its bin/. An interrupted or outdated one is made again. InstallError."""
    installed = folder / "installed.txt"
    wanted = "\n".join(" ".join(call) for call in PACKAGES[client]) + "\n"
    if installed.is_file() and installed.read_text() == wanted:
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    for call in PACKAGES[client]:
        is_torch = call[0].startswith("torch==")
        index = ["--index-url", torch_index_url] if torch_index_url and is_torch else []
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", *index, *call])
    installed.write_text(wanted)
    return folder / "bin"


def _run(command: list[str]) -> None:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_TIMEOUT_S)
    if done.returncode:
        raise InstallError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
