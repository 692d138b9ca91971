"""Loads a command's settings from flags, then `MILLSTREAM_*`, then one TOML file for all commands.

A key in the environment or file that only another command knows is ignored; one that no command
knows is a `UsageError`, so that a typo stops the start.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from millstream.command_table import COMMANDS
from millstream.up import data_directory, state_file
from streams.base_settings import (
    CONNECTION_KEYS,
    DATA_DIR,
    ENV_PREFIX,
    SLUG_PATTERN,
    UPSTREAM_PREFIX,
    DiscoverySettings,
    Settings,
)

DEFAULT_FILE = Path("millstream.toml")
ENVIRONMENT_ONLY = {"config", "cache_dir"}
_SLUG_FORM = "1 to 63 of a-z, 0-9, - and _, of which - and _ are not the first"


class UsageError(Exception):
    """The command line, environment or settings file is invalid; the text tells the user why."""


@dataclass
class RawSettings:
    """Settings as they were given, before validation.

    `values` has the value of each key. `origins` has, for the same keys, the text by which error
    messages name the place where the value was given: a flag, an environment variable, or a file
    and its key.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: object, origin: str) -> None:
        """Set the value of `key` and its origin, replacing those that were set before, if any."""
        self.values[key] = value
        self.origins[key] = origin


def settings_key(name: str, info: FieldInfo) -> str:
    """Return the key by which users name a settings field: its alias if it has one, else `name`.

    The file uses the key as it is; the flag and the environment variable are derived from it.
    """
    return info.alias or name


