"""Settings of `millstream audit` and `millstream audit export`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from millstream.admin.settings import AdminClientSettings
from streams.base_settings import FLAG_ONLY, POSITIONAL
from streams.records.audit_chain import ChainHead


def _parse_time(value: Any) -> Any:
    """Return epoch seconds of a day or time, of UTC unless it says otherwise."""
    if not isinstance(value, str):
        return value
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"{value!r} is no time: write 2026-11-28 or 2026-11-28T17:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _check_head(value: str) -> str:
    """Return `value`; raises ValueError if it names no head."""
    ChainHead.parse(value)
    return value


class AuditSettings(AdminClientSettings):
    """Settings of `millstream audit`."""

    who: str | None = Field(
        None,
        description="only changes of this key's id, or of admin-key, nats, configuration",
        json_schema_extra=FLAG_ONLY,
    )
    what: str | None = Field(
        None,
        description="only this operation or record, such as tenants, keys.create, 'tenant acme'",
        json_schema_extra=FLAG_ONLY,
    )
    since: Annotated[float, BeforeValidator(_parse_time)] | None = Field(
        None,
        description="only from then on: a day or time of UTC, such as 2026-11-28T17:00",
        json_schema_extra=FLAG_ONLY,
    )
    after: int = Field(
        0, ge=0, description="only records above this sequence", json_schema_extra=FLAG_ONLY
    )
    limit: int | None = Field(
        None,
        ge=1,
        description="most records to show; unless given, all",
        json_schema_extra=FLAG_ONLY,
    )
    follow: bool = Field(
        False, description="go on with what is changed, until stopped", json_schema_extra=FLAG_ONLY
    )
    verify_chain: bool = Field(
        False,
        alias="verify",
        description="check that no record was changed, removed or put in, and show the head",
        json_schema_extra=FLAG_ONLY,
    )
    head: tuple[Annotated[str, AfterValidator(_check_head)], ...] = Field(
        (),
        description="with --verify: a head that was kept elsewhere, which must be in the chain or, "
        "of an archive, right before it; repeatable",
        json_schema_extra=FLAG_ONLY,
    )
    directory: Path | None = Field(
        None,
        description="with --verify: check the files of `audit export` in this directory",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print a JSON object a line")

    @model_validator(mode="after")
    def _check_options(self) -> "AuditSettings":
        if (self.head or self.directory) and not self.verify_chain:
            raise ValueError("--head and --directory are for --verify")
        if self.verify_chain and (self.who or self.what or self.since or self.after or self.follow):
            raise ValueError("--verify reads the whole chain: give no other choice of records")
        return self


class AuditExportSettings(AdminClientSettings):
    """Settings of `millstream audit export`."""

    directory: Path = Field(
        description="directory of the files, made if it is missing", json_schema_extra=POSITIONAL
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of a sentence")
