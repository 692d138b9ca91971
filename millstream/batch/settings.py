"""Settings of the commands `millstream batch …`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from api.schemas.batches import Endpoint
from streams.base_settings import FLAG_ONLY, POSITIONAL, GatewayClientSettings, LogLevel


class BatchSettings(GatewayClientSettings):
    """Settings of all commands on batches; the key needs the scope `jobs`."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class SubmitSettings(BatchSettings):
    """Settings of `millstream batch submit`."""

    file: Path = Field(
        description="file of JSON Lines, one request in each", json_schema_extra=POSITIONAL
    )
    endpoint: Endpoint = Field(
        "/v1/chat/completions",
        description="endpoint that the requests are for",
        json_schema_extra=FLAG_ONLY,
    )
    window: str = Field(
        "24h",
        pattern="^[1-9][0-9]{0,2}[hd]$",
        description="how long the batch may take, such as 24h or 3d",
        json_schema_extra=FLAG_ONLY,
    )
    not_before: int | None = Field(
        None, ge=0, description="epoch second at which it may begin", json_schema_extra=FLAG_ONLY
    )
    run_between: str | None = Field(
        None,
        pattern="^[0-9]{2}:[0-9]{2}-[0-9]{2}:[0-9]{2}$",
        description="hours of the day in which it may run, such as 22:00-06:00",
        json_schema_extra=FLAG_ONLY,
    )
    time_zone: str = Field(
        "UTC", description="time zone of these hours", json_schema_extra=FLAG_ONLY
    )


class EstimateSettings(BatchSettings):
    """Settings of `millstream batch estimate`."""

    file: Path = Field(
        description="file of JSON Lines, one request in each", json_schema_extra=POSITIONAL
    )
    endpoint: Endpoint = Field(
        "/v1/chat/completions",
        description="endpoint that the requests are for",
        json_schema_extra=FLAG_ONLY,
    )


class ListBatchesSettings(BatchSettings):
    """Settings of `millstream batch list`."""

    limit: int = Field(
        20, ge=1, le=100, description="most batches to show", json_schema_extra=FLAG_ONLY
    )
    after: str = Field(
        "", description="id of the batch after which to go on", json_schema_extra=FLAG_ONLY
    )


class OneBatchSettings(BatchSettings):
    """Settings of the commands on one batch."""

    id: str = Field(description="id of the batch", json_schema_extra=POSITIONAL)


class ItemSettings(BatchSettings):
    """Settings of `millstream batch items`."""

    id: str = Field(description="id of the batch", json_schema_extra=POSITIONAL)
    item: str = Field(description="custom_id of the line", json_schema_extra=POSITIONAL)


class ResultsSettings(OneBatchSettings):
    """Settings of `millstream batch results`."""

    output: Path | None = Field(
        None, description="file to write, else they are printed", json_schema_extra=FLAG_ONLY
    )


Action = Literal["cancel", "pause", "resume", "retry"]
