"""Renders chat messages as the text that a model continues, by Hugging Face chat templates.

The Jinja environment behaves as that of transformers' `apply_chat_template`: its sandbox and
rules, loop controls, the `generation` tag, `tojson` without HTML escapes. A message's content is
given to a template as text or as parts, as the template takes it (`content_format`). Templates come
from an operator, messages from strangers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache, partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from api.content_format import ContentFormat, detect_content_format
from registry.checkpoints.template_syntax import EXTENSIONS
from streams.errors import BadRequest

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
MAX_COMPILED = 64  # compiled templates in the cache
PLAIN_STOPS = ["\nUser:"]  # a model without a template would go on to write the user's next turn
# Variables of every template, which no request sets; the tokeniser's special tokens besides
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SPEAKERS = {"user": "User", "assistant": "Assistant"}  # other roles are text without a speaker

# Errors that a template raises for messages that it was not written for
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


def render(
    template: str | None,
    messages: Sequence[Message],
    tokens: Mapping[str, str],
    tools: Sequence[Tool] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return a chat as the text of a prompt that ends where the assistant's answer is to begin.

    `template` is a Hugging Face chat template; None gives the plain dialogue of `render_plain`. A
    message's content is a text, or a list of parts like `{"type": "text", "text": "hi"}`, which are
    joined by newlines for a template that takes texts alone.
    `tokens` has the tokeniser's special tokens by name (`bos_token`, ...). `tools`, and the calls
    in messages, have the shape that transformers expects, which is OpenAI's with arguments as an
    object. `options` are more variables for the template, such as `enable_thinking`. Raises
    `BadRequest` with the template's own words if the template refuses the messages
    or fails on them.
    """
    if template is None:
        return render_plain(messages)
    try:
        compiled = _compile(template)
        content_format = compiled.content_format(bool(tools))
        return compiled.template.render(
            {
                **(options or {}),
                **tokens,
                "messages": [_convert(message, content_format) for message in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
            }
        )
    except _TEMPLATE_ERRORS as error:
        raise BadRequest(f"the model's chat template refuses this: {error}", "messages") from error


def render_plain(messages: Sequence[Message]) -> str:
    """Return the messages as a dialogue of `User:` and `Assistant:` lines, ending in `Assistant:`.

    Messages of other roles are written without a name before them. A base model, which was not
    trained on chat turns, continues this form best.
    """
    return "".join(map(_plain_line, messages)) + f"{_SPEAKERS['assistant']}:"


def join_parts(content: str | list[dict[str, str]]) -> str:
    """Return a message's content as one text: parts are joined by newlines, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _convert(message: Message, content_format: ContentFormat) -> dict[str, Any]:
    """Return a message whose content is as the template takes it."""
    content = message["content"]
    if content_format is ContentFormat.TEXT:
        content = join_parts(content)
    elif content_format is ContentFormat.PARTS and isinstance(content, str):
        # A message of calls alone has no part; any other one has, since templates look at the first
        is_empty = not content and "tool_calls" in message
        content = [] if is_empty else [{"type": "text", "text": content}]
    return {**message, "content": content}


def _plain_line(message: Message) -> str:
    content = join_parts(message["content"]).strip()
    speaker = _SPEAKERS.get(message["role"])
    return f"{speaker}: {content}\n" if speaker else f"{content}\n\n"


class _PlainNamespace(Namespace):
    """Jinja namespace that refuses underscored attributes, by which a template reaches Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # `namespace(self=...)` is legal in a template
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name!r}")


def _build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)  # noqa: DTZ005  # templates want the wall clock's date


_ENVIRONMENT = _build_environment()


class _CompiledTemplate:
    """A template, compiled, and what it takes as a message's content."""

    def __init__(self, source: str) -> None:
        tree = _ENVIRONMENT.parse(source)
        self.template: Template = _ENVIRONMENT.from_string(tree)
        # of a copy, since compiling changes the tree
        self.content_format = cache(partial(detect_content_format, _ENVIRONMENT.parse(source)))


_compile = lru_cache(MAX_COMPILED)(_CompiledTemplate)
