"""Content formats: a template gets a message's content in the form that it was written for."""

from typing import Any

import pytest

from api import chat_template
from api.content_format import ContentFormat, detect_content_format

TEXT = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['role'] + m['content'] | trim }}{% endfor %}",
    "{{ messages[0].content }}",
    # Reasoning is cut off an earlier answer, and lines are looped over: a text in both cases
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1] %}{{ c }}{% endfor %}",
    "{% for m in messages %}{% for line in m.content.split('\\n') %}{{ line }}{% endfor %}"
    "{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
    "{% for tool in tools %}{% for part in tool.content %}{{ part }}{% endfor %}{% endfor %}",
    "{% for m in messages if m.content is string %}{{ m.content }}{% endfor %}",
]
LOOP = "{% for p in CONTENT %}{{ p.text }}{% endfor %}"
PARTS = [
    "{% for m in messages %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}",
    "{% for m in messages %}" + LOOP.replace("CONTENT", "m['content']") + "{% endfor %}",
    "{% for m in messages %}" + LOOP.replace("CONTENT", "m.get('content')") + "{% endfor %}",
    "{% for m in messages[1:] %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}",
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}"
    + LOOP.replace("CONTENT", "c")
    + "{% endfor %}",
    "{% for m in messages %}"
    + LOOP.replace("CONTENT", "m.content | selectattr('type', 'equalto', 'text')")
    + "{% endfor %}",
    "{% for m in messages %}" + LOOP.replace("CONTENT", "(m.content or [])") + "{% endfor %}",
    "{% macro show(c) %}" + LOOP.replace("CONTENT", "c") + "{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(c) %}" + LOOP.replace("CONTENT", "c") + "{% endmacro %}"
    "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
    "{% set ns = namespace(rest=1) %}{% set ns.rest = messages %}"
    "{% for m in ns.rest %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}",
    "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
    "{{ messages[0]['content'][0]['text'] }}",
    "{{ (messages[-1].content | first).text }}",
    "{% for m in messages %}{{ m.content | map(attribute='text') | join }}{% endfor %}",
]
EITHER = [
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    + LOOP.replace("CONTENT", "m.content")
    + "{% endif %}{% endfor %}",
    "{% macro show(c) %}{% if c is not string %}" + LOOP.replace("CONTENT", "c") + "{% else %}"
    "{{ c }}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
]
CASES = [
    *((each, ContentFormat.TEXT) for each in TEXT),
    *((each, ContentFormat.PARTS) for each in PARTS),
    *((each, ContentFormat.EITHER) for each in EITHER),
]


@pytest.mark.parametrize(("template", "expected"), CASES)
def test_the_format_is_read_from_the_template(template: str, expected: ContentFormat) -> None:
    """A loop over a text would spell it letter by letter, and a list in a text is its `repr`."""
    tree = chat_template._ENVIRONMENT.parse(template)
    assert detect_content_format(tree, has_tools=False) is expected


def chat(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [each for each, _ in CASES if "'<" not in each])
@pytest.mark.parametrize("content", ["hello", parts("hello")])
def test_a_text_arrives_in_either_form(template: str, content: object) -> None:
    """Clients send a text as they like; what the model reads is the same."""
    if "tool_calls" in template or "in tools" in template or "[1:]" in template:
        messages = [*chat("x"), *chat(content)]
    else:
        messages = chat(content)
    rendered = chat_template.render(template, messages, {}, [])
    assert ("hello" in rendered) != ("tool_calls" in template or "in tools" in template)
    assert "[" not in rendered


def test_parts_are_as_the_template_puts_them() -> None:
    """A template of parts joins them itself; one of texts gets them in lines, as from vLLM."""
    content = parts("a", "b")
    assert chat_template.render(PARTS[0], chat(content), {}) == "ab"
    assert chat_template.render(EITHER[0], chat(content), {}) == "ab"
    assert chat_template.render(TEXT[0], chat(content), {}) == "a\nb"
    assert chat_template.render(None, chat(content), {}) == "User: a\nb\nAssistant:"


def test_a_message_of_calls_has_no_parts() -> None:
    """Templates ask whether an answer said something besides its calls."""
    template = (
        "{% for m in messages %}{% if m.content %}said {% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert chat_template.render(template, [message], {}) == ""


def test_templates_for_tools_and_without_are_judged_apart() -> None:
    """Two templates of one model may take contents in different forms."""
    template = "{% if tools %}" + PARTS[0] + "{% else %}" + TEXT[0] + "{% endif %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    for content in ("hello", parts("hello")):
        assert chat_template.render(template, chat(content), {}, tools) == "hello"
        assert chat_template.render(template, chat(content), {}) == "hello"
