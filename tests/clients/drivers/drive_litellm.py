"""litellm, with the provider names that its users choose for such a server: whole, streamed, asynchronous, with usage and errors."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a table of prices when imported

import litellm

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def check_usage(usage: Any) -> None:
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def asynchronous(settings: dict[str, Any]) -> None:
    stream = await litellm.acompletion(messages=MESSAGES, max_tokens=8, temperature=0, stream=True, **settings)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text


def main(base_url: str, model: str) -> None:
    for provider in ("hosted_vllm", "openai"):
        settings = {"model": f"{provider}/{model}", "api_base": f"{base_url}/v1", "api_key": "not-needed", "timeout": 120, "num_retries": 0}
        answer = litellm.completion(messages=MESSAGES, max_tokens=12, temperature=0, **settings)
        assert answer.choices[0].message.content
        check_usage(answer.usage)

        stream = litellm.completion(
            messages=MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}, **settings
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert usages
        check_usage(usages[-1])
        assert usages[-1].completion_tokens == answer.usage.completion_tokens

        asyncio.run(asynchronous(settings))
        try:
            litellm.completion(messages=MESSAGES, **{**settings, "model": f"{provider}/no-such-model"})
        except litellm.NotFoundError as error:
            assert "no-such-model" in str(error)
        else:
            raise AssertionError("an unknown model was served")
        try:
            litellm.completion(messages=MESSAGES, temperature=-1, **settings)
        except litellm.BadRequestError as error:
            assert "temperature" in str(error)
        else:
            raise AssertionError("a negative temperature was taken")
        print(f"litellm: {provider} works", flush=True)

    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="1, 2, 3, 4, 5,", max_tokens=8, temperature=0,
        api_base=f"{base_url}/v1", api_key="not-needed", timeout=120,
    )  # fmt: skip
    assert text.choices[0].text.startswith(" 6, 7"), text.choices[0].text
    print("litellm: text_completion works")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
