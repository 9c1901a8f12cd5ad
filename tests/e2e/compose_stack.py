"""The containers of one end-to-end run, under a project name and on a port of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 1200.0
READY_TIMEOUT_S = 240.0


class ComposeStack:
    """`docker compose` for one project. Every command has a deadline and raises with its output when it fails."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.project = f"pagewire-e2e-{os.getpid()}"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEWIRE_", "COMPOSE_"))}
        self._environ = {**environ, "PAGEWIRE_PORT": str(self.port), "COMPOSE_PROJECT_NAME": self.project, "COMPOSE_PROFILES": "cpu"}
        wheels = _wheels_folder()
        if wheels is not None:
            self._environ.setdefault("WHEELS_DIR", str(wheels))

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> str:
        return self._run("docker", "compose", "--ansi", "never", *arguments, timeout_s=timeout_s)

    def docker(self, *arguments: str, timeout_s: float = 60.0) -> str:
        return self._run("docker", *arguments, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "-q", "--status", "running", service).split()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=2.0):
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not ready after {timeout_s:.0f} s\n{self.logs()}") from None
                time.sleep(0.25)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def _run(self, *command: str, timeout_s: float) -> str:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environ,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout[-6000:]}")
        return result.stdout


def _wheels_folder() -> Path | None:
    """Where pip on this machine looks for wheels, if that is a folder: the image builds may take torch from there."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    folder = Path(result.stdout.strip() or "-")
    return folder.resolve() if folder.is_dir() else None
