"""Where settings come from: flags, then `MILLSTREAM_*`, then one TOML file for all commands.

A key that another command knows is passed over; one that no command knows stops the start.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from millstream import state
from millstream.commands import COMMANDS
from streams.settings import DATA_DIR, FindingSettings, Settings

PREFIX = "MILLSTREAM_"
FILE = Path("millstream.toml")
ENVIRONMENT_ONLY = {"config", "cache_dir"}


class UsageError(Exception):
    """The command line, environment or file cannot be understood; the text is for the user."""


@dataclass
class Found:
    """Raw values by key, and for each the words that say where it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: object, place: str) -> None:
        self.values[key] = value
        self.places[key] = place


def key_of(name: str, info: FieldInfo) -> str:
    return info.alias or name


def keys(settings: type[BaseModel]) -> dict[str, FieldInfo]:
    """The settings' keys as a person writes them in the file."""
    return {key_of(name, info): info for name, info in settings.model_fields.items()}


def is_table(info: FieldInfo) -> bool:
    """True for what only the file can hold: a table of tables."""
    return get_origin(info.annotation) is dict


def rows_of(table: FieldInfo) -> type[BaseModel]:
    """What each row of a table is."""
    return cast(type[BaseModel], get_args(table.annotation)[1])


def is_list(info: FieldInfo) -> bool:
    return get_origin(info.annotation) is tuple


def is_positional(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("positional"))


def is_flag_only(info: FieldInfo) -> bool:
    """True for what is asked once, and is no setting of an installation."""
    extra = info.json_schema_extra
    return is_positional(info) or (isinstance(extra, dict) and bool(extra.get("flag_only")))


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known name closest to `name`, or nothing if none is near."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def load(
    settings: type[Settings], flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Frozen settings from all sources. Raises `UsageError` that names key, value and place."""
    path = _file(flags, environment)
    found = Found()
    _read_file(found, path)
    _read_environment(found, environment)
    for key, value in flags.items():
        found.put(key, value, flag(key))
    if issubclass(settings, FindingSettings):
        _find_up(found, flags)
    known = keys(settings)
    taken = {k for k in found.values.keys() & known if k in flags or not is_flag_only(known[k])}
    values = {key: _shaped(found.values[key], known[key]) for key in taken}
    try:
        return settings.model_validate({**values, "config": path}, context={"flags": flags.keys()})
    except ValidationError as error:
        raise UsageError(_explain(error, found, known)) from None


def _find_up(found: Found, flags: Mapping[str, Any]) -> None:
    """Addresses of a running `millstream up`; a data directory that was named must have one."""
    data_dir = Path(str(found.values.get("data_dir", DATA_DIR)))
    named = "data_dir" in flags
    up = state.read(data_dir)
    if named and up is None and not {"nats", "url"} & flags.keys():
        raise UsageError(f"no `millstream up` runs in {data_dir}")
    for key, value in (("nats", up.nats), ("url", up.url)) if up else ():
        if key not in found.values or (named and key not in flags):
            found.put(key, value, str(state.path(data_dir)))


def _shaped(value: object, info: FieldInfo) -> object:
    """A list given as one string is comma-separated, or JSON where a value holds a comma."""
    if not (isinstance(value, str) and is_list(info)):
        return value
    if value.startswith("["):
        return _json_list(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _json_list(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise UsageError(f"not a JSON list: {value!r}: {error}") from None


def _file(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Path | None:
    named = flags.get("config") or environment.get(PREFIX + "CONFIG")
    if named:
        return Path(named)
    return FILE if FILE.is_file() else None


def _read_file(found: Found, path: Path | None) -> None:
    if path is None:
        return
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    known = _every_key() - ENVIRONMENT_ONLY
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{path}: {key}: unknown key{nearest(key, known)}")
        found.put(key, value, f"{path}: {key}")


def _read_environment(found: Found, environment: Mapping[str, str]) -> None:
    known = {PREFIX + key.upper() for key in _every_key(tables=False) | ENVIRONMENT_ONLY}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise UsageError(f"unknown variable {variable}{nearest(variable, known)}")
        found.put(variable.removeprefix(PREFIX).lower(), value, variable)


def _every_key(tables: bool = True) -> set[str]:
    """Every key that some command knows."""
    classes = [command.load_settings() for command in COMMANDS]
    return {
        key
        for settings in classes
        for key, info in keys(settings).items()
        if (tables or not is_table(info)) and not is_flag_only(info)
    }


def _explain(error: ValidationError, found: Found, known: Mapping[str, FieldInfo]) -> str:
    return "\n".join(
        _sentence(e["loc"], e["type"], e["msg"], e["input"], found, known) for e in error.errors()
    )


def _sentence(
    loc: tuple[int | str, ...],
    kind: str,
    message: str,
    value: object,
    found: Found,
    known: Mapping[str, FieldInfo],
) -> str:
    message = message.removeprefix("Value error, ")
    if not loc:
        return message
    key = str(loc[0])
    if kind == "missing" and len(loc) == 1:
        return f"{_wanted(key, known[key])} is required"
    place = ".".join([found.places[key], *map(str, loc[1:])])
    if kind == "extra_forbidden":
        return f"{place}: unknown key{nearest(str(loc[-1]), keys(rows_of(known[key])))}"
    shown = "" if "key" in key or key == "tenants" else f", not {value!r}"
    return f"{place}: {message}{shown}"


def _wanted(key: str, info: FieldInfo) -> str:
    return key.upper() if is_positional(info) else flag(key)
