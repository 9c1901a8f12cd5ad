"""Context lengths and requests in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from router_answers import CNT, SERVED, check_error, namespaces
from router_harness import RedisServer, Stack, eventually
from stub_worker import Script

from services.router.served_model import ServedModel
from shared.messages import DecodeRequest, PrefillRequest


def test_context_limit_is_the_smallest_of_all_and_exact(bare: Stack) -> None:
    bare.join("prefill", "p")
    bare.join("decode", "d", max_model_len=128)
    bare.wait_ready()
    assert bare.client.get("/v1/models").json()["data"][0]["max_model_len"] == 128
    for num_tokens, status in ((126, 200), (127, 200), (128, 400), (129, 400)):
        assert bare.complete(prompt=[504] * num_tokens, max_tokens=1).status_code == status
    scored = bare.complete(prompt=[504] * 128, max_tokens=0, echo=True, logprobs=1)
    assert scored.json()["usage"] == {
        "prompt_tokens": 128, "completion_tokens": 0, "total_tokens": 128, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    check_error(bare.complete(prompt=[504] * 129, max_tokens=0, echo=True), 400, "prompt")
    message = check_error(bare.complete(prompt="What is the capital of Paris?", max_tokens=10**9), 400, "max_tokens")["message"]
    assert "128" in str(message) and "7 tokens" in str(message) and str(10**9) in str(message)
    # A default is cut to what fits.
    assert bare.complete(prompt=[504] * 120, max_tokens=None).json()["usage"]["completion_tokens"] == 8


def test_more_than_the_limit_in_flight_is_429_with_retry_after(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", max_num_requests=4)
    stack.join("prefill", "p")
    decode = stack.join("decode", "d", Script(stop_after=0))
    stack.wait_ready()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(stack.complete) for _ in range(12)]
        eventually(lambda: sum(request.done() for request in asked) == 8)
        decode.script = Script()
        answers = [request.result() for request in asked]
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 4
    assert all(answer.json()["choices"][0]["text"] == CNT for answer in answers if answer.status_code == 200)
    for answer in answers:
        if answer.status_code != 200:
            check_error(answer, 429)
            assert int(answer.headers["retry-after"]) >= 1
    rejected = f'pagewire:requests_rejected_total{{error_type="overloaded_error",model_name="{SERVED}"}} {statuses.count(429)}.0'
    assert rejected in stack.client.get("/metrics").text
    check_error(stack.complete(n=5), 400, "n")
    stack.close()


def test_aggregated_router_needs_no_prefill_worker(redis_server: RedisServer, model: ServedModel) -> None:
    stack = Stack(redis_server.url, model, f"test{next(namespaces)}", aggregated=True)
    check_error(stack.complete(), 503)
    assert "prefill" not in stack.complete().json()["error"]["message"]
    prefill = stack.join("prefill", "p")
    decode = stack.join("decode", "d")
    stack.wait_ready()
    assert stack.client.get("/ready").json()["required_roles"] == ["decode"]
    assert stack.complete().json()["choices"][0]["text"] == CNT
    assert all(stack.complete(prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"][1:])
    assert [request.transfer_id for request in decode.of_kind(DecodeRequest)] == [None, None]
    assert not prefill.of_kind(PrefillRequest)
    stack.close()
