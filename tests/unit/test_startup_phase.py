"""Where start-up time goes, in the log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time

import pytest

from shared.startup_phase import process_age_s, startup_phase


def test_a_part_is_logged_with_its_seconds_for_those_who_ask_for_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), startup_phase("a nap"):
        time.sleep(0.02)
    (message,) = caplog.messages
    took = re.fullmatch(r"start-up: a nap took (\S+) s", message)
    assert took is not None and 0.02 <= float(took[1]) < 10
    caplog.clear()
    with caplog.at_level(logging.INFO), startup_phase("a nap"):
        pass
    assert caplog.messages == []


def test_a_process_knows_its_age() -> None:
    code = "import time; time.sleep(0.3); from shared.startup_phase import process_age_s; print(process_age_s())"
    start_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.25 < float(done.stdout) < time.monotonic() - start_s + 0.1
    assert process_age_s() > float(done.stdout)