def fields_by_key(settings: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return all fields of a settings class, by key (see `settings_key`)."""
    return {settings_key(name, info): info for name, info in settings.model_fields.items()}


def is_table(info: FieldInfo) -> bool:
    """Return True if the field is a table of the settings file: one model, or a dict of models.

    Those are such as `[fleet]` and `[tenants.NAME]`. Only the file can hold such a field; it has no
    flag and no environment variable.
    """
    return has_rows(info) or _is_optional_model(info)


def has_rows(table: FieldInfo) -> bool:
    """Return True if a table is a dict of models, one for each name."""
    return get_origin(table.annotation) is dict


def _is_optional_model(info: FieldInfo) -> bool:
    """True for `Model | None`: a table that may be missing."""
    model, *rest = get_args(info.annotation) or (None,)
    return rest == [NoneType] and isinstance(model, type) and issubclass(model, BaseModel)


def row_model(table: FieldInfo) -> type[BaseModel]:
    """Return the pydantic class of a field that `is_table`: of the table, or of each of its rows.

    The field must be a table; this is not checked.
    """
    return cast(type[BaseModel], get_args(table.annotation)[1 if has_rows(table) else 0])


def is_list(info: FieldInfo) -> bool:
    """Return True if the field holds several values: its flag may be repeated.

    The settings file gives such a field as a list, the environment as text with commas or as JSON.
    """
    return get_origin(info.annotation) is tuple


def is_positional(info: FieldInfo) -> bool:
    """Return True if the field is a positional argument: a command-line word without a flag."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("positional"))


def is_flag_only(info: FieldInfo) -> bool:
    """Return True if the field can be given only on the command line, not in environment or file.

    Positional arguments are among these fields. Such a value is meant for one call of a command,
    not for all commands of an installation.
    """
    extra = info.json_schema_extra
    return is_positional(info) or (isinstance(extra, dict) and bool(extra.get("flag_only")))


def has_flag(info: FieldInfo) -> bool:
    """Return True if the field can be given on the command line: no table, and no secret."""
    extra = info.json_schema_extra
    return not is_table(info) and not (isinstance(extra, dict) and bool(extra.get("no_flag")))


def to_flag(key: str) -> str:
    """Return the command-line flag for a key, such as `--nats-port` for `nats_port`."""
    return "--" + key.replace("_", "-")


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return the text `; did you mean X?`, in which X is the one of `known` most similar to `name`.

    Returns an empty string if none is similar enough. The text is meant to end an error message.
    """
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def load_settings(
    settings: type[Settings], flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return validated settings of the class `settings` from flags, environment and settings file.

    A flag overrides an environment variable, and a variable overrides a key of the file. For a
    subclass of `DiscoverySettings`, the addresses `nats` and `url` come from a `millstream up` that
    runs in the data directory, if one does and they were not given otherwise, and so do the API
    key of a client of the gateway. Its admin service, with the key, and the credentials for its
    NATS are taken unless `nats` is that of another cell. With `--data-dir` as a flag, addresses and
    keys override those of environment and file.

    Raises `UsageError`, whose text says where the value was given, for an unknown key or variable,
    a missing or invalid value, a file that cannot be read, or a `--data-dir` flag without a running
    `millstream up`.
    """
    path = _find_config_file(flags, environment)
    raw = RawSettings()
    _read_file(raw, path)
    _read_environment(raw, environment)
    for key, value in flags.items():
        raw.set(key, value, to_flag(key))
    known = fields_by_key(settings)
    if issubclass(settings, DiscoverySettings):
        _add_running_up(raw, flags, settings, known.keys())
    used = {k for k in raw.values.keys() & known if k in flags or not is_flag_only(known[k])}
    values = {key: _split_list(raw.values[key], known[key]) for key in used}
    try:
        return settings.model_validate({**values, "config": path}, context={"flags": flags.keys()})
    except ValidationError as error:
        raise UsageError(_describe_errors(error, raw, known)) from None


def _add_running_up(
    raw: RawSettings,
    flags: Mapping[str, Any],
    settings: type[DiscoverySettings],
    known: Iterable[str],
) -> None:
    """Add what the data directory tells: the addresses of the `millstream up` that runs there.

    For settings with `url` the API key that it keeps is added, too. Unless NATS is another cell's,
    so are credentials of the settings' class of users, and for settings with `admin` the address of
    the admin service, which that key opens. They replace those of
    environment and file only if `--data-dir` was given as a flag; then it is a `UsageError` if none
    runs there and no address was given.
    """
    data_dir = Path(str(raw.values.get("data_dir", DATA_DIR)))
    named = "data_dir" in flags
    up = state_file.read(data_dir)
    if named and up is None and not {"nats", "url"} & flags.keys():
        raise UsageError(f"no `millstream up` runs in {data_dir}")
    wanted = {
        key
        for key in ("nats", "url", "api_key")
        if not raw.values.get(key) or (named and key not in flags)
    }
    found = {"nats": up.nats, "url": up.url} if up else {}
    if "url" in known and "api_key" in wanted and (api_key := _read_api_key(data_dir)):
        found["api_key"] = api_key
    for key in found.keys() & wanted:
        raw.set(key, found[key], str(data_dir))
    if up and up.nats_users and raw.values["nats"] == up.nats:
        file = Path(up.nats_users) / f"{settings.user_class}.creds"
        _add_credentials(raw, flags, str(file), data_dir)
        if "broker_keys" in known and not raw.values.get("broker_keys"):
            raw.set("broker_keys", str(Path(up.nats_users).parent), str(data_dir))
    if "admin" in known and up and up.admin and raw.values["nats"] == up.nats:
        _add_admin(raw, up.admin, data_dir)


def _add_credentials(
    raw: RawSettings, flags: Mapping[str, Any], creds: str, data_dir: Path
) -> None:
    """Add the credentials for a NATS that was found; those of the environment are another's."""
    if raw.origins["nats"] == str(data_dir):
        for key in CONNECTION_KEYS - flags.keys():
            raw.values.pop(key, None)
    if not any(raw.values.get(key) for key in CONNECTION_KEYS):
        raw.set("nats_creds", creds, str(data_dir))


def _add_admin(raw: RawSettings, url: str, data_dir: Path) -> None:
    if raw.values.get("admin"):
        return
    raw.set("admin", url, str(data_dir))
    if not (raw.values.get("admin_key") or raw.values.get("admin_key_file")):
        raw.set("admin_key", _read_api_key(data_dir), str(data_dir))


def _read_api_key(data_dir: Path) -> str | None:
    try:
        return data_directory.read_api_key(data_dir)
    except OSError as error:
        raise UsageError(f"cannot read the API key in {data_dir}: {error.strerror}") from None


def _split_list(value: object, info: FieldInfo) -> object:
    """Split a list given as one string: at commas, or as JSON if it begins with `[`."""
    if not (isinstance(value, str) and is_list(info)):
        return value
    if value.startswith("["):
        return _parse_json_list(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _parse_json_list(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise UsageError(f"not a JSON list: {value!r}: {error}") from None


def _find_config_file(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Path | None:
    named = flags.get("config") or environment.get(ENV_PREFIX + "CONFIG")
    if named:
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _read_file(raw: RawSettings, path: Path | None) -> None:
    if path is None:
        return
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    known = _all_known_keys() - ENVIRONMENT_ONLY
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{path}: {key}: unknown key{suggest_nearest(key, known)}")
        raw.set(key, value, f"{path}: {key}")


def _read_environment(raw: RawSettings, environment: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + key.upper() for key in _all_known_keys(tables=False) | ENVIRONMENT_ONLY}
    for variable, value in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable.startswith(UPSTREAM_PREFIX) and variable not in known:
            continue  # the API key of a remote model's server
        if variable not in known:
            raise UsageError(f"unknown variable {variable}{suggest_nearest(variable, known)}")
        raw.set(variable.removeprefix(ENV_PREFIX).lower(), value, variable)


def _all_known_keys(tables: bool = True) -> set[str]:
    """The keys that at least one command accepts from file or environment."""
    classes = [command.load_settings() for command in COMMANDS]
    return {
        key
        for settings in classes
        for key, info in fields_by_key(settings).items()
        if (tables or not is_table(info)) and not is_flag_only(info)
    }


def _describe_errors(
    error: ValidationError, raw: RawSettings, known: Mapping[str, FieldInfo]
) -> str:
    found = error.errors()
    parts = {e["loc"][0] for e in found if len(e["loc"]) > 1}  # wrong elements of lists
    return "\n".join(
        _describe_error(e["loc"], e["type"], e["msg"], e["input"], raw, known)
        for e in found
        if not (e["type"] == "too_short" and e["loc"][0] in parts)
    )


def _describe_error(
    loc: tuple[int | str, ...],
    kind: str,
    message: str,
    value: object,
    raw: RawSettings,
    known: Mapping[str, FieldInfo],
) -> str:
    message = message.removeprefix("Value error, ")
    if not loc:
        return message
    key = str(loc[0])
    if kind == "missing" and len(loc) == 1:
        return f"{_display_name(key, known[key])} is required"
    origin = ".".join([raw.origins[key], *map(str, loc[1:])])
    if kind == "extra_forbidden":
        nearest = suggest_nearest(str(loc[-1]), _find_table(known[key], loc[1:-1]))
        return f"{origin}: unknown key{nearest}"
    if "key" in key or key in ("admin", "nats", "tenants"):
        return f"{origin}: {message}"
    if kind == "string_pattern_mismatch" and SLUG_PATTERN in message:
        return f"{origin}: {value!r} is not of this form: {_SLUG_FORM}"
    if kind == "string_pattern_mismatch" and len(loc) == 1 and known[key].description:
        return f"{origin}: {value!r} is not of this form: {known[key].description}"
    shown = "" if repr(value) in message else f", not {value!r}"
    return f"{origin}: {message}{shown}"


def _find_table(table: FieldInfo, path: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """The fields of the table at a path below `table`: each step is a field, or a row's name."""
    steps = [str(step) for step in path]
    if has_rows(table):
        steps = steps[1:]
    fields = fields_by_key(row_model(table))
    inner = fields.get(steps[0]) if steps else None
    return _find_table(inner, tuple(steps[1:])) if inner and is_table(inner) else fields


def _display_name(key: str, info: FieldInfo) -> str:
    return key.upper() if is_positional(info) else to_flag(key)
