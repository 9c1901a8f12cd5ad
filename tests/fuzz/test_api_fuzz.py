"""Requests made from the API's own description, valid and not: none may make the router fail, and each answer is as described.

A few hundred in `make test`; `make fuzz` makes 20,000 of those that have a body.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from router_harness import RedisServer, Stack, eventually
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from stub_worker import Script

from services.router.__main__ import load_model
from shared.config import load_settings
from shared.messages import AbortRequest, DecodeRequest

NUM_EXAMPLES = int(os.environ.get("PAGEWIRE_FUZZ_EXAMPLES", "25"))
"""Of each operation."""
IS_SEARCH = "PAGEWIRE_FUZZ_EXAMPLES" in os.environ
"""Other examples each time."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    server = RedisServer()
    stack = Stack(server.url, load_model(load_settings("router", {})), "fuzz")
    # All in one process with whoever draws the requests, which may keep the others from running for seconds.
    stack.join("prefill", "p", lease_s=60)
    # Short: without a limit of its own, an answer that ignores EOS fills the context.
    stack.join("decode", "d", Script(), lease_s=60, max_model_len=256)
    stack.wait_ready()
    yield stack
    stack.close()
    server.stop()


@pytest.fixture(scope="module")
def api(stack: Stack) -> schemathesis.Schema:
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


def fuzz(operation: schemathesis.openapi.APIOperation, num_examples: int, mode: GenerationMode) -> None:
    @settings(max_examples=num_examples, derandomize=not IS_SEARCH, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_no_body_makes_the_router_fail(api: schemathesis.Schema, path: str, mode: GenerationMode) -> None:
    fuzz(api[path]["POST"], NUM_EXAMPLES, mode)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/v1/responses/{response_id}", "/ready", "/version", "/metrics"])
def test_no_address_makes_the_router_fail(api: schemathesis.Schema, path: str) -> None:
    fuzz(api[path]["GET"], min(NUM_EXAMPLES, 100), GenerationMode.POSITIVE)


def test_all_that_reached_decode_has_ended_there(stack: Stack) -> None:
    """Last in this file: what the others sent is over, so the router holds nothing any more."""
    eventually(lambda: stack.parts.frontend._in_flight.num_in_flight == 0)
    decode = next(worker for worker in stack.workers if worker.role == "decode")
    assert decode.of_kind(DecodeRequest), "nothing that was sent was valid: the description is of no use"
    assert len(decode.of_kind(AbortRequest)) <= len(decode.of_kind(DecodeRequest))
