"""Chat templates: the gateway's prompts are those that transformers would make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from api import chat_template
from api.tokenizer import TokenizerCache
from registry.artifact_verification import combine_digests, hash_files
from registry.models import Model, Version
from registry.tokenizer.chat_templates import read_chat_template
from tests.support.versions import make_version

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\n' + (first if loop.first else "") }}
    {{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
EVERYTHING = """{%- set ns = namespace(count=0) -%}
{{ strftime_now("%Y") }} {{ bos_token }}{{ eos_token }}|{{ pad_token }}|
{%- for message in messages %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- if tools is none and documents is none and message.tool_calls is not defined %}!{% endif %}
{% endfor %}
{{ ns.count }} {{ messages | tojson(indent=2) }}
"""
TEMPLATES = {"chatml": CHATML, "gemma": GEMMA, "everything": EVERYTHING}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ["user", "assistant"][i % 2], "content": c} for i, c in enumerate(contents)]


CHATS = [
    turns("hi"),
    turns("a <b> & 'c'", "ünï ☃", "  spaces \n"),
    [{"role": "system", "content": "be brief"}, *turns("skip", "x", "stop", "y")],
    turns("{{ 7 * 7 }} {% raw %}"),
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, messages: list[dict[str, str]]) -> None:
    """A prompt that differs by one newline makes a chat model noticeably worse."""
    rendered = render_jinja_template(
        [messages], None, None, TEMPLATES[name], False, False, True, **SPECIAL
    )
    assert chat_template.render(TEMPLATES[name], messages, SPECIAL) == rendered[0][0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A word tokeniser that puts BOS before what it is given, as Llama's and Gemma's do."""
    words = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "user", "model", "hi"]
    words += ["User", "|"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(words[1:5])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )
    library.save_pretrained(tmp_path)
    return tmp_path


async def test_a_chats_token_ids_are_those_of_transformers(directory: Path) -> None:
    """A template that writes BOS gets it once, one that does not gets none."""
    library = PreTrainedTokenizerFast.from_pretrained(directory)
    made = TokenizerCache()
    for template in (GEMMA, CHATML):
        model, version = model_of(directory, template)
        wanted = library.apply_chat_template(
            CHATS[0], chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert await made.encode_chat(model, version, CHATS[0]) == wanted
    model, version = model_of(directory, None)
    assert await made.encode_texts(model, version, ["hi"]) == [library.encode("hi")] == [[1, 7]]
    assert (await made.encode_chat(model, version, CHATS[0]))[:2] == [1, 8]
    made.close()


def model_of(directory: Path, template: str | None) -> tuple[Model, Version]:
    files = hash_files(directory)
    version = make_version(
        directory=str(directory),
        files=files,
        digest=combine_digests(files),
        vocab_size=json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]["|"],
        chat_template=template,
    )
    model = Model(
        name="m",
        engine="transformers",
        versions={"1": version},
        default_version="1",
    )
    return model, version


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
FIRST = "  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n\n"
SECOND = """{%- macro say(m) -%}{{ wrap(m.content) }}{%- endmacro %}
{%- macro wrap(text) -%}<{{ text }}>{%- endmacro %}
{{ tools | tojson }}
{% set count = messages | length %}
{% for m in messages %}
    {{- say(m) ~ count }}
{% endfor %}
   """
PARTED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def in_files(path: Path, default: str, tool_use: str) -> None:
    (path / "chat_template.jinja").write_text(default)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/tool_use.jinja").write_text(tool_use)
    (path / "additional_chat_templates/rag.jinja").write_text("{{ documents[0] }}")


def in_config(path: Path, default: str, tool_use: str) -> None:
    named = {"default": default, "tool_use": tool_use, "rag": "{{ documents[0] }}"}
    content = json.loads((path / "tokenizer_config.json").read_text())
    content["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    (path / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("layout", [in_files, in_config])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    "templates",
    [(FIRST, SECOND), (SECOND, FIRST), (CHATML, GEMMA), ("\n" + FIRST, "\n  " + SECOND + "\n\n")],
)
def test_a_template_for_tools_is_rendered_as_in_transformers(
    directory: Path,
    layout: Callable[[Path, str, str], None],
    tools: list[Any] | None,
    templates: tuple[str, str],
) -> None:
    """Both templates become one, and not a newline of either may change in that."""
    layout(directory, *templates)
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        turns("hi"), tools=tools, tokenize=False, add_generation_prompt=True
    )
    found = read_chat_template(directory)
    assert chat_template.render(found, turns("hi"), SPECIAL, tools) == theirs


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_parts_are_rendered_as_in_transformers(content: object) -> None:
    """A template that takes both gets what the client wrote."""
    messages = [{"role": "user", "content": content}]
    rendered = render_jinja_template([messages], None, None, PARTED, False, False, True)
    assert chat_template.render(PARTED, messages, {}) == rendered[0][0]
