"""Real clients, unmodified, against a real server: `make clients`, or `python tests/clients/run.py --help`.

Each client gets a virtual environment of its own (kept in a cache folder, so only the first run installs) and a driver of
drivers/, which asks what users of that client ask and checks the answers. With --record, what each client sent is written to
tests/contract/client_requests, which tests/contract/test_client_requests.py replays without the clients.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "clients"
FIXTURES = ROOT / "tests" / "contract" / "client_requests"
DRIVER_TIMEOUT_S = 900

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from client_venv import PACKAGES, InstallError, build, version_of  # noqa: E402
from local_stack import LocalStack  # noqa: E402
from recording_proxy import RecordingProxy  # noqa: E402

from shared.model_files.model_source import resolve_model  # noqa: E402


class ClientError(Exception):
    """A driver failed; the message says how."""


def parse_arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "clients"
    parser = argparse.ArgumentParser(prog="tests/clients/run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=sorted(PACKAGES), metavar="NAME", help=f"one of {', '.join(PACKAGES)}; may be repeated"
    )
    parser.add_argument("--record", action="store_true", help="write what each client sends to tests/contract/client_requests")
    parser.add_argument("--json", action="store_true", help="one JSON object a client on stdout; progress goes to stderr")
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="where the environments are kept (default: %(default)s)")
    parser.add_argument(
        "--torch-index-url", default=os.environ.get("TORCH_INDEX_URL") or None, metavar="URL",
        help="package index that guidellm needs its torch from, e.g. one of CPU builds (default: TORCH_INDEX_URL, else pip decides)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    output = sys.stderr if arguments.json else sys.stdout
    say = functools.partial(print, file=output, flush=True)
    results = []
    with contextlib.ExitStack() as resources:
        work_folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="pagewire-clients-")))
        tokenizer = work_folder / "tokenizer"
        resolve_model("smollm2").load_tokenizer().save_pretrained(tokenizer)
        stack: LocalStack | None = None
        for client in arguments.only or PACKAGES:
            start_s = time.monotonic()
            error = None
            try:
                say(f"{client} {version_of(client)}: environment ...")
                binaries = build(client, arguments.cache / client, arguments.torch_index_url)
                if stack is None:
                    say("starting the server ...")
                    stack = resources.enter_context(LocalStack())
                say(f"{client}: running ...")
                drive(client, binaries, stack, tokenizer, work_folder / client, arguments.record, output)
            except (InstallError, ClientError, subprocess.TimeoutExpired) as caught:
                error = str(caught)
            result = {
                "client": client, "version": version_of(client), "passed": error is None,
                "seconds": round(time.monotonic() - start_s, 1), "error": error,
            }  # fmt: skip
            results.append(result)
            say(f"{client}: {'passed' if error is None else 'FAILED: ' + error} ({result['seconds']} s)")
            if arguments.json:
                print(json.dumps(result), flush=True)
    num_failed = sum(not result["passed"] for result in results)
    say(f"{len(results) - num_failed} of {len(results)} clients passed")
    return 1 if num_failed else 0


def drive(client: str, binaries: Path, stack: LocalStack, tokenizer: Path, folder: Path, is_recording: bool, output: Any) -> None:
    """Runs the client's driver; afterwards no worker may hold a block for a request any more. ClientError."""
    folder.mkdir()
    proxy = RecordingProxy(stack.url) if is_recording else None
    with proxy or contextlib.nullcontext():
        # Not named after the client: Python would then import the driver in the client's place.
        driver = HERE / "drivers" / f"drive_{client.replace('-', '_')}.py"
        command = [str(binaries / "python"), str(driver), proxy.url if proxy else stack.url, stack.model, str(tokenizer)]
        process = subprocess.Popen(command, cwd=folder, env=client_environment(), stdout=output, start_new_session=True)
        try:
            code = process.wait(DRIVER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ClientError(f"not done after {DRIVER_TIMEOUT_S} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise ClientError(f"its driver ended with code {code}")
    try:
        stack.wait_until_idle()
    except AssertionError as error:
        raise ClientError(str(error)) from error
    if proxy:
        FIXTURES.mkdir(parents=True, exist_ok=True)
        fixture = {"client": client, "version": version_of(client), "requests": proxy.requests}
        (FIXTURES / f"{client}.json").write_text(json.dumps(fixture, indent=1, ensure_ascii=False) + "\n")


def client_environment() -> dict[str, str]:
    """Ours without what would change how a client behaves: keys, addresses, proxies, our own import path."""
    dropped = ("PYTHON", "PAGEWIRE_", "OPENAI_", "LITELLM_", "LLM_", "LANGCHAIN_", "LANGSMITH_", "AIPERF_", "GUIDELLM_", "HF_", "COVERAGE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped) and not name.lower().endswith("_proxy")}
    return {**kept, "NO_COLOR": "1"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
