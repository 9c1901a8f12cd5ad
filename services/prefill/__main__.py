"""`python -m services.prefill`: one prefill worker, settings from the environment."""

from __future__ import annotations

import sys

from shared.config import Settings, load_settings
from shared.errors import ConfigurationError
from shared.worker.worker_process import BuildWorker, run_worker


def run(settings: Settings) -> int:
    """Serve until SIGTERM; returns the exit code."""
    return run_worker("prefill", settings, _worker_class)


def _worker_class() -> BuildWorker:
    from services.prefill.worker import PrefillWorker  # imports torch: after run_worker has set up the process

    return PrefillWorker


def main() -> int:
    try:
        return run(load_settings("prefill"))
    except ConfigurationError as error:
        print(f"pagewire prefill: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
