"""Settings of `millstream tenants add`, `change`, `list` and `remove`."""

from pydantic import Field

from millstream.admin.settings import AdminClientSettings
from streams.base_settings import POSITIONAL, Slug, TenantLimits


class RemoveTenantSettings(AdminClientSettings):
    """Settings of `millstream tenants remove`."""

    name: Slug = Field(description="name of the tenant", json_schema_extra=POSITIONAL)
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")


class TenantFlags(RemoveTenantSettings, TenantLimits):
    """Settings of `millstream tenants add` and `change`: a tenant's name and limits."""


class ListTenantsSettings(AdminClientSettings):
    """Settings of `millstream tenants list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")
