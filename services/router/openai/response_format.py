"""The request fields that hold an answer to a form, and the one grammar that they ask for.

OpenAI's response_format; vLLM's structured_outputs and its older guided_*; SGLang's json_schema, regex and ebnf. Whether a schema,
expression or grammar can be used is the checker's to say (services/router/grammar/grammar_checker.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.grammar.grammar_checker import GrammarKind
from shared.errors import InvalidRequestError

MAX_CHOICE_STRINGS = 1024
JSON_WHITESPACE = "[ ]?"
"""Between the tokens of JSON. Without a bound, a small model can go on with white space for ever."""

_ANY_OBJECT = {"type": "object"}
_OFF: tuple[object, ...] = (None, False)


class JsonSchemaFormat(BaseModel):
    """`strict` changes nothing: an answer always follows its schema."""

    model_config = ConfigDict(strict=True, extra="ignore")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's form."""

    model_config = ConfigDict(strict=True, extra="allow")
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredOutputFields(BaseModel):
    """Fields of a generation request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True)
class AskedGrammar:
    """What a client asks the answer to match, as yet unchecked. `param` is the field it stands in."""

    kind: GrammarKind
    text: str
    param: str


def asked_grammar(body: StructuredOutputFields, other: AskedGrammar | None = None) -> AskedGrammar | None:
    """What `body` asks for, or `other`; None: any text will do.

    Raises InvalidRequestError when two are asked for, or one is empty or not of its kind.
    """
    asked = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_asked("guided_json", "json", body.guided_json),
        *_asked("guided_regex", "regex", body.guided_regex),
        *_asked("guided_choice", "choice", body.guided_choice),
        *_asked("guided_grammar", "grammar", body.guided_grammar),
        *_asked("json_schema", "json", body.json_schema),
        *_asked("regex", "regex", body.regex),
        *_asked("ebnf", "grammar", body.ebnf),
        *([other] if other is not None else []),
    ]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        also = f"{second} holds a second one" if first == second else f"{first} holds one already"
        raise InvalidRequestError(f"an answer can follow only one schema, expression or grammar, and {also}; leave one out", param=second)
    return asked[0] if asked else None


def _of_response_format(value: ResponseFormat | None) -> list[AskedGrammar]:
    if value is None or value.type == "text":
        return []
    if value.type == "json_object":
        return [asked_json_object("response_format")]
    return [asked_json_schema("response_format", value.json_schema.schema_ if value.json_schema is not None else None)]


def asked_json_object(param: str) -> AskedGrammar:
    return AskedGrammar("json", _schema_text(param, _ANY_OBJECT), param)


def asked_json_schema(param: str, schema: dict[str, Any] | None) -> AskedGrammar:
    """Raises InvalidRequestError."""
    if schema is None:
        raise InvalidRequestError(f"{param}: a format of type json_schema needs a schema, an object", param=param)
    return AskedGrammar("json", _schema_text(param, schema), param)


def _of_structured_outputs(value: StructuredOutputs | None) -> list[AskedGrammar]:
    if value is None:
        return []
    param = "structured_outputs"
    for name, other in (value.model_extra or {}).items():
        if other not in _OFF:
            raise InvalidRequestError(f"{param}.{name[:100]} is not supported by this server; leave it out", param=param)
    any_object = [asked_json_object(param)] if value.json_object else []
    return (
        _asked(param, "json", value.json_)
        + any_object
        + _asked(param, "regex", value.regex)
        + _asked(param, "choice", value.choice)
        + _asked(param, "grammar", value.grammar)
    )


def _asked(param: str, kind: GrammarKind, value: str | dict[str, Any] | list[str] | None) -> list[AskedGrammar]:
    if value is None:
        return []
    if kind == "json":
        return [AskedGrammar(kind, _schema_text(param, value), param)]
    if not value:
        raise InvalidRequestError(f"{param}: the {kind} must not be empty", param=param)
    if isinstance(value, str):
        return [AskedGrammar(kind, value, param)]
    if len(value) > MAX_CHOICE_STRINGS:
        raise InvalidRequestError(f"{param}: at most {MAX_CHOICE_STRINGS} choices are allowed, got {len(value)}", param=param)
    if not all(value):
        raise InvalidRequestError(f"{param}: a choice must not be empty", param=param)
    return [AskedGrammar(kind, json.dumps(value), param)]


def _schema_text(param: str, value: Any) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, dict):
            return json.dumps(with_bounded_whitespace(schema), separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: the schema is not valid JSON: {error}", param=param) from error
    raise InvalidRequestError(f"{param}: the schema must be a JSON object", param=param)


def with_bounded_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what the library needs to be told about white space, in place of whatever a client tells it."""
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
