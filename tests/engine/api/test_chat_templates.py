"""Chat templates: the gateway's prompts are those that transformers would make."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from api import chat_template
from api.tokenizer import TokenizerCache
from registry.artifact_verification import combine_digests, hash_files
from registry.models import Model, Version

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
    version = Version(id="1", directory=str(directory), files=files, digest=combine_digests(files))
    model = Model(
        name="m",
        engine="transformers",
        context_length=64,
        vocab_size=json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]["|"],
        versions={"1": version},
        default_version="1",
        chat_template=template,
    )
    return model, version
