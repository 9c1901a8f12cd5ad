"""Answers held to a form by the real system: every one of them parses, whatever the model would rather say."""

from __future__ import annotations

import json
import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from local_stack import LocalStack

STRING = {"type": "string", "maxLength": 8}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    record(name=STRING, age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(score={"type": "number", "minimum": -1, "maximum": 1}),
    record(ok={"type": "boolean"}, note={"type": ["string", "null"], "maxLength": 5}),
    record(colour={"enum": ["red", "green", "dark blue"]}),
    record(kind={"const": "point"}, x={"type": "integer", "minimum": -99, "maximum": 99}),
    record(tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 3}),
    record(numbers={"type": "array", "items": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, "maxItems": 4}),
    record(inner=record(deeper=record(value={"type": "integer", "minimum": 0, "maximum": 9}))),
    record([], a=STRING, b={"type": "boolean"}),
    record(["a"], a={"type": "boolean"}, b=STRING),
    record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    record(when={"type": "string", "format": "date"}),
    record(id={"type": "string", "format": "uuid"}),
    record(either={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]}),
    {"anyOf": [record(cat={"type": "boolean"}), record(dog=STRING)]},
    {**record(first={"$ref": "#/$defs/p"}, second={"$ref": "#/$defs/p"}), "$defs": {"p": record(x={"type": "boolean"})}},
    {"type": "array", "items": record(n={"type": "integer", "minimum": 1, "maximum": 3}), "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["é", "🦙", '"quoted"']}], "items": False, "minItems": 2},
    {"allOf": [record(a={"type": "integer", "maximum": 50}), {"type": "object", "properties": {"a": {"minimum": 10}}}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": record(v={"type": "boolean"}, kids={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}),
                  "leaf": record(l={"type": "null"})},
    },
]  # fmt: skip
QUESTIONS = ["Give me an example.", "Who are you?", "1, 2, 3, 4, 5,", 'Write a poem about {braces} and "quotes".', "🦙🦙🦙"]


def refusal(stack: LocalStack, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        stack.post(path, {"prompt": "a", "max_tokens": 4, **body})
    assert caught.value.code == 400
    error: dict[str, Any] = json.loads(caught.value.read())["error"]
    return error


@pytest.mark.slow
@pytest.mark.parametrize("num_questions", [1, pytest.param(len(QUESTIONS), marks=pytest.mark.long)])
def test_all_answers_over_20_schemas_validate(stack: LocalStack, num_questions: int) -> None:
    def ask(case: tuple[int, int]) -> tuple[str, str]:
        schema, question = case
        answer = stack.post(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": QUESTIONS[question]}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[schema], "strict": True}},
                "temperature": (0, 0.7, 1.5)[question % 3],
                "seed": question,
                "max_tokens": 256,
            },
        )
        choice = answer["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    cases = [(schema, (schema + i) % len(QUESTIONS)) for schema in range(len(SCHEMAS)) for i in range(num_questions)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, cases))
    assert len(answers) == 20 * num_questions
    for (schema, _), (text, finish_reason) in zip(cases, answers, strict=True):
        assert finish_reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMAS[schema])


def test_every_way_to_ask_holds(stack: LocalStack) -> None:
    def text(**fields: Any) -> str:
        choice = stack.complete("The capital of France is", 40, **fields)["choices"][0]
        assert choice["finish_reason"] == "stop"
        answer: str = choice["text"]
        return answer

    assert text(guided_choice=["Rome", "Oslo"]) in ("Rome", "Oslo")
    assert re.fullmatch(r"\d{3}-\d{4}", text(structured_outputs={"regex": r"\d{3}-\d{4}"}, ignore_eos=True))
    assert text(ebnf='root ::= "x" ("y" | "z")') in ("xy", "xz")
    assert text(guided_grammar='start: "x" /[0-9]{2}/').startswith("x")
    assert isinstance(json.loads(text(response_format={"type": "json_object"})), dict)
    assert text(guided_choice=["no"], min_tokens=10) == "no"


