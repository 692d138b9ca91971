"""Settings of `millstream admin`."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from api.authentication.oidc_settings import OidcSettings
from streams.base_settings import NO_FLAG, Port, ServiceSettings, Slug, TenantSettings
from streams.records.audit_chain import ChainHead
from streams.topology import (
    DAY_SECONDS,
    DEFAULT_AUDIT_BYTES,
    FILES_BYTES,
    MIB,
    RESULTS_BYTES,
    LedgerLimits,
    StreamLimits,
)


def _check_head(value: str) -> str:
    """Return `value`; raises ValueError if it names no head."""
    ChainHead.parse(value)
    return value


class AdminSettings(ServiceSettings):
    """Settings of the admin service: its address and key, what it declares, and the tenants."""

    user_class = "admin"

    admin_host: str = Field("127.0.0.1", description="address of the admin API")
    admin_port: Port = Field(0, description="port of the admin API; 0: any free one, logged")
    admin_key: SecretStr | None = Field(
        None,
        description="key that opens the admin API; without one it is open over NATS alone",
        json_schema_extra=NO_FLAG,
    )
    admin_key_file: Path | None = Field(
        None, description="file with the key of the admin API, in place of MILLSTREAM_ADMIN_KEY"
    )
    replicas: int = Field(
        1, ge=1, le=5, description="copies of each stream: 1 embedded, 3 in a cluster"
    )
    lease_seconds: float = Field(
        2, gt=0, description="a leader that is silent for so many seconds is replaced by a standby"
    )
    api_key: SecretStr | None = Field(None, description="API key of the tenant `default`")
    key_pepper_file: Path | None = Field(
        None,
        description="file with the secret under which managed API keys are sealed, the same for "
        "all gateways and admin services; without it none can be created",
    )
    broker_keys: Path | None = Field(
        None,
        description="directory of keys of `millstream broker init`, with which the accounts of "
        "tenants that publish to NATS are signed; without it none is made",
    )
    oidc: dict[Slug, OidcSettings] = Field({}, description="issuers whose tokens are accepted")
    tenants: dict[Slug, TenantSettings] = Field(
        {}, description="tenants that may send requests, with their keys and quotas"
    )
    replace_tenants: bool = Field(
        False, description="remove the tenants of an earlier configuration even without a new one"
    )
    ledger_bytes: int = Field(256 * MIB, ge=MIB, description="size of the ledger")
    ledger_days: int = Field(
        30,
        ge=0,
        description="age at which ledger records are removed; 0: never, `ledger export` does it",
    )

    audit_bytes: int = Field(
        DEFAULT_AUDIT_BYTES, ge=MIB, description="size of the audit log, which is never shortened"
    )

    audit_head: Annotated[str, AfterValidator(_check_head)] | None = Field(
        None,
        description="head of an archived audit log, which the first record of an empty one follows",
    )
    files_bytes: int = Field(FILES_BYTES, ge=MIB, description="size of the store of all files")
    results_bytes: int = Field(
        RESULTS_BYTES, ge=MIB, description="size of the store of all results of batches"
    )

    @property
    def stream_limits(self) -> StreamLimits:
        """The limits of streams that are set here."""
        ledger = LedgerLimits(self.ledger_bytes, self.ledger_days * DAY_SECONDS)
        return StreamLimits(ledger, self.audit_bytes, self.files_bytes, self.results_bytes)
