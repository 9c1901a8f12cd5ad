"""langchain-openai: a chat model and a completion model, whole, streamed, batched and asynchronous, with usage and errors."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    verdict: Literal["yes", "no"]


def check_usage(usage: dict) -> None:
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] >= 0


async def asynchronous(chat: ChatOpenAI) -> None:
    answer = await chat.ainvoke("Name a colour.")
    assert answer.content
    pieces = [piece async for piece in chat.astream("Name a fruit.")]
    assert sum(bool(piece.content) for piece in pieces) > 1


def main(base_url: str, model: str) -> None:
    settings = {"base_url": f"{base_url}/v1", "api_key": "not-needed", "model": model, "max_retries": 0, "timeout": 120}
    chat = ChatOpenAI(**settings, temperature=0, max_tokens=12, stream_usage=True)

    answer = chat.invoke([("system", "Be brief."), ("human", "What is the capital of France?")])
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    check_usage(answer.usage_metadata)
    print("langchain-openai: invoke works", flush=True)

    pieces = list(chat.stream([("system", "Be brief."), ("human", "What is the capital of France?")]))
    assert "".join(piece.content for piece in pieces) == answer.content
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert len(usages) == 1
    check_usage(usages[0])
    assert usages[0]["output_tokens"] == answer.usage_metadata["output_tokens"]
    print("langchain-openai: stream works", flush=True)

    batch = chat.batch(["Say one.", "Say two.", "Say three."])
    assert all(message.content for message in batch)
    asyncio.run(asynchronous(chat))
    print("langchain-openai: batch and asynchronous work", flush=True)

    verdict = ChatOpenAI(**settings, temperature=0, max_tokens=40).with_structured_output(Verdict).invoke("Is Paris in France?")
    assert isinstance(verdict, Verdict)
    print("langchain-openai: structured output works", flush=True)

    completion = OpenAI(**settings, temperature=0, max_tokens=8)
    assert completion.invoke("1, 2, 3, 4, 5,").startswith(" 6, 7")
    assert "".join(completion.stream("1, 2, 3, 4, 5,")).startswith(" 6, 7")
    print("langchain-openai: completions work", flush=True)

    try:
        ChatOpenAI(**{**settings, "model": "no-such-model"}).invoke("hi")
    except openai.NotFoundError as error:
        assert "no-such-model" in str(error)
    else:
        raise AssertionError("an unknown model was served")
    try:
        ChatOpenAI(**settings, top_p=7).invoke("hi")
    except openai.BadRequestError as error:
        assert error.param == "top_p"
    else:
        raise AssertionError("top_p=7 was taken")
    print("langchain-openai: errors work")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
