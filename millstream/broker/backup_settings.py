"""Settings of `millstream broker backup`, `restore` and `move`."""

from pathlib import Path

from pydantic import Field

from streams.base_settings import FLAG_ONLY, POSITIONAL, ClientSettings, LogLevel, Settings


class BackupSettings(ClientSettings):
    """Settings of `millstream broker backup`: a folder, and which streams."""

    folder: Path = Field(
        alias="dir", description="folder for the backup, new or empty", json_schema_extra=POSITIONAL
    )
    broker_keys: Path | None = Field(
        None,
        description="directory of the cell's keys, which open both stores; found in the data "
        "directory of a running `millstream up`, and not wanted by servers without accounts",
    )
    stream: tuple[str, ...] = Field(
        (), description="only this stream; repeatable", json_schema_extra=FLAG_ONLY
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of lines")


class RestoreSettings(BackupSettings):
    """Settings of `millstream broker restore`: a folder, and which of its streams."""

    folder: Path = Field(
        alias="dir", description="folder with the backup", json_schema_extra=POSITIONAL
    )
    other_cell: bool = Field(
        False,
        description="restore although the backup is of another account or cluster",
        json_schema_extra=FLAG_ONLY,
    )


class MoveSettings(Settings):
    """Settings of `millstream broker move`: a stopped server's data, and the accounts."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    folder: Path = Field(
        alias="data_dir",
        description="data directory of the `millstream up` that ran, or the store_dir of a "
        "nats-server, stopped",
        json_schema_extra=POSITIONAL,
    )
    accounts: Path = Field(
        description="JSON file with the account's public key of each stream: {name: key}",
        json_schema_extra=FLAG_ONLY,
    )
    dry_run: bool = Field(
        False,
        description="say what would be moved, and change nothing",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of lines")
