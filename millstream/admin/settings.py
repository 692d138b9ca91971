"""Settings of `millstream lag`, `drain`, `usage` and `why`, and of clients of the admin service."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from millstream.durations import Duration
from streams.base_settings import FLAG_ONLY, NO_FLAG, POSITIONAL, ClientSettings, RequestId, Slug
from streams.subjects import token


def _check_admin_url(value: str) -> str:
    """Return `value`; raises ValueError unless it is an address by HTTP without credentials."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.username or parts.password:
        raise ValueError("must hold no credentials: use MILLSTREAM_ADMIN_KEY or --admin-key-file")
    return value


class AdminClientSettings(ClientSettings):
    """Settings of a command that asks the admin service, by HTTP or over NATS."""

    admin: Annotated[str, AfterValidator(_check_admin_url)] | None = Field(
        None,
        description="URL of the admin service; found in the data directory of a running "
        "`millstream up`, else it is asked over NATS",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="key of the admin service, or a managed key with the scope admin or operator; "
        "that of a running `millstream up` is in its data directory",
        json_schema_extra=NO_FLAG,
    )
    admin_key_file: Path | None = Field(None, description="file with the key of the admin service")

    def read_admin_key(self) -> str:
        """Return the key of the admin service; empty if none is given.

        Raises OSError if the file with the key cannot be read.
        """
        if self.admin_key:
            return self.admin_key.get_secret_value()
        return self.admin_key_file.expanduser().read_text().strip() if self.admin_key_file else ""


class LagSettings(ClientSettings):
    """Settings of `millstream lag`."""

    watch: bool = Field(False, description="show again every second until interrupted")
    as_json: bool = Field(
        False, alias="json", description="print JSON instead of tables; with --watch, a line each"
    )


class DrainSettings(ClientSettings):
    """Settings of `millstream drain`."""

    worker: Slug = Field(
        description="id of the worker, as `millstream lag` shows it",
        json_schema_extra=POSITIONAL,
    )
    within: Duration = Field(
        20,
        ge=0,
        description="time after which the worker must have ended, such as 20s",
        json_schema_extra=FLAG_ONLY,
    )


class UsageSettings(ClientSettings):
    """Settings of `millstream usage`: quotas and what is used of them, or with `by` past usage."""

    tenant: Slug | None = Field(
        None, description="tenant to show, with its keys; default: all", json_schema_extra=FLAG_ONLY
    )
    by: Literal["key", "model", "day"] | None = Field(
        None,
        description="show what the tenant has used, added up so, instead of its quotas",
        json_schema_extra=FLAG_ONLY,
    )
    costs: bool = Field(
        False,
        description="with --by model or day: what workers cost us for all tenants together",
        json_schema_extra=FLAG_ONLY,
    )
    start: str | None = Field(
        None,
        description="with --by: first day of UTC, such as 2026-11-01; 30 days ago unless given",
        json_schema_extra=FLAG_ONLY,
    )
    end: str | None = Field(
        None,
        description="with --by: last day of UTC; today unless given",
        json_schema_extra=FLAG_ONLY,
    )
    thresholds: bool = Field(
        False,
        description="show when a half, 80 % and all of a quota of a day or month was reached",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(
        False,
        alias="json",
        description="print JSON instead of a table; with --by and --thresholds, an object a line",
    )

    @model_validator(mode="after")
    def _check_usage(self) -> "UsageSettings":
        if self.costs and (self.tenant or self.by not in ("model", "day")):
            raise ValueError("--costs needs --by model or --by day, and is of all tenants together")
        if self.by and not self.tenant and not self.costs:
            raise ValueError("--by needs --tenant, or --costs")
        if self.by and self.thresholds:
            raise ValueError("give --by or --thresholds, not both")
        if not self.by and (self.start or self.end):
            raise ValueError("--start and --end are for --by")
        return self


class WhySettings(ClientSettings):
    """Settings of `millstream why`, which explains either one request or one tenant.

    Exactly one of `request_id` and `tenant` must be given; anything else fails validation.
    """

    request_id: RequestId | None = Field(
        None,
        description="request to explain: `x-request-id` of its answer, or the answer's id",
        json_schema_extra=POSITIONAL,
    )
    tenant: Slug | None = Field(
        None, description="tenant to explain, instead of a request", json_schema_extra=FLAG_ONLY
    )
    model: str | None = Field(
        None, description="only at this model; by default at every one", json_schema_extra=FLAG_ONLY
    )
    shards: int = Field(1, ge=1, description="token log streams; the same for every service")
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")

    @model_validator(mode="after")
    def _check_subject(self) -> "WhySettings":
        if (self.request_id is None) == (self.tenant is None):
            raise ValueError("give either REQUEST_ID or --tenant")
        if self.request_id:
            token(self.request_id)
        return self
