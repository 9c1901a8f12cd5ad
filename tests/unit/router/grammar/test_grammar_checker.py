from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator

import pytest

from services.router.grammar import grammar_checker
from services.router.grammar.grammar_checker import MAX_GRAMMAR_BYTES, GrammarChecker
from shared.errors import InvalidRequestError


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    """It waits longer than the router's: on a busy machine whatever is checked in a moment may take half a second."""
    running = GrammarChecker(1000, timeout_s=30.0)
    yield running
    running.close()


@pytest.fixture
def hurried() -> Iterator[GrammarChecker]:
    running = GrammarChecker(1000, timeout_s=0.5)
    yield running
    running.close()


def check(checker: GrammarChecker, kind: str, text: str) -> str:
    return asyncio.run(checker.check(kind, text, "field"))  # type: ignore[arg-type]


def refusal(checker: GrammarChecker, kind: str, text: object) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check(checker, kind, text if isinstance(text, str) else json.dumps(text))
    assert caught.value.param == "field"
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type": "object"}'),
        ("json", '{"type":"array","items":' * 60 + "{}" + "}" * 60),
        ("regex", r"\d{3}-\d{4}"),
        ("choice", '["a", "\\"\\n", "\\ud83e\\udd99"]'),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", 'start: "a" | /[0-9]+/'),
        ("lark", 'start: <[900]> "a"'),
    ],
)
def test_usable_grammars_pass(checker: GrammarChecker, kind: str, text: str) -> None:
    assert check(checker, kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", {"enum": []}),
        ("json", {"type": "integer", "minimum": 5, "maximum": 3}),
        ("json", {"type": "string", "minLength": 5, "maxLength": 2}),
        ("json", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
        ("json", {"type": "object", "properties": {"a": False}, "required": ["a"]}),
        ("json", {"$ref": "#"}),
        ("json", {"$ref": "#/$defs/none"}),
        ("json", {"$ref": "http://localhost:1/schema.json"}),
        ("json", {"type": "foo"}),
        ("json", {"not": {"type": "string"}}),
        ("json", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        ("json", {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}}),
        ("regex", "("),
        ("regex", r"(a)\1"),
        ("regex", r"[^\s\S]"),
        ("grammar", "start: foo"),
        ("grammar", "start: start"),
        ("grammar", "!!!"),
    ],
)
def test_impossible_ones_are_refused_with_a_reason(checker: GrammarChecker, kind: str, text: object) -> None:
    assert refusal(checker, kind, text).startswith("field cannot be used: ")


def test_recursion_that_can_end_passes(checker: GrammarChecker) -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}, "required": ["children"]}
    maybe = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    assert check(checker, "json", json.dumps(tree))
    assert check(checker, "json", json.dumps(maybe))


def test_one_that_ends_its_process_is_refused_and_the_next_is_checked(checker: GrammarChecker) -> None:
    deep = "start: a0\n" + "".join(f"a{rule}: a{rule + 1}\n" for rule in range(7000)) + 'a7000: "x"'
    assert "nested too deeply" in refusal(checker, "grammar", deep)
    assert check(checker, "regex", "b")


def test_one_that_takes_too_long_is_refused_and_remembered(hurried: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "longer than 0.5 s" in refusal(hurried, "regex", "a?" * 50_000)
    monkeypatch.setattr(grammar_checker, "_exchange", lambda *_: 1 / 0)
    assert "longer than 0.5 s" in refusal(hurried, "regex", "a?" * 50_000)


def test_after_one_that_takes_too_long_the_next_is_checked(hurried: GrammarChecker) -> None:
    assert "longer than 0.5 s" in refusal(hurried, "regex", "b?" * 50_000)
    for number in range(20):  # the machine may be busy, and a refusal is remembered
        with contextlib.suppress(InvalidRequestError):
            assert check(hurried, "regex", f"c{number}")
            return
    raise AssertionError("nothing is checked any more")


def test_a_large_one_is_refused_unseen(checker: GrammarChecker) -> None:
    assert str(MAX_GRAMMAR_BYTES) in refusal(checker, "regex", "a" * (MAX_GRAMMAR_BYTES + 1))


def test_many_at_once_are_each_answered(checker: GrammarChecker) -> None:
    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(checker.check("regex", f"x{number}", "field") for number in range(50)))

    assert len(set(asyncio.run(all_of_them()))) == 50


def test_a_grammar_that_many_ask_for_at_once_is_counted_once(checker: GrammarChecker) -> None:
    async def at_once() -> None:
        await asyncio.gather(*(checker.check("regex", "at once {3}", "field") for _ in range(10)))

    asyncio.run(at_once())
    assert checker._remembered_bytes == sum(verdict.size_bytes for verdict in checker._remembered.values())


def test_a_process_that_ends_for_other_reasons_costs_no_grammar_its_use(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, num_failures = grammar_checker._exchange, 0

    def fail_once(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
        nonlocal num_failures
        if b"good" in line and num_failures == 0:
            num_failures += 1
            process.kill()
            process.wait()
        return exchange(process, line, timeout_s)

    monkeypatch.setattr(grammar_checker, "_exchange", fail_once)
    assert check(checker, "regex", "good") and num_failures == 1


def test_a_refusal_that_a_busy_machine_may_have_caused_is_not_for_good(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = grammar_checker._exchange

    def be_busy(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
        if b"slow today" in line:
            raise TimeoutError
        return exchange(process, line, timeout_s)

    monkeypatch.setattr(grammar_checker, "DOUBTFUL_S", 0.0)
    monkeypatch.setattr(grammar_checker, "_exchange", be_busy)
    assert "to compile" in refusal(checker, "regex", "slow today")
    monkeypatch.undo()
    for _ in range(3):  # the machine may be busy now, too
        with contextlib.suppress(InvalidRequestError):
            assert check(checker, "regex", "slow today")
            return
    raise AssertionError("it stayed refused")
