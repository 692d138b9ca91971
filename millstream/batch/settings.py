"""Settings of the commands `millstream batch …`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from api.schemas.batches import Endpoint
from streams.base_settings import FLAG_ONLY, POSITIONAL, GatewayClientSettings, LogLevel


class BatchSettings(GatewayClientSettings):
    """Settings of all commands on batches; the key needs the scope `jobs`."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


def _check_pair(pair: str) -> str:
    """Return `pair`; raises ValueError unless it is KEY=VALUE."""
    key, equals, _ = pair.partition("=")
    if not (key and equals):
        raise ValueError("metadata is KEY=VALUE, such as team=search")
    return pair


class BatchOptionSettings(BatchSettings):
    """Settings of a new batch: its time window and its metadata."""

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
    metadata: tuple[Annotated[str, AfterValidator(_check_pair)], ...] = Field(
        (),
        description="KEY=VALUE that the batch shows; repeatable, at most 16",
        json_schema_extra=FLAG_ONLY,
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options as the body of a request has them."""
        options: dict[str, Any] = {"completion_window": self.window}
        if self.not_before:
            options["not_before"] = self.not_before
        if self.run_between:
            options["run_between"] = self.run_between.split("-")
            options["time_zone"] = self.time_zone
        if self.metadata:
            options["metadata"] = dict(pair.split("=", 1) for pair in self.metadata)
        return options


class BatchInputSettings(BatchSettings):
    """Settings of an input for a batch."""

    file: Path = Field(
        description="file of JSON Lines, one request in each", json_schema_extra=POSITIONAL
    )
    endpoint: Endpoint = Field(
        "/v1/chat/completions",
        description="endpoint that the requests are for",
        json_schema_extra=FLAG_ONLY,
    )


class SubmitSettings(BatchOptionSettings, BatchInputSettings):
    """Settings of `millstream batch submit`."""


class EstimateSettings(BatchInputSettings):
    """Settings of `millstream batch estimate`."""


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


class RetrySettings(OneBatchSettings, BatchOptionSettings):
    """Settings of `millstream batch retry`: the batch whose failed lines run again, and how."""


class ItemSettings(BatchSettings):
    """Settings of `millstream batch items`."""

    id: str = Field(description="id of the batch", json_schema_extra=POSITIONAL)
    item: str = Field(description="custom_id of the line", json_schema_extra=POSITIONAL)


class ResultsSettings(OneBatchSettings):
    """Settings of `millstream batch results`."""

    output: Path | None = Field(
        None, description="file to write, else they are printed", json_schema_extra=FLAG_ONLY
    )


Action = Literal["cancel", "pause", "resume"]
