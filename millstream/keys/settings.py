"""Settings of `millstream keys create`, `list`, `rotate`, `revoke`, and of `admin bootstrap`."""

from typing import Any

from pydantic import Field

from millstream.admin.settings import AdminClientSettings
from millstream.durations import Duration
from registry.credentials.key_records import Network
from registry.tenant_records import DEFAULT_SCOPES, Scope
from streams.base_settings import FLAG_ONLY, POSITIONAL, QuotaSettings, Slug


class ListKeysSettings(AdminClientSettings):
    """Settings of `millstream keys list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class CreateKeySettings(AdminClientSettings, QuotaSettings):
    """Settings of `millstream keys create`: what a key may do, for how long, and its limits."""

    tenant: Slug = Field(description="tenant of the key", json_schema_extra=FLAG_ONLY)
    name: Slug | None = Field(
        None, description="what usage calls it; by default its id", json_schema_extra=FLAG_ONLY
    )
    scope: tuple[Scope, ...] = Field(
        DEFAULT_SCOPES,
        min_length=1,
        description="what it may do: infer, models:read, usage:read, jobs, operator, admin; "
        "repeatable",
        json_schema_extra=FLAG_ONLY,
    )
    model: tuple[str, ...] = Field(
        (), description="model that it may use; repeatable, none: all", json_schema_extra=FLAG_ONLY
    )
    network: tuple[Network, ...] = Field(
        (),
        description="network (CIDR) that it may be used from; repeatable, none: all",
        json_schema_extra=FLAG_ONLY,
    )
    expires: Duration | None = Field(
        None, gt=0, description="how long it works, such as 30d", json_schema_extra=FLAG_ONLY
    )
    max_connections: int | None = Field(
        None, ge=1, description="connections to each gateway", json_schema_extra=FLAG_ONLY
    )
    frames_per_second: int | None = Field(
        None, ge=1, description="frames to each gateway", json_schema_extra=FLAG_ONLY
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that were given, by name."""
        names = {*QuotaSettings.model_fields, "max_connections", "frames_per_second"}
        return self.model_dump(mode="json", include=names, exclude_unset=True)


class BootstrapSettings(AdminClientSettings):
    """Settings of `millstream admin bootstrap`."""

    force: bool = Field(
        False,
        description="make a key although one with the scope admin works, which stays",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class RevokeKeySettings(AdminClientSettings):
    """Settings of `millstream keys revoke`."""

    id: str = Field(description="id of the key", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")


class RotateKeySettings(RevokeKeySettings):
    """Settings of `millstream keys rotate`."""

    overlap: Duration = Field(
        3600,
        ge=0,
        description="how long the old key works beside the new one, such as 1h",
        json_schema_extra=FLAG_ONLY,
    )
