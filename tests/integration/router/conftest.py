"""A router with stub workers that emit scripted tokens, over real HTTP, ZeroMQ and Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_answers import decode_of, namespaces
from router_harness import RedisServer, Stack
from stub_worker import Script

from services.router.__main__ import load_model
from services.router.served_model import ServedModel
from shared.cache import redis_prefix_index
from shared.config import load_settings


@pytest.fixture(scope="package")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="package")
def model() -> ServedModel:
    return load_model(load_settings("router", {}))


@pytest.fixture
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is waited for, by a router that is made after this: in service what does not come at once is done without."""
    monkeypatch.setattr(redis_prefix_index, "SOCKET_TIMEOUT_S", 10.0)


@pytest.fixture
def bare(redis_server: RedisServer, model: ServedModel) -> Iterator[Stack]:
    """A router without workers."""
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}")
    yield stack
    stack.close()


@pytest.fixture(scope="package")
def shared_stack(redis_server: RedisServer, model: ServedModel) -> Iterator[Stack]:
    """A router with one prefill and one decode worker, for tests that only ask."""
    stack = Stack(redis_server.url, model, "shared")
    stack.join("prefill", "prefill-0")
    stack.join("decode", "decode-0")
    stack.wait_ready()
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    decode_of(shared_stack).script = Script()
    return shared_stack
