"""Settings of the commands of `millstream fleet` that ask the admin service."""

from pydantic import Field

from admin.operation_table import MAX_MACHINES, MAX_OVERRIDE_SECONDS
from millstream.admin.settings import AdminClientSettings
from millstream.durations import Duration
from streams.base_settings import FLAG_ONLY, POSITIONAL, Slug


class TypesSettings(AdminClientSettings):
    """Settings of `millstream fleet types`."""

    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of a table"
    )


class MachinesSettings(AdminClientSettings):
    """Settings of `millstream fleet machines`."""

    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of a table"
    )


class StatusSettings(AdminClientSettings):
    """Settings of `millstream fleet status`."""

    as_json: bool = Field(False, alias="json", description="print one JSON object")


class FleetPlanSettings(AdminClientSettings):
    """Settings of `millstream fleet plan`."""

    as_json: bool = Field(
        False, alias="json", description="print a JSON object a line instead of a table"
    )


class FleetWhySettings(AdminClientSettings):
    """Settings of `millstream fleet why`."""

    model: str = Field(description="name of the model", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print one JSON object")


class FleetPauseSettings(AdminClientSettings):
    """Settings of `millstream fleet pause`."""

    within: Duration = Field(
        3600,
        alias="for",
        gt=0,
        le=MAX_OVERRIDE_SECONDS,
        description="time for which nothing is decided, such as 2h",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class FleetResumeSettings(AdminClientSettings):
    """Settings of `millstream fleet resume`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class FleetSetSettings(AdminClientSettings):
    """Settings of `millstream fleet set`."""

    type: Slug = Field(description="name of the machine type", json_schema_extra=POSITIONAL)
    count: int = Field(
        ge=0, le=MAX_MACHINES, description="machines; 0: none", json_schema_extra=POSITIONAL
    )
    model: str = Field(description="model that they serve", json_schema_extra=FLAG_ONLY)
    within: Duration = Field(
        3600,
        alias="for",
        gt=0,
        le=MAX_OVERRIDE_SECONDS,
        description="time after which none of them is wanted, such as 2h",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")
