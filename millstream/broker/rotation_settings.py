"""Settings of `millstream broker rotate`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from millstream.broker.settings import DIRECTORY, BrokerSettings
from streams.base_settings import FLAG_ONLY, POSITIONAL, ServerUrl


class RotationSettings(BrokerSettings):
    """Settings of `millstream broker rotate`: which keys, which step, and which servers to tell."""

    directory: Path = Field(description=DIRECTORY, json_schema_extra=POSITIONAL)
    what: Literal["accounts", "users", "operator"] = Field(
        description="signing keys of accounts or of the operator, or users' credentials",
        json_schema_extra=FLAG_ONLY,
    )
    finish: bool = Field(
        False, description="drop the old signing keys", json_schema_extra=FLAG_ONLY
    )
    cut: bool = Field(
        False,
        description="with --finish: cut off connections and tenants that still use the old keys",
        json_schema_extra=FLAG_ONLY,
    )
    operator_seed: Path | None = Field(
        None,
        description="file with the seed of the operator's identity, where it is kept elsewhere",
        json_schema_extra=FLAG_ONLY,
    )
    nats: ServerUrl | None = Field(
        None,
        repr=False,
        description="comma-separated URLs of running NATS servers, which are told; else files are "
        "written",
    )
    nats_creds: Path | None = Field(
        None, description="credentials of a system user; the directory's by default"
    )
    nats_ca: Path | None = Field(
        None, description="CA certificates, in PEM, by which NATS servers are known; needs TLS"
    )
