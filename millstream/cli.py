"""The command line: picks the command, parses its flags into settings and runs it as a process.

Options are generated from the settings' fields, so that a flag, its environment variable, its key
in the TOML file and its line in `--help` cannot differ.
"""

import argparse
import sys
from functools import partial
from importlib.metadata import version
from typing import Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from millstream import process_lifecycle
from millstream.command_table import COMMANDS, Command, find_command
from millstream.settings_loader import (
    UsageError,
    fields_by_key,
    has_flag,
    has_rows,
    is_flag_only,
    is_list,
    is_positional,
    is_table,
    load_settings,
    row_model,
    settings_key,
    suggest_nearest,
    to_flag,
)
from streams.base_settings import ENV_PREFIX, Settings
from streams.server_urls import redact

USAGE_STATUS = 2


class CommandParser(argparse.ArgumentParser):
    """An `argparse` parser that raises `UsageError` for bad arguments instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with `message`, argparse's text about the invalid arguments.

        argparse itself would print the text and exit.
        """
        raise UsageError(message)


def main(words: list[str] | None = None) -> int:
    """Run the command that `words` name (by default those of `sys.argv`), until it has ended.

    Returns the process's exit status: 0 if the command has done its work, 1 if it failed, and 2 if
    no command was given or the words or settings are invalid, with the reason on stderr. A command
    may define other statuses. Invalid arguments raise nothing; `--help` after a command prints its
    help and raises `SystemExit`.
    """
    words = sys.argv[1:] if words is None else words
    try:
        if not words or words[0] in ("-h", "--help", "--version"):
            return _print_overview(words)
        command, rest = _split_command(words)
        settings = parse_settings(command, rest)
    except UsageError as error:
        print(f"millstream: {redact(str(error))}", file=sys.stderr)
        return USAGE_STATUS
    return process_lifecycle.run_process(command.load_run(), settings)


def parse_settings(command: Command, words: list[str]) -> Settings:
    """Return the command's validated settings: `words` parsed as flags, then environment and file.

    `words` are the arguments after the command's own words. A flag overrides an environment
    variable, and a variable a key of the settings file. Raises `UsageError`, whose text names the
    cause, if a flag, variable, key or value is invalid. `--help` among the words prints the help
    and raises `SystemExit`.
    """
    settings = command.load_settings()
    options, unknown = make_parser(command).parse_known_args(words)
    if unknown:
        raise UsageError(_describe_unknown(unknown[0], settings))
    return load_settings(settings, vars(options))


def _describe_unknown(word: str, settings: type[Settings]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word}"
    name = word.split("=")[0]
    known = [
        to_flag(k)
        for k, info in fields_by_key(settings).items()
        if has_flag(info) and not is_positional(info)
    ]
    return f"unknown option {name}{suggest_nearest(name, [*known, '--help'])}"


def _split_command(words: list[str]) -> tuple[Command, list[str]]:
    found = find_command(words)
    if found is not None:
        return found
    group = [c.name for c in COMMANDS if c.name.split()[0] == words[0]]
    if group:
        raise UsageError(f"say which: {', '.join(group)}")
    raise UsageError(
        f"unknown command {words[0]}{suggest_nearest(words[0], (c.name for c in COMMANDS))}"
    )


def _print_overview(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"millstream {version('millstream')}")
        return 0
    width = max(len(command.name) for command in COMMANDS)
    print("usage: millstream COMMAND [--help] [options]\n")
    for command in COMMANDS:
        print(f"  {command.name:{width}}  {command.help}")
    return 0 if words else USAGE_STATUS


def make_parser(command: Command) -> CommandParser:
    """Return a parser with an option for each field of the command's settings class.

    A field that is a table gets no option, because only the settings file can hold a table; a
    secret that is marked so gets none, because every user of the machine can read it there. An
    option must be written in full. An option that is not on the command line is absent from the
    parsed namespace, so that a value from the environment or the file is used.
    """
    settings = command.load_settings()
    parser = CommandParser(
        prog=f"millstream {command.name}",
        description=command.help,
        epilog=_make_epilog(settings),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=100),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name in _order_own_first(settings):
        info = settings.model_fields[name]
        if has_flag(info):
            _add_option(parser, settings_key(name, info), info)
    return parser


def _make_epilog(settings: type[Settings]) -> str:
    tables = [
        f" Only in the file: {_describe_table(key, info)}."
        for key, info in fields_by_key(settings).items()
        if is_table(info)
    ]
    flag_only = [
        k for k, i in fields_by_key(settings).items() if is_flag_only(i) and not is_positional(i)
    ]
    exceptions = f" but {', '.join(map(to_flag, flag_only))}" if flag_only else ""
    everywhere = (
        f"Every option{exceptions} can also be {ENV_PREFIX}<OPTION> in the environment"
        " or a key of the file."
    )
    secrets = [
        f" Never on the command line, but {ENV_PREFIX}{key.upper()} or {key} in the file:"
        f" {describe_option(info)}."
        for key, info in fields_by_key(settings).items()
        if _is_secret(info)
    ]
    return everywhere + "".join(secrets) + "".join(tables)


def _describe_table(key: str, info: FieldInfo) -> str:
    if not has_rows(info):
        return f"the table [{key}]: {describe_option(info)}"
    return f"tables [{key}.<name>] with {', '.join(fields_by_key(row_model(info)))}"


def _is_secret(info: FieldInfo) -> bool:
    return not (has_flag(info) or is_table(info))


def _order_own_first(settings: type[Settings]) -> list[str]:
    """Field names, the command's own first, then those inherited from shared settings classes."""
    depth = {
        name: i
        for i, base in enumerate(settings.__mro__)
        for name in reversed(_declared_fields(base))
    }
    return sorted(settings.model_fields, key=lambda name: depth[name])


def _declared_fields(base: type) -> list[str]:
    return list(vars(base).get("__annotations__", {}))


def _add_option(parser: CommandParser, key: str, info: FieldInfo) -> None:
    text = describe_option(info)
    if is_positional(info):
        parser.add_argument(key, metavar=key.upper(), help=text, nargs="?")
    elif info.annotation is bool:
        parser.add_argument(to_flag(key), action="store_true", help=text)
    else:
        action = "append" if is_list(info) else "store"
        parser.add_argument(to_flag(key), metavar=_metavar(key, info), help=text, action=action)


def _metavar(key: str, info: FieldInfo) -> str:
    """The placeholder for the value in `--help`: the choices, N, or the key's last word."""
    if get_origin(info.annotation) is Literal:
        return "|".join(get_args(info.annotation))
    numbers = {int, float} & {info.annotation, *get_args(info.annotation)}
    return "N" if numbers else key.split("_")[-1].upper()


def describe_option(info: FieldInfo) -> str:
    """Return the `--help` text of one settings field: its description, and its default in brackets.

    The brackets say `required` for a field without a default, and `default: generated` for a
    default that is made at each start. They are left out if the default is None, False or empty.
    """
    text = (info.description or "").replace("%", "%%")
    return f"{text} ({_describe_default(info)})".replace(" ()", "")


def _describe_default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "default: generated"
    if info.default is PydanticUndefined:
        return "required"
    if info.default is None or info.default is False or info.default == ():
        return ""
    shown = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
    return f"default: {shown}"