def test_streamed_and_whole_answers_are_the_same_and_each_choice_has_its_own_state(stack: LocalStack) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS[0]}}, "temperature": 1.2, "seed": 5}
    whole = stack.complete("A person:", 80, n=4, **body)["choices"]
    assert len({choice["text"] for choice in whole}) > 1
    for choice in whole:
        jsonschema.validate(json.loads(choice["text"]), SCHEMAS[0])
    streamed = stack.stream("A person:", 80, **body)
    assert (streamed.text, streamed.token_ids) == (whole[0]["text"], whole[0]["token_ids"])


def test_an_answer_that_the_grammar_keeps_open_ends_at_max_tokens(stack: LocalStack) -> None:
    choice = stack.complete("Once upon a time", 12, guided_regex='"[a-z ]*', ignore_eos=True)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch('"[a-z ]*', choice["text"])


def test_bad_words_do_not_occur_in_any_tokenisation(stack: LocalStack) -> None:
    assert "Paris" not in stack.complete("The capital of France is", 24, bad_words=["Paris"])["choices"][0]["text"]
    alphabet = stack.complete("Here is the English alphabet: ABC", 24, bad_words=["DEF", "GH"], ignore_eos=True)["choices"][0]["text"]
    assert "DEF" not in alphabet
    assert "GH" not in alphabet
    held = stack.complete("The capital of France is", 8, bad_words=["Paris"], guided_choice=["Paris", "Pari"])["choices"][0]
    assert held["text"] == "Pari"


def test_what_cannot_be_satisfied_is_a_400_that_costs_no_block(stack: LocalStack) -> None:
    assert refusal(stack, guided_json={"enum": []})["param"] == "guided_json"
    assert refusal(stack, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}})["param"] == (
        "response_format"
    )
    assert refusal(stack, guided_choice=["a"], allowed_token_ids=[5])["param"] == "guided_choice"
    assert refusal(stack, guided_choice=["Paris"], bad_words=["Paris"])["param"] == "guided_choice"
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refusal(stack, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=tools)
    assert error["param"] == "tools"
    assert "no place for tools" in error["message"]
    stack.wait_until_idle()


def test_a_slow_grammar_is_computed_beside_the_steps_of_others(stack: LocalStack) -> None:
    """Its compilation takes longer than the prompt and its masks longer than a step: the sequence waits, the others go on."""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(stack.complete, "aaaa", 8, guided_regex="(a{300}){300}", ignore_eos=True)
        others = [stack.complete("1, 2, 3, 4, 5,", 24)["choices"][0]["text"] for _ in range(3)]
        assert others == [" 6, 7, 8, 9, 10, 11, 12,"] * 3
        assert re.fullmatch("a+", slow.result()["choices"][0]["text"])


def test_a_grammar_that_becomes_too_complex_on_the_way_ends_only_its_own_request(stack: LocalStack) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(stack.complete, "1, 2, 3, 4, 5,", 24)
        assert (
            refusal(stack, guided_regex=r"(\p{L}{1,100}){1,100}", max_tokens=64, ignore_eos=True, temperature=0)["param"] == "guided_regex"
        )
        assert other.result()["choices"][0]["text"] == " 6, 7, 8, 9, 10, 11, 12,"
    stack.wait_until_idle()


@pytest.mark.slow
def test_state_survives_preemption() -> None:
    """Four answers in a pool that two of them do not fit into, however late the others come."""
    with LocalStack(debug="true", decode_num_blocks=9, prefill_num_blocks=64) as stack:
        item = {"type": "integer", "minimum": 100, "maximum": 999}
        schema = record(items={"type": "array", "items": item, "minItems": 12, "maxItems": 12})

        def ask(seed: int) -> str:
            answer = stack.complete(f"List {seed}:", 120, guided_json=schema, temperature=1.0, seed=seed)["choices"][0]
            assert answer["finish_reason"] == "stop"
            text: str = answer["text"]
            return text

        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(ask, range(4)))
        for text in together:
            jsonschema.validate(json.loads(text), schema)
        assert stack.counter("decode-0", "preemptions") > 0, "the pool was not small enough to show anything"
        assert together[3] == ask(3)
