"""Settings of `millstream dead list`, `show`, `replay` and `drop`."""

from pydantic import Field, model_validator

from millstream.durations import Duration
from streams.settings import FLAG_ONLY, POSITIONAL, ClientSettings, RequestId, Slug
from streams.subjects import token


class DeadFilterSettings(ClientSettings):
    """Which dead letters."""

    tenant: Slug | None = Field(
        None, description="only of this tenant", json_schema_extra=FLAG_ONLY
    )
    model: str | None = Field(None, description="only of this model", json_schema_extra=FLAG_ONLY)
    since: Duration | None = Field(
        None, description="only of the last so long, as 2h or 7d", json_schema_extra=FLAG_ONLY
    )


class DeadListSettings(DeadFilterSettings):
    """Which to list, and how."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class DeadShowSettings(ClientSettings):
    """Which to show, and how."""

    request_id: RequestId = Field(description="request to show", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class DeadChangeSettings(DeadFilterSettings):
    """Which to replay or drop."""

    request_id: RequestId | None = Field(
        None,
        description="request; instead of it, any of --tenant, --model and --since",
        json_schema_extra=POSITIONAL,
    )
    yes: bool = Field(
        False, description="do so though it is more than one", json_schema_extra=FLAG_ONLY
    )

    @model_validator(mode="after")
    def _chooses(self) -> "DeadChangeSettings":
        chosen = (self.tenant, self.model, self.since) != (None, None, None)
        if chosen == (self.request_id is not None):
            raise ValueError("give either REQUEST_ID or any of --tenant, --model and --since")
        if self.request_id:
            token(self.request_id)
        return self
