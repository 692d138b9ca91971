"""Settings of `millstream ledger export`, `ledger send` and `invoice`."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from millstream.durations import Duration
from streams.base_settings import (
    FLAG_ONLY,
    POSITIONAL,
    ClientSettings,
    ServiceSettings,
    Slug,
)
from streams.topology import MIB


def _check_sink_url(url: str) -> str:
    """Return `url`; raises ValueError, without quoting it, if events cannot be posted there."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must be a URL that begins with http:// or https://")
    if parts.username or parts.password:
        raise ValueError("it must have no credentials in it: give a token by --token-file")
    return url


SinkUrl = Annotated[str, AfterValidator(_check_sink_url)]


class ExportSettings(ServiceSettings):
    """Settings of `millstream ledger export`."""

    user_class = "ledger"

    directory: Path = Field(
        description="directory of the segments; one process at a time",
        json_schema_extra=POSITIONAL,
    )
    once: bool = Field(
        False,
        description="export what the ledger has now, and end",
        json_schema_extra=FLAG_ONLY,
    )
    segment_bytes: int = Field(
        64 * MIB, ge=1, description="size at which a segment is closed", json_schema_extra=FLAG_ONLY
    )
    segment_seconds: Duration = Field(
        60, ge=0, description="age at which a segment is closed", json_schema_extra=FLAG_ONLY
    )
    remove_after: Duration | None = Field(
        None,
        ge=0,
        description="remove records from the ledger so long after their segment was closed, such "
        "as 1h; at once while the ledger is half full; unless given, nothing is removed",
        json_schema_extra=FLAG_ONLY,
    )
    accept_gap: bool = Field(
        False,
        description="go on though records are gone that were not exported",
        json_schema_extra=FLAG_ONLY,
    )


class SendSettings(ServiceSettings):
    """Settings of `millstream ledger send`."""

    directory: Path = Field(
        description="directory of the segments, as `ledger export` writes it",
        json_schema_extra=POSITIONAL,
    )
    to: SinkUrl = Field(
        description="URL that takes CloudEvents in batches, such as OpenMeter's /api/v1/events",
        json_schema_extra=FLAG_ONLY,
    )
    token_file: Path | None = Field(
        None, description="file with the bearer token for it", json_schema_extra=FLAG_ONLY
    )
    cell: str = Field(
        "millstream",
        min_length=1,
        description="source of the events: the name of this installation",
        json_schema_extra=FLAG_ONLY,
    )
    once: bool = Field(
        False,
        description="send what the directory has now, and end",
        json_schema_extra=FLAG_ONLY,
    )


class InvoiceSettings(ClientSettings):
    """Settings of `millstream invoice`."""

    month: str = Field(
        pattern=r"^\d{4}-(0[1-9]|1[0-2])$",
        description="month of UTC, such as 2026-11",
        json_schema_extra=FLAG_ONLY,
    )
    tenant: Slug = Field(description="whom to bill", json_schema_extra=FLAG_ONLY)
    directory: Path | None = Field(
        None,
        description="read from these segments of `ledger export`, instead of from the ledger",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")
