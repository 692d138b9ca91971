"""Reads a model's chat templates, in every form in which model directories have them."""

from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused, read_json_object

_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"  # one file each, named NAME.jinja
_JSON_FILES = ("tokenizer_config.json", "chat_template.json")
_DEFAULT, _TOOL_USE = "default", "tool_use"


def read_chat_template(directory: Path) -> str | None:
    """Return a model's chat template; None if it has none.

    The files chat_template.jinja and additional_chat_templates/NAME.jinja come first, then
    `chat_template` in tokenizer_config.json, then the one in chat_template.json. Of templates with
    names, `tool_use` is for chats with tools and `default` for all others: the template returned
    has both, and chooses between them. Templates of other names (`rag`) are not used, and what is
    no template counts as none. Raises `ArtifactRefused` for templates of which none is named
    `default`, and for a file of another kind than its name says.
    """
    where, templates = _find_templates(directory)
    if not templates:
        return None
    if _DEFAULT not in templates:
        names = ", ".join(sorted(templates))
        raise ArtifactRefused(
            where, f"is not there, or has no template named default, only {names}; name one default"
        )
    return _choose_by_tools(templates.get(_TOOL_USE), templates[_DEFAULT])


def template_file(directory: Path) -> str:
    """Return the name of the file that has a model's chat template, or would have it."""
    return _find_templates(directory)[0]


def _find_templates(directory: Path) -> tuple[str, dict[str, str]]:
    """Return the file that has chat templates, and those by name; none if there are none."""
    if templates := _read_files(directory):
        return _FILE, templates
    found = ((file, _read_json(directory / file)) for file in _JSON_FILES)
    return next(((file, templates) for file, templates in found if templates), (_FILE, {}))


def _choose_by_tools(tool_use: str | None, default: str) -> str:
    """Return one template that renders as `tool_use` if there are tools, else as `default`.

    The newline after each tag is one that Jinja removes (`trim_blocks`), so each begins a line.
    """
    if tool_use is None:
        return default
    # Jinja drops the last newline of a template, and with `+` keeps the spaces before a tag
    tool_use, default = tool_use.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"


def _read_files(directory: Path) -> dict[str, str]:
    default = directory / _FILE
    found = {_DEFAULT: default} if default.exists() else {}
    found |= {file.stem: file for file in sorted((directory / _FOLDER).glob("*.jinja"))}
    return {name: _read_text(file) for name, file in found.items()}


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArtifactRefused(file.name, f"is not UTF-8 ({error})") from None


def _read_json(file: Path) -> dict[str, str]:
    """Return the templates in a JSON file by name: one alone is the default."""
    found: Any = read_json_object(file).get("chat_template") if file.exists() else None
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, list):
        entries = [each for each in found if isinstance(each, dict)]
        found = {str(each.get("name")): each.get("template") for each in entries}
    named = found.items() if isinstance(found, dict) else ()
    return {name: template for name, template in named if isinstance(template, str)}
