"""The description of the API: complete, usable offline, and true of real answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute
from router_harness import RedisServer, Stack

from services.router.__main__ import load_model
from services.router.http import openapi
from shared.config import load_settings

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    server = RedisServer()
    stack = Stack(server.url, load_model(load_settings("router", {})), "openapi")
    stack.join("prefill", "p")
    stack.join("decode", "d")
    stack.wait_ready()
    yield stack
    stack.close()
    server.stop()


@pytest.fixture(scope="module")
def description(stack: Stack) -> dict[str, Any]:
    return stack.client.get("/openapi.json").json()


def test_every_route_says_what_it_takes_what_it_answers_and_how_it_fails(description: dict[str, Any]) -> None:
    assert set(description["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/models", "/v1/models/{name}",
        "/tokenize", "/detokenize", "/health", "/ping", "/ready", "/version", "/metrics",
    }  # fmt: skip
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert operation["description"] or operation["summary"], path
            assert "422" not in operation["responses"]
            if method == "post":
                assert operation["requestBody"]["required"]
                assert {"200", "400", "404", "413", "415", "500"} <= set(operation["responses"])
                for status in ("400", "500"):
                    reference = operation["responses"][status]["content"]["application/json"]["schema"]["$ref"]
                    assert reference == "#/components/schemas/Error"


def test_all_references_are_there(description: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', httpx.Response(200, json=description).text))
    assert references - set(description["components"]["schemas"]) == set()


def test_fields_of_requests_are_described(description: dict[str, Any]) -> None:
    fields = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in ("messages", "temperature", "top_k", "tools", "response_format", "seed", "logit_bias", "stop", "max_completion_tokens"):
        assert name in fields


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 2, "n": 2, "echo": True}, "Completion"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}, "ChatCompletion"),
        ("/v1/chat/completions", {"messages": CHAT}, "ChatCompletion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3, "top_logprobs": 1}, "ResponseObject"),
        ("/tokenize", {"prompt": "a b"}, "Tokens"),
        ("/detokenize", {"tokens": [5, 6]}, "Text"),
        ("/v1/completions", {}, "Error"),
        ("/v1/completions", {"prompt": "a", "model": "x"}, "Error"),
    ],
)
def test_answers_are_as_described(stack: Stack, description: dict[str, Any], path: str, body: dict[str, Any], name: str) -> None:
    response = stack.client.post(path, json=body)
    assert (response.status_code == 200) == (name != "Error")
    described = description["paths"][path]["post"]["responses"][str(response.status_code)]["content"]["application/json"]["schema"]
    assert described["$ref"].endswith(f"/{name}")
    jsonschema.validate(response.json(), {**described, "components": description["components"]})


@pytest.mark.parametrize(
    ("path", "model"),
    [("/v1/models", openapi.ModelList), ("/v1/models/SmolLM2-135M-Instruct", openapi.ModelCard), ("/ready", openapi.Readiness)],
)
def test_answers_to_get_are_as_described(stack: Stack, path: str, model: type[openapi.Version]) -> None:
    model.model_validate_json(stack.client.get(path).content, strict=True)


def test_the_page_and_all_it_loads_come_from_this_server(stack: Stack) -> None:
    root = stack.client.get("/", follow_redirects=True)
    assert root.url.path == "/docs"
    assert "SwaggerUIBundle" in root.text
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)|url: ?["']([^"']+)""", root.text)
    loaded = [httpx.URL(stack.url).join(first or second) for first, second in addresses]
    assert len(loaded) >= 3
    for address in loaded:
        assert f"{address.scheme}://{address.netloc.decode()}" == stack.url
        assert stack.client.get(address.path).status_code == 200
    css = stack.client.get("/docs/swagger-ui.css").text
    assert not [found for found in re.findall(r"url\(([^)]+)\)", css) if not found.startswith(("data:", '"data:', "#"))]


def test_a_key_that_is_needed_is_described(stack: Stack) -> None:
    locked = Stack(stack.redis_url, stack.model, "openapi-locked", api_keys="k")
    try:
        described = locked.client.get("/openapi.json").json()
    finally:
        locked.close()
    assert described["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
    assert described["paths"]["/v1/completions"]["post"]["security"] == [{"api_key": []}]
    assert "401" in described["paths"]["/v1/completions"]["post"]["responses"]
    assert "security" not in described["paths"]["/health"]["get"]


def test_no_route_is_left_out_of_the_description(stack: Stack, description: dict[str, Any]) -> None:
    hidden = {"/", "/docs", "/docs/swagger-ui.js", "/docs/swagger-ui.css", "/docs/icon.png", "/openapi.json"}
    routes = {route.path_format for route in stack.server.config.app._app.routes if isinstance(route, APIRoute)}
    assert routes - set(description["paths"]) - hidden == set()
