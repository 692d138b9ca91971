"""Limits what registry records decide for a worker: hosts, API keys, directories. Pure.

Whoever can write to the registry can name a server that prompts go to, a variable whose value goes
with them, and a directory that is read. A worker obeys such a record within this policy alone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from registry.upstream_addresses import (
    LOCALHOST,
    canonical_host,
    find_danger,
    host_and_port,
    is_loopback,
    parse_address,
)
from streams.base_settings import UPSTREAM_PREFIX, Settings
from streams.errors import MillstreamError

HOST_SETTING, KEY_SETTING = "--upstream-host", "--upstream-key-variable"
ROOT_SETTING = "--model-root"


class DestinationRefused(MillstreamError):
    """A record names a host, a variable or a directory that this worker's settings do not allow.

    `setting` is the option that would allow it, empty if none does.
    """

    def __init__(self, what: str, setting: str = "", value: str = "") -> None:
        remedy = f"allow it with {setting} {value}" if setting else "no setting allows it"
        super().__init__(f"{what}; {remedy}")
        self.setting = setting


def validate_upstream_host(entry: str) -> str:
    """Return the canonical form of a `HOST` or `HOST:PORT`; an IPv6 address is in brackets.

    Raises ValueError for anything else, such as a URL.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\\?#\[\]*]+))(?::([0-9]{1,5}))?", entry)
    if not match:
        raise ValueError("name a HOST or HOST:PORT, not a URL; an IPv6 address in brackets")
    host = canonical_host(match[1] or match[2])
    return _show_host(host, int(match[3]) if match[3] else None)


UpstreamHost = Annotated[str, AfterValidator(validate_upstream_host)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True)
class DestinationPolicy:
    """The hosts, variables and directories that records may name; by default this machine alone.

    `hosts` are canonical `HOST` and `HOST:PORT` (see `validate_upstream_host`), to which requests
    may go beside loopback, with or without TLS. `key_variables` are names beside those that begin
    with `MILLSTREAM_UPSTREAM_`. Without `model_roots`, which are resolved paths, every directory is
    allowed.
    """

    hosts: frozenset[str] = frozenset()
    key_variables: frozenset[str] = frozenset()
    model_roots: tuple[Path, ...] = ()

    def check_url(self, url: str) -> None:
        """Raise `DestinationRefused` if requests may not go to `url`, as far as its text tells.

        Raises ValueError if it is no valid URL.
        """
        host, port = host_and_port(url)
        self.check_host(host, port)
        if address := parse_address(host):
            self.check_addresses(host, [str(address)])

    def check_host(self, host: str, port: int) -> None:
        """Raise `DestinationRefused` unless the host is this machine, or named by the settings."""
        host = canonical_host(host)
        if _is_this_machine(host) or self.hosts & {_show_host(host), _show_host(host, port)}:
            return
        if danger := _find_danger_of(host):
            raise DestinationRefused(f"{host} is {danger}")
        shown = _show_host(host)
        raise DestinationRefused(
            f"this worker may not send requests to {shown}", HOST_SETTING, shown
        )

    def check_addresses(self, host: str, addresses: Iterable[str]) -> None:
        """Raise `DestinationRefused` if an address to which `host` resolves may not be called."""
        for text in addresses:
            address = parse_address(text)
            assert address, f"a resolver answers with addresses, not {text!r}"
            if danger := find_danger(address):
                raise DestinationRefused(f"{host} is at {text}, {danger}")
            if _is_this_machine(canonical_host(host)) and not is_loopback(address):
                raise DestinationRefused(f"{host} is at {text}, which is not this machine")

    def check_key_variable(self, name: str) -> None:
        """Raise `DestinationRefused` if the value of variable `name` may not go to a server."""
        if name and not (may_hold_key(name) or name in self.key_variables):
            raise DestinationRefused(
                f"this worker may not send the value of the variable {name} to a server: keys are "
                f"in {UPSTREAM_PREFIX}*",
                KEY_SETTING,
                name,
            )

    def check_path(self, resolved: Path) -> None:
        """Raise `DestinationRefused` unless a path without symbolic links is below a root."""
        if self.model_roots and not any(map(resolved.is_relative_to, self.model_roots)):
            roots = ", ".join(map(str, self.model_roots))
            raise DestinationRefused(
                f"{resolved} is below none of this worker's directories of models ({roots})",
                ROOT_SETTING,
                str(resolved),
            )


THIS_MACHINE_ONLY = DestinationPolicy()


class DestinationSettings(Settings):
    """The settings of a worker, and of what starts workers, that its policy is made of."""

    upstream_host: tuple[UpstreamHost, ...] = Field(
        (),
        description="HOST or HOST:PORT that a remote model's record may send requests to, beside "
        "this machine; repeatable",
    )
    upstream_key_variable: tuple[VariableName, ...] = Field(
        (),
        description="variable whose value a remote model's record may send as the API key, beside "
        f"{UPSTREAM_PREFIX}*; repeatable",
    )
    model_root: tuple[Path, ...] = Field(
        (),
        description="directory below which models and adapters must lie; repeatable; anywhere if "
        "not given",
    )


def may_hold_key(variable: str) -> bool:
    """Return whether any worker sends the value of a variable of this name to a model's server."""
    return variable.startswith(UPSTREAM_PREFIX)


def _is_this_machine(host: str) -> bool:
    address = parse_address(host)
    return is_loopback(address) if address else host == LOCALHOST


def _find_danger_of(host: str) -> str | None:
    address = parse_address(host)
    return find_danger(address) if address else None


def _show_host(host: str, port: int | None = None) -> str:
    """A canonical host, and port, as settings have it."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"
