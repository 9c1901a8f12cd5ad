from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY_TOKENS, with_changes, write_tiny_gguf

from services.router.__main__ import load_model
from services.router.in_flight import InFlightLimit
from services.router.served_model import resolve_max_tokens
from shared.config import load_settings
from shared.errors import InvalidRequestError, OverloadedError


@pytest.mark.parametrize(("num_prompt_tokens", "is_accepted"), [(126, True), (127, True), (128, False), (129, False)])
def test_prompt_and_one_token_must_fit_exactly(num_prompt_tokens: int, is_accepted: bool) -> None:
    for requested, default in ((1, None), (None, 16), (None, None)):
        if is_accepted:
            assert resolve_max_tokens(requested, default, num_prompt_tokens, 128) >= 1
        else:
            with pytest.raises(InvalidRequestError):
                resolve_max_tokens(requested, default, num_prompt_tokens, 128)


def test_named_limit_must_fit_and_a_default_is_cut() -> None:
    assert resolve_max_tokens(None, 16, 120, 128) == 8
    assert resolve_max_tokens(None, None, 120, 128) == 8
    assert resolve_max_tokens(8, 16, 120, 128) == 8
    with pytest.raises(InvalidRequestError) as caught:
        resolve_max_tokens(2045, 16, 7, 2048)
    for number in ("2048", "7 tokens", "2045"):
        assert number in caught.value.message
    assert caught.value.param == "max_tokens"


def test_in_flight_limit_counts_and_gives_back() -> None:
    counts: list[int] = []
    limit = InFlightLimit(3, counts.append)
    with limit.hold(2):
        with pytest.raises(OverloadedError) as caught, limit.hold(2):
            pass
        assert caught.value.retry_after_s
        with limit.hold(1):
            pass
    assert counts == [2, 3, 2, 0]
    with pytest.raises(InvalidRequestError):
        limit.check(4)


@pytest.mark.parametrize("template", ["{{ bos_token }}", "<s>", ""])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_conversation_has_one_bos_whoever_puts_it_there(tmp_path: Path, template: str, add_bos: bool) -> None:
    """And a completion has the one that the model declares, or that its text brings."""
    path = tmp_path / "m.gguf"
    messages = "{% for message in messages %}{{ message.content }}{% endfor %}"
    metadata = {"tokenizer.chat_template": template + messages}
    write_tiny_gguf(path, with_changes(add_bos=add_bos), metadata=metadata)
    model = load_model(load_settings("router", {}, model=str(path)))
    hello = TINY_TOKENS.index("hello")

    async def tokens_of(conversation: list[dict[str, Any]]) -> list[int]:
        return await model.encode(await model.render(conversation, True), True)

    assert asyncio.run(tokens_of([{"role": "user", "content": "hello"}])) == ([1, hello] if template or add_bos else [hello])
    for text in ("hello", "<s>hello"):
        assert model.tokenizer.encode(text) == ([1, hello] if add_bos or text.startswith("<s>") else [hello])
