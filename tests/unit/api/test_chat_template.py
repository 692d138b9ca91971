"""Chats: a template's refusal is the client's error, and a stranger's text is only text."""

import pytest

from api import chat_template
from streams.errors import BadRequest

HI = [{"role": "user", "content": "hi"}]


def test_without_a_template_a_chat_is_lines() -> None:
    """Base models such as the demo's have no template; they continue lines well."""
    messages = [{"role": "system", "content": "be brief"}, *HI]
    assert chat_template.render(None, messages, {}) == "be brief\n\nUser: hi\nAssistant:"


def test_a_refusal_of_the_template_is_a_bad_request() -> None:
    """The template's own sentence tells the client what to change."""
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        chat_template.render("{{ raise_exception('roles must alternate') }}", HI, {})
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[3].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% if",
        "{{ none.x.y }}",
        "{{ messages | nofilter }}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(template: str) -> None:
    """Whatever a template does with an unforeseen chat, the gateway lives on."""
    with pytest.raises(BadRequest, match="chat template"):
        chat_template.render(template, HI, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    """A model's files are data, and a template is one of them."""
    with pytest.raises(BadRequest, match="chat template"):
        chat_template.render(template, HI, {})
    assert HI == [{"role": "user", "content": "hi"}]


def test_a_message_is_never_run_as_a_template() -> None:
    """Messages come from strangers."""
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat_template.render(template, messages, {}) == "{{ 7 * 7 }}{% raw %}"


def test_a_request_sets_variables_of_the_template_but_none_of_its_own() -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}{{ bos_token }}"
    )
    messages = [{"role": "user", "content": "hi"}]
    options = {"enable_thinking": False, "bos_token": "<evil>", "messages": []}
    assert chat_template.render(template, messages, {"bos_token": "<s>"}, None, options) == "hi!<s>"
    assert chat_template.render(template, messages, {"bos_token": "<s>"}) == "hi<s>"
