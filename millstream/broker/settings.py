"""Settings of `millstream broker init`, `user` and `revoke`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from millstream.durations import Duration
from streams.base_settings import (
    FLAG_ONLY,
    POSITIONAL,
    ClientSettings,
    LogLevel,
    Settings,
    Slug,
)

ProcessClass = Literal[
    "admin",
    "gateway",
    "dispatcher",
    "jobs",
    "fleet",
    "worker",
    "operator",
    "ledger",
    "supervisor",
    "system",
]
DIRECTORY = "directory of the keys; nobody but its owner may read it"


class BrokerSettings(Settings):
    """Settings of a command that reads or makes a directory of keys, and prints what it made."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class InitSettings(BrokerSettings):
    """Settings of `millstream broker init`: how many servers, and how many streams of logs."""

    directory: Path = Field(description=DIRECTORY, json_schema_extra=POSITIONAL)
    nodes: tuple[Slug, ...] = Field(
        ("nats",),
        min_length=1,
        description="host names of the NATS servers, with commas; several make a cluster",
        json_schema_extra=FLAG_ONLY,
    )
    shards: int = Field(
        1, ge=1, description="token log streams; the same for every service", le=256
    )

    tls: bool = Field(
        False,
        description="make an authority and certificates for the servers, which then encrypt all "
        "connections; a directory that has them keeps them",
        json_schema_extra=FLAG_ONLY,
    )

    @field_validator("nodes", mode="before")
    @classmethod
    def _split_nodes(cls, value: Any) -> Any:
        """Names may come in several options, or with commas in one."""
        if not isinstance(value, list | tuple):
            return value
        return [name.strip() for each in value for name in str(each).split(",") if name.strip()]

    @field_validator("nodes")
    @classmethod
    def _are_different(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        if twice := {name for name in nodes if nodes.count(name) > 1}:
            raise ValueError(f"each server needs a name of its own, {', '.join(twice)} is not")
        return nodes


class RevokeSettings(ClientSettings):
    """Settings of `millstream broker revoke`: whose credentials are good no more."""

    user_class = "system"
    directory: Path = Field(description=DIRECTORY, json_schema_extra=POSITIONAL)
    name: Slug = Field(
        description="name of the user: that of its file in users/", json_schema_extra=POSITIONAL
    )
    renew: bool = Field(
        False,
        description="write new credentials of the same name at once, with a new key",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class UserSettings(BrokerSettings):
    """Settings of `millstream broker user`: who it is, and what it is pinned to."""

    directory: Path = Field(description=DIRECTORY, json_schema_extra=POSITIONAL)
    name: Slug = Field(
        description="name of the user: the --id of its process", json_schema_extra=POSITIONAL
    )
    user_class: ProcessClass = Field(
        alias="class", description="what it may do", json_schema_extra=FLAG_ONLY
    )
    any_id: bool = Field(
        False,
        description="let processes of any --id use it, several at once",
        json_schema_extra=FLAG_ONLY,
    )
    model: tuple[str, ...] = Field(
        (),
        description="of a worker: only this model, NAME or NAME@VERSION; repeatable; any if not "
        "given",
        json_schema_extra=FLAG_ONLY,
    )
    expires: Duration | None = Field(
        None, description="end the credentials after this time, as 30d", json_schema_extra=FLAG_ONLY
    )
