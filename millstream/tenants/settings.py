"""Settings of `millstream tenants add`, `change`, `list` and `remove`."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from millstream.admin.settings import AdminClientSettings
from millstream.durations import Duration
from streams.base_settings import FLAG_ONLY, POSITIONAL, Slug, TenantLimits


class RemoveTenantSettings(AdminClientSettings):
    """Settings of `millstream tenants remove`."""

    name: Slug = Field(description="name of the tenant", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")


class TenantFlags(RemoveTenantSettings, TenantLimits):
    """A tenant's name and limits, and where its NATS credentials go, if it is to get any."""

    producer: Path | None = Field(
        None,
        description="directory for NATS credentials of the tenant, which then publishes, and for "
        "examples that submit with them",
        json_schema_extra=FLAG_ONLY,
    )
    expires: Duration | None = Field(
        None,
        gt=0,
        description="with --producer: end the credentials after this time, as 30d",
        json_schema_extra=FLAG_ONLY,
    )

    @model_validator(mode="after")
    def _check_producer(self) -> Self:
        if self.producer and "publishes" in self.model_fields_set and not self.publishes:
            raise ValueError("--producer is for a tenant that publishes, and `publishes` is false")
        if self.expires and not self.producer:
            raise ValueError("--expires needs --producer")
        return self


class AddTenantSettings(TenantFlags):
    """Settings of `millstream tenants add`."""


class ChangeTenantSettings(TenantFlags):
    """Settings of `millstream tenants change`: also what becomes of older NATS credentials."""

    overlap: Duration | None = Field(
        None,
        ge=0,
        description="with --producer: end older credentials after this time, as 1h; else they stay "
        "good",
        json_schema_extra=FLAG_ONLY,
    )
    withdraw: bool = Field(
        False,
        description="cut off all NATS users of the tenant now",
        json_schema_extra=FLAG_ONLY,
    )

    @model_validator(mode="after")
    def _check_older_credentials(self) -> Self:
        if self.overlap is not None and not self.producer:
            raise ValueError("--overlap needs --producer; --withdraw ends credentials at once")
        if self.withdraw and self.producer:
            raise ValueError("give --withdraw or --producer, not both; --overlap 0 does both")
        limits = self.model_fields_set & TenantLimits.model_fields.keys()
        if not (limits or self.producer or self.withdraw):
            raise ValueError("nothing is to be changed: give a limit, as --tokens-per-day 1000")
        return self


class ListTenantsSettings(AdminClientSettings):
    """Settings of `millstream tenants list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")
