from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.openai.openai_types import CompletionRequest, parse_body
from services.router.openai.response_format import JSON_WHITESPACE, AskedGrammar, asked_grammar
from shared.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> AskedGrammar | None:
    return asked_grammar(parse_body(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode()))


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        asked(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "json", SCHEMA, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": False}},
            "json",
            SCHEMA,
            "structured_outputs",
        ),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", ["a", "é"], "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x", "structured_outputs"),
        ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
        ({"json_schema": json.dumps(SCHEMA)}, "json", SCHEMA, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "g"}, "grammar", "g", "ebnf"),
    ],
)
def test_every_name_of_it_asks_for_the_same(fields: dict[str, Any], kind: str, text: Any, param: str) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.kind, found.param) == (kind, param)
    if kind == "json":
        assert json.loads(found.text) == {**text, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    else:
        assert (json.loads(found.text) if kind == "choice" else found.text) == text


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}])
def test_nothing_asked_leaves_the_answer_free(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "NaN"}, "guided_json"),
        ({"guided_json": '{"minimum": NaN}'}, "guided_json"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
    ],
)
def test_what_is_wrong_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param
