from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from shared.errors import InvalidRequestError, ModelLoadError
from shared.text.chat_template import ChatTemplate, up_to_final_message

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def render(source: str, content: Any = "hi", **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render([{"role": "user", "content": content}], **variables)


def test_messages_become_the_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_tools_and_documents_that_are_not_given_are_none_as_templates_expect() -> None:
    source = "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}{{ tools is defined }}"
    assert render(source) == "True"
    assert render(source, tools=[{"name": "f"}]) == "toolsTrue"


@pytest.mark.parametrize("role", ["tool", "developer", "system", "robot"])
def test_any_role_reaches_the_template(role: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": role, "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert f"<|im_start|>{role}\nb<|im_end|>" in ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("", ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), (["x", {"text": "y"}], "xy"), ([], "")],
)
def test_content_of_every_form_becomes_text(content: Any, text: str) -> None:
    assert render("[{{ messages[0].content }}]", content) == f"[{text}]"


def test_missing_content_is_empty_and_never_the_word_none() -> None:
    assert ChatTemplate(CHATML).render([{"role": "assistant"}], add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize("content", [5, {"type": "text"}, [{"type": "image_url", "image_url": {}}], [{"type": "text", "text": None}], [7]])
def test_other_content_is_refused_as_the_clients_fault(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content") as caught:
        render(CHATML, content)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], [{"role": None, "content": "x"}], [{"role": "", "content": "x"}]])
def test_no_messages_or_no_role_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(CHATML).render(messages)


def test_reason_of_raise_exception_reaches_the_client() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[9].content + 'x' }}", "{{ 1 / 0 }}", "{{ messages[0].nothing.more }}", "{{ 'a' + 1 }}"])
def test_any_failure_inside_a_template_is_a_400(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_jinja_features_templates_rely_on() -> None:
    assert render("{%- set ns = namespace(n=0) -%}\n  {% for m in messages %}\n{% set ns.n = ns.n + 1 %}{% endfor %}\n{{ ns.n }}") == "1"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}a{% endgeneration %}") == "a"
    assert render("{{ {'k': '<é>', 'a': [1]} | tojson }}") == '{"k": "<é>", "a": [1]}'
    assert render("{{ bos_token ~ messages[0]['content'] ~ 1 ~ eos_token }}") == "<s>hi1</s>"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}") == "0TrueTrue1"
    assert render("{% for k, v in tools[0].items() %}{{ k }}={{ v }}{% endfor %}", tools=[{"name": "f"}]) == "name=f"
    assert render("{% if documents_of_mine is defined %}t{% else %}-{% endif %}{% for t in nothing %}{% else %}none{% endfor %}") == "-none"
    assert render("{{ '%s' | format('x') }}{{ 7 % 4 }}{{ 'ab' * 2 }}{{ [1] + [2] }}") == "x3abab[1, 2]"
    assert render("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}") == "321"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.__class__ }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_sandbox_is_closed(source: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert render(source) in ("", "None")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 9 ** 99999999 }}",
        "{{ 9 ** 99 ** 99 }}",
        "{{ 'x'.ljust(10 ** 12) }}",
        "{{ '%999999999d' | format(1) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
    ],
)
def test_runaway_template_ends_soon_with_a_400(source: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, max_output_chars=1 << 20).render([{"role": "user", "content": "x" * 1000}])
    assert time.process_time() - started < 5


def test_output_limit_is_exact() -> None:
    template = ChatTemplate("{{ messages[0].content }}", max_output_chars=10)
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(InvalidRequestError, match="longer than 10"):
        template.render([{"role": "user", "content": "x" * 11}])


def test_message_text_is_never_a_template() -> None:
    assert render("{{ messages[0].content }}", "{{ 7 * 7 }}{% raw %}") == "{{ 7 * 7 }}{% raw %}"


def test_invalid_template_is_the_models_fault() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("The answer is", "<|im_start|>user\nThe answer is<|im_end|>\n<|im_start|>assistant\nThe answer is"),
        ("The answer is ", "<|im_start|>user\nThe answer is<|im_end|>\n<|im_start|>assistant\nThe answer is "),
    ],
)
def test_final_message_is_left_open(content: str, expected: str) -> None:
    messages = [{"role": "user", "content": "The answer is"}, {"role": "assistant", "content": content}]
    rendered = ChatTemplate(CHATML).render(messages, add_generation_prompt=False)
    assert up_to_final_message(rendered, content) == expected


def test_final_message_that_the_template_trims_is_left_open_where_it_ends() -> None:
    assert up_to_final_message("user: a|bot: b c|", "\nb c \n") == "user: a|bot: b c"


@pytest.mark.parametrize("content", ["", "  ", "something else"])
def test_final_message_that_is_not_there_is_refused(content: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        up_to_final_message("user: a|bot: b|", content)
    assert caught.value.param == "continue_final_message"
