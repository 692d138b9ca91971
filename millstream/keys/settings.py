"""Settings of `millstream keys …`, and of `admin bootstrap`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from millstream.admin.settings import AdminClientSettings
from millstream.durations import Duration
from registry.credentials.key_records import Network
from registry.tenant_records import DEFAULT_SCOPES, Scope
from streams.base_settings import FLAG_ONLY, POSITIONAL, QuotaSettings, Slug

KeyLimit = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "tokens_per_day",
    "spend_per_day",
    "tokens_per_month",
    "spend_per_month",
    "soft_quotas",
    "model",
    "network",
    "expires",
    "max_connections",
    "frames_per_second",
]
_LISTS = {"soft_quotas", "model", "network"}
_ARGUMENTS = {"model": "models", "network": "networks", "expires": "expires_seconds"}


class ListKeysSettings(AdminClientSettings):
    """Settings of `millstream keys list`."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class KeyLimitFlags(AdminClientSettings, QuotaSettings):
    """Limits of a key beside its scopes."""

    model: tuple[str, ...] = Field(
        (), description="model that it may use; repeatable, none: all", json_schema_extra=FLAG_ONLY
    )
    network: tuple[Network, ...] = Field(
        (),
        description="network (CIDR) that it may be used from; repeatable, none: all",
        json_schema_extra=FLAG_ONLY,
    )
    expires: Duration | None = Field(
        None,
        gt=0,
        description="how long it works from now, such as 30d",
        json_schema_extra=FLAG_ONLY,
    )
    max_connections: int | None = Field(
        None, ge=1, description="connections to each gateway", json_schema_extra=FLAG_ONLY
    )
    frames_per_second: int | None = Field(
        None, ge=1, description="frames to each gateway", json_schema_extra=FLAG_ONLY
    )
    force: bool = Field(
        False,
        description="take a --model that is not registered, too",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that were given, as arguments of the admin API."""
        names = {*QuotaSettings.model_fields, *_ARGUMENTS, "max_connections", "frames_per_second"}
        given = self.model_dump(mode="json", include=names, exclude_unset=True)
        return {_ARGUMENTS.get(name, name): value for name, value in given.items()}


class CreateKeySettings(KeyLimitFlags):
    """Settings of `millstream keys create`: what a key may do, and its limits."""

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


class ChangeKeySettings(KeyLimitFlags):
    """Settings of `millstream keys change`: the limits that change."""

    id: str = Field(description="id of the key", json_schema_extra=POSITIONAL)
    unlimited: tuple[KeyLimit, ...] = Field(
        (),
        description="limit to end, such as tokens_per_day, model or expires; repeatable",
        json_schema_extra=FLAG_ONLY,
    )

    @model_validator(mode="after")
    def _changes_each_limit_once(self) -> Self:
        if both := set(self.unlimited) & self.model_fields_set:
            raise ValueError(f"{min(both)} is given a value and is to be unlimited: choose one")
        if not self.limits:
            raise ValueError("nothing is to be changed: give a limit, as --tokens-per-day 1000")
        return self

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that were given or end, as arguments of the admin API."""
        ended: dict[str, Any] = {
            _ARGUMENTS.get(name, name): [] if name in _LISTS else None for name in self.unlimited
        }
        return super().limits | ended


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
