"""What a client of the chaos run takes for right, for a proper error and for a violation; against a server that says what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.chaos import client_load
from services.chaos.client_load import ClientLoad
from services.chaos.known_answers import KnownAnswer, draw_prompts, smallest_gap
from shared.errors import ConfigurationError

RIGHT = KnownAnswer("1, 2,", 2, " 3,")


class _Server:
    """Answers a stream with `lines`, anything else with `status` and `body`; None: never."""

    def __init__(self) -> None:
        self.status, self.body, self.lines = 200, _answer(RIGHT.text), _stream(" 3", ",")
        self.is_silent = False
        self.num_silent = 0
        """Requests that it has and does not answer."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.is_silent:
                    outer.num_silent += 1
                    outer.is_over.wait(60)
                    return
                content = "\n\n".join(outer.lines).encode() if request.get("stream") and outer.status == 200 else outer.body.encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


def _answer(text: str) -> str:
    return json.dumps({"choices": [{"text": text, "logprobs": {"top_logprobs": [{text: -0.1, "x": -4.0}]}}]})


def _stream(*texts: str, end: str = "data: [DONE]") -> list[str]:
    return [*("data: " + json.dumps({"choices": [{"text": text}]}) for text in texts), end]


_ERROR = "data: " + json.dumps({"error": {"message": "the worker is gone"}})


@pytest.fixture
def server() -> Iterator[_Server]:
    running = _Server()
    yield running
    running.is_over.set()
    running.http.shutdown()
    running.http.server_close()


def _load(server: _Server, num_requests: int = 12) -> ClientLoad:
    async def ask() -> ClientLoad:
        load = ClientLoad(server.url, 0, 1)
        for _ in range(num_requests):
            await load._one(RIGHT)
        await load.close()
        return load

    return asyncio.run(ask())


def test_right_answers_are_counted_streamed_and_not(server):
    load = _load(server)
    assert (load.num_right, load.violations, load.errors.total()) == (12, [], 0)


def test_wrong_text_with_status_200_is_a_violation_streamed_and_not(server):
    server.body, server.lines = _answer(" 4,"), _stream(" 4", ",")
    load = _load(server)
    assert load.num_right == 0 and len(load.violations) == 12 and "wrong answer" in load.violations[0]


def test_half_an_answer_is_a_wrong_one(server):
    server.lines = _stream(" 3")
    assert any("wrong answer" in violation for violation in _load(server).violations)


@pytest.mark.parametrize("status, body, is_proper", [
    (503, {"error": {"message": "no worker"}}, True), (503, {}, False), (400, {"error": {"message": "?"}}, False), (500, "oops", False),
])  # fmt: skip
def test_error_is_proper_with_its_status_and_its_words(server, status, body, is_proper):
    server.status, server.body = status, json.dumps(body)
    load = _load(server)
    assert load.errors == {str(status): 12} and (load.violations == []) == is_proper


def test_error_event_behind_a_part_of_the_right_text_is_proper_and_behind_another_is_not(server):
    server.lines = _stream(" 3", end=_ERROR)
    assert _load(server).violations == []
    server.lines = _stream(" 9", end=_ERROR)
    assert any("wrong text before an error" in violation for violation in _load(server).violations)


def test_stream_that_just_stops_is_a_violation(server):
    server.lines = _stream(" 3", end="")
    assert any("neither an end nor an error" in violation for violation in _load(server).violations)


def test_silence_is_a_violation(server, monkeypatch):
    monkeypatch.setattr(client_load, "ANSWER_TIMEOUT_S", 0.3)
    server.is_silent = True
    assert any("no answer to" in violation for violation in _load(server, 1).violations)


def test_client_that_hangs_up_is_no_violation(server):
    server.is_silent = True

    async def leave() -> ClientLoad:
        load = ClientLoad(server.url, 0, 2)
        load._answers = [RIGHT]
        running = asyncio.create_task(load.run())
        async with asyncio.timeout(30):
            while server.num_silent < 2:
                await asyncio.sleep(0.01)
        assert load.hang_up() and load.hang_up() and not load.hang_up()
        load.stop()
        await running
        await load.close()
        return load

    load = asyncio.run(leave())
    assert load.violations == [] and load.num_hung_up == 2


def test_stack_that_is_wrong_before_any_fault_is_no_stack_to_test(server):
    with pytest.raises(ConfigurationError, match="before any fault"):
        asyncio.run(ClientLoad(server.url, 0, 2).learn(0, 1))


def test_prompts_are_the_same_for_a_seed_and_differ_from_their_first_block():
    prompts = draw_prompts(3, 20)
    assert prompts == draw_prompts(3, 20) != draw_prompts(4, 20)
    assert len({prompt[:12] for prompt, _ in prompts}) == 20
    assert smallest_gap([{"a": -0.1, "b": -3.0}, {"a": -0.5, "b": -1.0}]) == pytest.approx(0.5)
