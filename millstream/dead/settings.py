"""Settings of `millstream dead list`, `show`, `replay` and `drop`."""

from pydantic import Field, model_validator

from millstream.durations import Duration
from streams.base_settings import FLAG_ONLY, POSITIONAL, ClientSettings, RequestId, Slug
from streams.subjects import token


class DeadFilterSettings(ClientSettings):
    """A filter of dead letters by `tenant`, by `model` and by age, all of which must match.

    A field that is not given matches every letter. `since` is the greatest age, in seconds.
    """

    tenant: Slug | None = Field(
        None, description="only of this tenant", json_schema_extra=FLAG_ONLY
    )
    model: str | None = Field(None, description="only of this model", json_schema_extra=FLAG_ONLY)
    since: Duration | None = Field(
        None, description="only those no older than this, as 2h or 7d", json_schema_extra=FLAG_ONLY
    )


class DeadListSettings(DeadFilterSettings):
    """Settings of `millstream dead list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class DeadShowSettings(ClientSettings):
    """Settings of `millstream dead show`."""

    request_id: RequestId = Field(description="request to show", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class DeadChangeSettings(DeadFilterSettings):
    """Settings of `millstream dead replay` and `millstream dead drop`: which letters to change.

    Either `request_id` chooses one letter, or `tenant`, `model` and `since` choose all that match;
    giving both or neither fails validation.
    """

    request_id: RequestId | None = Field(
        None,
        description="request; instead of it, any of --tenant, --model and --since",
        json_schema_extra=POSITIONAL,
    )
    yes: bool = Field(
        False, description="act even if several dead letters match", json_schema_extra=FLAG_ONLY
    )

    @model_validator(mode="after")
    def _check_selection(self) -> "DeadChangeSettings":
        chosen = (self.tenant, self.model, self.since) != (None, None, None)
        if chosen == (self.request_id is not None):
            raise ValueError("give either REQUEST_ID or any of --tenant, --model and --since")
        if self.request_id:
            token(self.request_id)
        return self
