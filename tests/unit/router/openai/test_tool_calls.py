from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from services.router.grammar.grammar_sandbox import byte_tokenizer
from services.router.openai.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    MAX_PARALLEL_CALLS,
    MISTRAL,
    ParsedText,
    ToolCallParser,
    ToolFamily,
    family_of,
    grammar_of,
    merged_calls,
    takes_tools,
)
from shared.grammar import new_matcher

FAMILIES = (HERMES, LLAMA3_JSON, MISTRAL)
WEATHER = '{"name": "weather", "arguments": {"city": "Par\\"is}", "days": [1, {"a": 2}]}}'
TIME = '{"name":"time","arguments":{}}'
CASES = [
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", ["weather"]),
    (HERMES, f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{TIME}</tool_call>", "Let me see.\n", ["weather", "time"]),
    (HERMES, f"\n\n<tool_call>{TIME}</tool_call>\nDone.", "Done.", ["time"]),
    (HERMES, "no call at all < a <tool", "no call at all < a <tool", []),
    (HERMES, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (HERMES, "  \n", "  \n", []),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", ["f"]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", ["f"]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"x": 1}}', "", ["f"]),
    (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
    (LLAMA3_JSON, 'I say {"name": "f", "parameters": {}}', 'I say {"name": "f", "parameters": {}}', []),
    (LLAMA3_JSON, '{"answer": 5} is it', '{"answer": 5} is it', []),
    (LLAMA3_JSON, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (MISTRAL, f"[TOOL_CALLS][{WEATHER}, {TIME}]", "", ["weather", "time"]),
    (MISTRAL, f"Well. [TOOL_CALLS] [{TIME}]", "Well. ", ["time"]),
    (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
]


def run(family: ToolFamily, pieces: list[str], is_parallel: bool = True) -> tuple[ToolCallParser, list[ParsedText]]:
    parser = ToolCallParser(family, is_parallel)
    return parser, [*(parser.push(piece) for piece in pieces), parser.finish()]


def content_of(parsed: list[ParsedText]) -> str:
    return "".join(part.content for part in parsed)


def calls_of(parsed: list[ParsedText]) -> list[dict[str, Any]]:
    return merged_calls([delta for part in parsed for delta in part.calls])


@pytest.mark.parametrize(("family", "text", "content", "names"), CASES)
def test_pieces_of_any_size_give_the_same_calls_and_text(family: ToolFamily, text: str, content: str, names: list[str]) -> None:
    rng = random.Random(0)
    expected = None
    for cuts in ([], list(range(1, len(text))), *(sorted(rng.sample(range(len(text)), min(4, len(text)))) for _ in range(20))):
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        _, parsed = run(family, pieces)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls_of(parsed)]
        assert content_of(parsed) == content
        assert [name for name, _ in calls] == names
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        expected = expected or calls
        assert calls == expected


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "argum') == ParsedText()
    (first,) = parser.push('ents": {"x"').calls
    assert first["function"] == {"name": "f", "arguments": '{"x"'}
    assert re.fullmatch(r"call_[0-9a-f]{24}", first["id"])
    assert parser.push(": 1").calls == [{"index": 0, "function": {"arguments": ": 1"}}]
    assert parser.push("}}\n</tool").calls == [{"index": 0, "function": {"arguments": "}"}}]
    assert parser.push("_call>") == ParsedText()
    (second,) = parser.push('<tool_call>{"name": "g", "arguments": {}').calls
    assert (second["index"], second["function"]) == (1, {"name": "g", "arguments": "{}"})


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    parser = ToolCallParser(HERMES)
    assert [parser.push(piece).content for piece in ("a <", "tool", "s> <tool_ca", "ke")] == ["a ", "", "<tools> ", "<tool_cake"]


def test_a_call_cut_short_keeps_what_there_is_of_its_arguments() -> None:
    _, parsed = run(HERMES, ['<tool_call>{"name": "f", "arguments": {"x": "lon'])
    assert calls_of(parsed)[0]["function"]["arguments"] == '{"x": "lon'
    assert content_of(parsed) == ""
    _, parsed = run(HERMES, ['<tool_call>{"na'])
    assert (content_of(parsed), calls_of(parsed)) == ('<tool_call>{"na', [])


def test_without_parallel_calls_only_the_first_counts() -> None:
    for text in (f"<tool_call>{TIME}</tool_call><tool_call>{WEATHER}</tool_call>", f'<tool_call>{TIME}</tool_call><tool_call>{{"na'):
        parser, parsed = run(HERMES, list(text), is_parallel=False)
        assert ([call["function"]["name"] for call in calls_of(parsed)], parser.num_calls, content_of(parsed)) == (["time"], 1, "")


def test_ids_of_mistral_are_nine_letters_or_digits() -> None:
    _, parsed = run(MISTRAL, [f"[TOOL_CALLS][{TIME}, {TIME}]"])
    ids = [call["id"] for call in calls_of(parsed)]
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", call_id) for call_id in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_the_grammar_admits_the_parser_reads(family: ToolFamily, is_parallel: bool) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    tools = [("f", schema), ('g"', {"type": "object", "properties": {}, "additionalProperties": False})]
    matcher = new_matcher(byte_tokenizer(1000), grammar_of(family, tools, is_parallel, {}))
    rng = random.Random(1)
    output = bytearray()
    while len(output) < 4000:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(257) if bits >> byte & 1]
        byte = rng.choice(allowed)
        if byte == 256:
            break
        matcher.consume_token(byte)
        output.append(byte)
    parser, parsed = run(family, [output.decode()])
    assert content_of(parsed) == ""
    assert 1 <= parser.num_calls <= (MAX_PARALLEL_CALLS if is_parallel else 1)
    for call in calls_of(parsed):
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments["x"], int) if call["function"]["name"] == "f" else arguments == {}


def test_markers_that_are_special_tokens_are_tokens_in_the_grammar() -> None:
    grammar = grammar_of(MISTRAL, [("f", {"type": "object"})], False, {"[TOOL_CALLS]": 500})
    matcher = new_matcher(byte_tokenizer(1000), grammar)
    assert int.from_bytes(matcher.compute_bitmask(), "little") == 1 << 500


def test_family_is_read_from_the_template() -> None:
    assert family_of("{% for t in tools %}<tool_call>{% endfor %}") is HERMES
    assert family_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert family_of("""{{ '{"name": ..., "parameters": ...}' }}<|eot_id|>""") is LLAMA3_JSON
    assert family_of("{{ tools }}") is None
    assert takes_tools("{%- if tools %}x{% endif %}") and takes_tools("{{ custom or tools | tojson }}")
    assert not takes_tools("we have no tools {{ toolset }}")
