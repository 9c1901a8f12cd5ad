"""The containers as a user runs them: built, started, asked with the stock OpenAI client, broken and healed. In order, one stack."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from compose_stack import BUILD_TIMEOUT_S, READY_TIMEOUT_S, ComposeStack
from openai import APIStatusError, OpenAI

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(BUILD_TIMEOUT_S + READY_TIMEOUT_S + 300.0)]

PROMPT = "1, 2, 3, 4, 5,"
ANSWER = " 6, 7, 8, 9, 10, 11, 12,"
HEALED_WITHIN_S = 60.0
# Ends the worker under the container's init, as a crash or the out-of-memory killer would. (`docker kill` is not that: Docker
# takes it as the wish of the operator and does not restart the container.)
CRASH = """
import os, signal
for entry in os.listdir("/proc"):
    if entry.isdigit() and entry not in ("1", str(os.getpid())):
        words = open(f"/proc/{entry}/cmdline").read().split(chr(0))
        if words[-2:-1] == ["decode"]:
            os.kill(int(entry), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    stack = ComposeStack()
    try:
        started_s = time.monotonic()
        stack.compose("build", timeout_s=BUILD_TIMEOUT_S)
        built_s = time.monotonic()
        stack.compose("up", "--detach", "--wait", "--wait-timeout", str(int(READY_TIMEOUT_S)), timeout_s=READY_TIMEOUT_S + 60.0)
        print(f"built in {built_s - started_s:.0f} s, ready {time.monotonic() - built_s:.0f} s later")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


@pytest.fixture(scope="module")
def client(stack: ComposeStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=60.0, max_retries=0) as client:
        yield client


def complete(client: OpenAI) -> str:
    model = client.models.list().data[0].id
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text


def complete_when_healed(client: OpenAI) -> str:
    deadline_s = time.monotonic() + HEALED_WITHIN_S
    while True:
        try:
            return complete(client)
        except APIStatusError as error:
            if error.status_code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def test_completion_is_right(client: OpenAI) -> None:
    assert complete(client) == ANSWER


def test_chat_streams_one_token_a_chunk(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    question = "What is the capital of France?"
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 4


def test_router_image_has_no_torch(stack: ComposeStack) -> None:
    check = "import importlib.util as u; print('torch' if u.find_spec('torch') else 'none')"
    assert stack.compose("exec", "-T", "router", "python3", "-c", check).strip() == "none"


def test_services_do_not_run_as_root(stack: ComposeStack) -> None:
    for service in ("router", "prefill", "decode"):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() != "0", service


def test_crashed_decode_worker_comes_back(stack: ComposeStack, client: OpenAI) -> None:
    stack.compose("exec", "-T", "decode", "python3", "-c", CRASH)
    crashed_s = time.monotonic()
    try:
        complete(client)
    except APIStatusError as error:
        assert error.status_code == 503
    assert time.monotonic() - crashed_s < 10.0, "a request to a dead worker hung"
    assert complete_when_healed(client) == ANSWER
    print(f"healed {time.monotonic() - crashed_s:.0f} s after the crash")
    stack.wait_ready()


def test_service_goes_on_when_one_of_two_decode_containers_is_killed(stack: ComposeStack, client: OpenAI) -> None:
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "decode=2", timeout_s=READY_TIMEOUT_S)
    containers = stack.containers("decode")
    assert len(containers) == 2
    assert complete_when_healed(client) == ANSWER
    for victim in containers:
        stack.docker("kill", victim)
        killed_s = time.monotonic()
        assert complete_when_healed(client) == ANSWER
        assert time.monotonic() - killed_s < 20.0
        stack.docker("start", victim)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while stack.docker("inspect", "--format", "{{.State.Health.Status}}", victim).strip() != "healthy":
            assert time.monotonic() < deadline_s, stack.logs()
            time.sleep(0.5)


def test_containers_stop_within_their_grace_period(stack: ComposeStack) -> None:
    started_s = time.monotonic()
    stack.compose("stop")
    assert time.monotonic() - started_s < 10.0
    codes = stack.compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").split("\n")
    assert [line for line in codes if line and not line.endswith(" 0")] == []
