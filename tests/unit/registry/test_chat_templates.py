"""Chat templates: every form in which model directories have them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.tokenizer.chat_templates import read_chat_template

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
BOTH = "{% if tools %}\nT{%+ else %}\nD{%+ endif %}"


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps({"chat_template": content})
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.jinja": "D"}, "D"),
        ({"chat_template.jinja": "\ufeffD"}, "D"),
        ({"tokenizer_config.json": ["D"][:0]}, None),
        ({"tokenizer_config.json": None}, None),
        ({"chat_template.json": NAMED[:1]}, "D"),
        ({"tokenizer_config.json": [*NAMED[:1], "x", {"name": "tool_use"}]}, "D"),
        ({"tokenizer_config.json": NAMED}, BOTH),
        ({"tokenizer_config.json": {"default": "D", "tool_use": "T"}}, BOTH),
        ({"tokenizer_config.json": [*NAMED, {"name": "rag", "template": "R"}]}, BOTH),
        (
            {"chat_template.jinja": "D\n", "additional_chat_templates/tool_use.jinja": "T\n"},
            BOTH,
        ),
        ({"chat_template.jinja": "D", "additional_chat_templates/rag.jinja": "R"}, "D"),
        ({"chat_template.jinja": "D", "tokenizer_config.json": NAMED}, "D"),
        ({"tokenizer_config.json": NAMED[:1], "chat_template.json": NAMED}, "D"),
    ],
)
def test_a_template_is_found_in_every_form(
    tmp_path: Path, files: dict[str, Any], expected: str | None
) -> None:
    """Files come before tokenizer_config.json, and that before what processors read."""
    assert read_chat_template(write(tmp_path, files)) == expected


def test_a_template_alone_in_json_is_the_default(tmp_path: Path) -> None:
    """The form of nearly all models."""
    (tmp_path / "chat_template.json").write_text('{"chat_template": "P"}')
    assert read_chat_template(tmp_path) == "P"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "C"}')
    assert read_chat_template(tmp_path) == "C"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config.json": NAMED[1:]}, "tokenizer_config.json: .*only tool_use"),
        ({"additional_chat_templates/rag.jinja": "R"}, "chat_template.jinja: .*only rag"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: is not a JSON object"),
    ],
)
def test_a_template_that_cannot_be_chosen_is_refused(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    """Without a word chats would get the plain dialogue, which the model was not trained on."""
    with pytest.raises(ArtifactRefused, match=reason):
        read_chat_template(write(tmp_path, files))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ArtifactRefused, match="is not UTF-8"):
        read_chat_template(tmp_path)
