"""Settings of the commands `millstream batch …`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from api.schemas.batches import Endpoint
from streams.base_settings import FLAG_ONLY, POSITIONAL, DiscoverySettings, LogLevel


class BatchSettings(DiscoverySettings):
    """Settings of all commands on batches: the gateway, and the key."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    url: str = Field(
        "http://127.0.0.1:8080",
        pattern="^https?://",
        description="address of the gateway; found in the data directory of a running "
        "`millstream up`, else the default",
    )
    api_key: SecretStr | None = Field(
        None,
        description="API key with the scope jobs; by default the one that `millstream up` keeps in "
        "its data directory",
    )
    ca: Path | None = Field(
        None, description="PEM file with the authorities to trust the gateway's certificate by"
    )
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


Action = Literal["cancel", "pause", "resume"]
