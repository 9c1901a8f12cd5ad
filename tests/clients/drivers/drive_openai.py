"""The OpenAI SDK: sync and async, whole and streamed, responses, several answers, logprobs, a schema, and its error classes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

PROMPT = "1, 2, 3, 4, 5,"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def check_usage(usage: Any, completion_tokens: int | None = None) -> None:
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    if completion_tokens is not None:
        assert usage.completion_tokens == completion_tokens, usage


def models(client: OpenAI, model: str) -> None:
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model


def completions(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert whole.choices[0].text.startswith(" 6, 7"), whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.id.startswith("cmpl-")
    check_usage(whole.usage, 8)

    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) == 8
    assert last.choices == []
    check_usage(last.usage, 8)

    batch = client.completions.create(model=model, prompt=[PROMPT, "a b c d"], max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[0].text.startswith(PROMPT)
    logprobs = batch.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert len(logprobs.token_logprobs) == len(logprobs.tokens)

    ignoring = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=20, seed=7, extra_body={"top_k": 5, "ignore_eos": True, "cache_salt": "tenant-a"}
    )
    check_usage(ignoring.usage, 20)


def chat(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=8, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    assert whole._request_id
    check_usage(whole.usage)

    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage is not None and whole.usage is not None
    check_usage(last.usage, whole.usage.completion_tokens)

    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Count to"}, {"type": "text", "text": " three."}]}]
    several = client.chat.completions.create(
        model=model, messages=parts, n=2, seed=1, temperature=0.8, top_p=0.9, max_tokens=6, logprobs=True, top_logprobs=3, stop=["\n\n"]
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    logprobs = several.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert len(logprobs.content[0].top_logprobs) == 3
    assert bytes(logprobs.content[0].bytes or []).decode() == logprobs.content[0].token

    shaped = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}},
    )
    assert set(json.loads(shaped.choices[0].message.content or "")) == {"city"}


def responses(client: OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input="What is the capital of France?", instructions="Be brief.", temperature=0)
    assert whole.status == "completed"
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(model=model, input=MESSAGES, max_output_tokens=4, temperature=0, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == events[-1].response.output_text
    try:
        client.responses.retrieve("resp-none")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a response that never was is there")


def errors(client: OpenAI, model: str) -> None:
    try:
        client.completions.create(model="no-such-model", prompt=PROMPT)
    except openai.NotFoundError as error:
        assert error.status_code == 404
        assert isinstance(error.body, dict) and "no-such-model" in error.body["message"], error.body
    else:
        raise AssertionError("an unknown model was served")
    try:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error.param
        assert "temperature" in error.message
        assert error.request_id
    else:
        raise AssertionError("a negative temperature was taken")
    try:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=-4, stream=True)
    except openai.BadRequestError as error:
        assert error.param == "max_tokens", error.param
    else:
        raise AssertionError("a negative max_tokens was taken")


async def asynchronous(client: AsyncOpenAI, model: str) -> None:
    answers = await asyncio.gather(
        *(client.completions.create(model=model, prompt=f"{n}, {n + 1},", max_tokens=6, temperature=0) for n in range(4))
    )
    assert all(answer.choices[0].text for answer in answers)

    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    check_usage(chunks[-1].usage)

    async with await client.completions.create(model=model, prompt=PROMPT, max_tokens=400, stream=True) as abandoned:
        async for chunk in abandoned:
            assert chunk.choices[0].text is not None
            break

    try:
        await client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    except openai.NotFoundError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("an unknown model was served")
    await client.close()


def main(base_url: str, model: str) -> None:
    client = OpenAI(base_url=f"{base_url}/v1", api_key="not-needed", max_retries=0, timeout=120)
    for part in (models, completions, chat, responses, errors):
        part(client, model)
        print(f"openai: {part.__name__} works", flush=True)
    asyncio.run(asynchronous(AsyncOpenAI(base_url=f"{base_url}/v1", api_key="not-needed", max_retries=0, timeout=120), model))
    print("openai: asynchronous works")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
