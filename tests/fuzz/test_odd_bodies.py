"""Five hundred bodies that no server should take: each is answered with a 4xx in the error object, and none costs a block."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from local_stack import LocalStack

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
VALID = {COMPLETIONS: {"prompt": '"a"'}, CHAT: {"messages": '[{"role": "user", "content": "a"}]'}, RESPONSES: {"input": '"a"'}}
JSON = {"content-type": "application/json"}
HUGE = "1" + "0" * 400
NOT_NUMBERS = ('"1"', "true", "[]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "-1e308")
NOT_WHOLE = ('"1"', "true", "1.5", "[1]", "{}", "NaN", HUGE, "-" + HUGE)
NOT_BOOLEANS = ('"true"', "1", "[]", "{}", "2.5")
NOT_TEXTS = ("1", "true", "[]", "{}")
NOT_LISTS_OF_IDS = ('"1"', "1", "{}", '["1"]', "[1.5]", "[null]", "[-1]", "[49152]", f"[{HUGE}]", "[true]")

# Fields of a completion, chat and response, with values (as JSON text) that must be refused under the field's name.
WRONG: dict[str, tuple[str, ...]] = {
    "model": ("1", "[]", "{}", "true", '"no-such-model"'),
    "temperature": (*NOT_NUMBERS, "-0.1"),
    "top_p": (*NOT_NUMBERS, "0", "1.1", "-1"),
    "min_p": (*NOT_NUMBERS, "-0.1", "1.01"),
    "top_k": (*NOT_WHOLE, "-2"),
    "presence_penalty": (*NOT_NUMBERS, "2.1", "-2.1"),
    "frequency_penalty": (*NOT_NUMBERS, "2.1", "-2.1"),
    "repetition_penalty": (*NOT_NUMBERS, "0", "-1"),
    "seed": NOT_WHOLE,
    "min_tokens": (*NOT_WHOLE, "-1", "9000"),
    "priority": NOT_WHOLE,
    "stop": ("1", "true", "{}", "[1]", '[""]', '""', json.dumps(["x"] * 17), "[null]", "[[]]"),
    "stop_token_ids": NOT_LISTS_OF_IDS,
    "allowed_token_ids": (*NOT_LISTS_OF_IDS, "[]"),
    "logit_bias": ("[]", '"a"', "1", '{"a": 1}', '{"1": "x"}', '{"1": 101}', '{"-1": 1}', '{"49152": 1}', '{"1": NaN}', '{"1": null}'),
    "bad_words": ('"a"', "1", "[1]", '[""]', '["  "]', json.dumps(["x"] * 65), json.dumps(["x" * 129])),
    "stream": NOT_BOOLEANS,
    "stream_options": ('"a"', "1", "[]", '{"include_usage": "yes"}'),
    "ignore_eos": NOT_BOOLEANS,
    "skip_special_tokens": NOT_BOOLEANS,
    "user": NOT_TEXTS,
    "cache_salt": (*NOT_TEXTS, json.dumps("x" * 1025)),
    "truncate_prompt_tokens": (*NOT_WHOLE, "0", "-2", "100000"),
    "guided_regex": ("1", '""', '"("', '"(?=a)"'),
    "guided_choice": ("1", "[]", "[1]", '[""]', '"a"'),
    "guided_json": ("1", "[]", '"{"', '{"type": "nothing"}', '{"$ref": "#/no"}'),
    "structured_outputs": ("1", '"a"', '{"regex": 1}', '{"choice": []}', '{"what": 1}'),
}
WRONG_OF: dict[str, dict[str, tuple[str, ...]]] = {
    COMPLETIONS: {
        "prompt": ("null", "1", "true", "{}", '""', "[]", '["a", 1]', "[1, null]", "[[]]", "[[1], 2]",
                   '["", "a"]', "[-1]", "[49152]", "[1.5]", f"[{HUGE}]", json.dumps(["a"] * 257)),
        "max_tokens": (*NOT_WHOLE, "0", "-1", "9000"),
        "n": (*NOT_WHOLE, "0", "17", "-1"),
        "best_of": (*NOT_WHOLE, "0", "17"),
        "logprobs": (*NOT_WHOLE, "-1", "6"),
        "echo": NOT_BOOLEANS,
        "suffix": ('"a"', "1"),
        "tools": ('[{"type": "function"}]',),
    },
    CHAT: {
        "messages": ("null", "1", '"a"', "{}", "[]", "[1]", "[null]", "[{}]",
                     '[{"role": 1, "content": "a"}]', '[{"role": "user", "content": 1}]',
                     '[{"role": "user", "content": [{"type": "image_url"}]}]', '[{"role": "user", "content": [{"type": "text"}]}]',
                     '[{"role": "", "content": "a"}]'),
        "max_completion_tokens": (*NOT_WHOLE, "0", "-1", "9000"),
        "logprobs": ("1", '"yes"', "[]"),
        "top_logprobs": (*NOT_WHOLE, "-1", "21", "5"),
        "tools": ("1", '"a"', "[1]", '[{"type": "function"}]', '[{"type": "web", "function": {"name": "f"}}]'),
        "tool_choice": ("1", '"some"', "[]", "{}"),
        "response_format": ("1", '"json"', "{}", '{"type": "xml"}', '{"type": "json_schema"}'),
        "functions": ('[{"name": "f"}]',),
    },
    RESPONSES: {
        "input": ("null", "1", "true", "{}", "[]", "[1]", "[{}]", '[{"role": "user"}]', '[{"type": "reasoning"}]'),
        "max_output_tokens": (*NOT_WHOLE, "0", "9000"),
        "instructions": NOT_TEXTS,
        "text": ("1", '{"format": 1}', '{"format": {"type": "xml"}}'),
        "tools": ('[{"type": "web_search"}]',),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Odd:
    path: str
    content: bytes
    param: str | None = None
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))


def with_field(path: str, name: str, value: str) -> bytes:
    fields = {**VALID[path], name: value}
    return ("{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}").encode()


def odd_bodies() -> Iterator[Odd]:
    for path in VALID:
        for name, values in {**WRONG, **WRONG_OF[path]}.items():
            for value in values:
                yield Odd(path, with_field(path, name, value), name)
        whole = with_field(path, "temperature", "0")
        for end in range(0, len(whole), 5):
            yield Odd(path, whole[:end])
        for text in (
            b"null",
            b"[]",
            b"1",
            b'"a"',
            b"true",
            b"\x00",
            b"{]",
            b"{'a': 1}",
            b"// x",
            b"\xef\xbb\xbf" + whole,
            whole + whole,
            whole + b",",
        ):
            yield Odd(path, text)
        for wrong in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\\ud800", b"\\u12", b"\\x41", b"\n"):
            yield Odd(path, whole.replace(b'"a"', b'"' + wrong + b'"'))
        for depth in (1000, 100_000):
            yield Odd(path, with_field(path, "x", "[" * depth + "]" * depth))
            yield Odd(path, with_field(path, "x", '{"a":' * depth + "1" + "}" * depth))
        for encoding in ("gzip", "br", "deflate", "x-unknown"):
            yield Odd(path, gzip.compress(whole), None, {**JSON, "content-encoding": encoding})
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png", "x"):
            yield Odd(path, whole, None, {"content-type": media_type})
        yield Odd(path, whole.decode().encode("utf-16"))
        yield Odd(path, b" " * (10 << 20) + whole)


def test_odd_bodies_are_refused_by_name_and_cost_no_block(stack: LocalStack) -> None:
    bodies = list(odd_bodies())
    assert len(bodies) >= 500
    wrong: list[str] = []
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        for odd in bodies:
            response = client.post(odd.path, content=odd.content, headers=odd.headers)
            error = response.json().get("error", {}) if 400 <= response.status_code < 500 else {}
            if set(error) != {"message", "type", "param", "code"} or (odd.param is not None and error["param"] != odd.param):
                wrong.append(f"{odd.path} {odd.content[:150]!r} {odd.headers}: {response.status_code} {response.text[:200]}")
    assert wrong == []
    assert not any(statistics.num_blocks_used for statistics in stack.statistics().values())
    assert stack.complete("1, 2, 3, 4, 5,", 6)["choices"][0]["text"] == " 6, 7,"
    stack.wait_until_idle()


def test_requests_that_are_cut_off_or_not_http_leave_nothing(stack: LocalStack) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    whole = with_field(COMPLETIONS, "max_tokens", "4000")
    cut_off = [
        head + b"content-length: 500\r\n\r\n" + whole,
        head + b"transfer-encoding: chunked\r\n\r\n5\r\n" + whole[:3],
        head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(whole), whole),
        head,
    ]
    not_http = [
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + whole,
        head + b"content-length: -5\r\n\r\n" + whole,
        head + b"content-length: 5x\r\n\r\n" + whole,
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]
    for sent in cut_off + not_http:
        with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as connection:
            connection.sendall(sent)
            if sent in not_http:
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 400"), (sent, answer)
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400
    stack.wait_until(lambda: not any(statistics.num_blocks_used for statistics in stack.statistics().values()))
    assert stack.complete("1, 2, 3, 4, 5,", 6)["choices"][0]["text"] == " 6, 7,"
