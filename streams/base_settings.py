"""Settings that all commands share: frozen pydantic records, one flat key per setting.

Each service describes its settings as a subclass; `millstream.settings_loader` fills it from flags,
`MILLSTREAM_*` and `millstream.toml`, and the field descriptions become `--help`. An `alias` renames
the key.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    model_validator,
)
from pydantic.config import JsonDict

from streams.connection_files import ConnectionFiles
from streams.server_urls import parse_server_urls

ClientAuth = Literal["optional", "required"]
SoftQuota = Literal["tokens_per_day", "spend_per_day", "tokens_per_month", "spend_per_month"]
LogLevel = Literal["debug", "info", "warning", "error"]
SLUG_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
Slug = Annotated[str, StringConstraints(pattern=SLUG_PATTERN)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _check_server_urls(value: str) -> str:
    """Return `value`; raises ValueError, without its credentials, if it names no NATS server."""
    parse_server_urls(value)
    return value


def _normalize_identity(value: str) -> str:
    """Return `value` with a host name in lower case; raises ValueError for a kind in lower case."""
    if value.startswith(("dns:", "cn:")):
        raise ValueError("write DNS: and CN: in capitals")
    return f"DNS:{value[4:].lower()}" if value.startswith("DNS:") else value


# As `streams.certificates.find_identities` names them
CertificateIdentity = Annotated[
    str,
    StringConstraints(pattern=r"^(DNS:\S+|CN:.*\S|[a-z][a-z0-9+.-]*:\S+)$"),
    AfterValidator(_normalize_identity),
]
ServerUrl = Annotated[str, AfterValidator(_check_server_urls)]
RequestId = Annotated[  # also accepts an OpenAI answer's id, which has the request id in it
    str, AfterValidator(lambda value: re.sub("^(chat)?cmpl-", "", value))
]

CLOSING_SECONDS = 2.0  # for closing connections, once running requests have finished
POSITIONAL: JsonDict = {"positional": True}
FLAG_ONLY: JsonDict = {"flag_only": True}  # given with one call; not read from file or environment
NO_FLAG: JsonDict = {"no_flag": True}  # a secret: every user of the machine can read a command line
DATA_DIR = Path("~/.millstream")
ENV_PREFIX = "MILLSTREAM_"
UPSTREAM_PREFIX = ENV_PREFIX + "UPSTREAM_"  # variables with API keys of remote models' servers
# Settings that name the files of a connection to NATS
CONNECTION_KEYS = frozenset({"nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key"})
DEFAULT_NATS = "nats://127.0.0.1:4222"


def cache_directory() -> Path:
    """Return the directory for what can be made again: converted demo models, proofs of models.

    The path is that in the environment variable `MILLSTREAM_CACHE_DIR`, else
    `~/.cache/millstream`, with `~` expanded. The directory is not created.
    """
    return Path(os.environ.get("MILLSTREAM_CACHE_DIR", "~/.cache/millstream")).expanduser()


def new_id() -> str:
    """Return a random name for one process: 8 hex digits, valid as a subject token."""
    return secrets.token_hex(4)


class Settings(BaseModel):
    """Settings of one command, read once at start and never changed.

    An unknown key or a value of the wrong type raises pydantic's ValidationError.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True
    )

    config: Path | None = Field(
        None, description="TOML file with settings, ./millstream.toml if it exists"
    )
    log_level: LogLevel = Field("info", description="least severe log event to write")

    @property
    def shutdown_timeout_seconds(self) -> float:
        """Seconds that the process may still run after the first SIGTERM or SIGINT."""
        return CLOSING_SECONDS


class DiscoverySettings(Settings):
    """Settings of a command that finds a running `millstream up` through its data directory.

    `user_class` is the class of users of NATS (`streams/accounts/access.py`) whose credentials it
    takes there.
    """

    user_class: ClassVar[str] = "operator"
    data_dir: Path = Field(
        DATA_DIR, description="data directory of the `millstream up` to look for"
    )


class GatewayClientSettings(DiscoverySettings):
    """Settings of a command that talks to a gateway."""

    url: str = Field(
        "http://127.0.0.1:8080",
        pattern="^https?://",
        description="address of the gateway, such as https://mill:8080; found in the data "
        "directory of a running `millstream up`, else the default",
    )
    api_key: SecretStr | None = Field(
        None,
        description="API key; by default, and with --data-dir in any case, the one that "
        "`millstream up` keeps in its data directory",
    )
    ca: Path | None = Field(
        None,
        description="PEM file with the authorities to trust the gateway's certificate by; by "
        "default the system's, or those that SSL_CERT_FILE names",
    )


class ClientSettings(DiscoverySettings):
    """Settings of a command that talks to NATS and logs only errors by default."""

    log_level: LogLevel = Field("error", description="least severe log event to write")
    nats: ServerUrl = Field(
        DEFAULT_NATS,
        repr=False,
        description="comma-separated URLs of the NATS servers; found in the data directory of a "
        "running `millstream up`, else the default",
    )
    nats_creds: Path | None = Field(
        None, description="credentials file for NATS: the token and seed of this process's user"
    )
    nats_nkey: Path | None = Field(
        None, description="file with the seed of a NATS user that has no token"
    )
    nats_ca: Path | None = Field(
        None, description="CA certificates, in PEM, by which NATS servers are known; needs TLS"
    )
    nats_cert: Path | None = Field(
        None, description="certificate, in PEM, that NATS servers are shown; needs TLS"
    )
    nats_key: Path | None = Field(None, description="unencrypted private key of --nats-cert")

    @property
    def nats_files(self) -> ConnectionFiles:
        """The files of the connection to NATS. Raises `InvalidConnectionFiles`."""
        return ConnectionFiles(
            self.nats_creds, self.nats_nkey, self.nats_ca, self.nats_cert, self.nats_key
        )

    @model_validator(mode="after")
    def _check_nats_files(self) -> "ClientSettings":
        """Refuse files that exclude each other before anything starts."""
        assert self.nats_files
        return self


class ServiceSettings(ClientSettings):
    """Settings that every long-running service has: broker, name, time to drain, stream layout."""

    log_level: LogLevel = Field("info", description="least severe log event to write")
    id: Slug = Field(
        default_factory=new_id, description="name of this process in subjects and logs"
    )
    drain_seconds: float = Field(
        30, ge=0, description="time to finish what runs after the first SIGTERM or SIGINT"
    )
    shards: int = Field(1, ge=1, description="token log streams; the same for every service")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port")
    metrics_port: Port = Field(0, description="port for /metrics, /healthz and /readyz; 0: off")

    @property
    def shutdown_timeout_seconds(self) -> float:
        """Seconds that the service may still run after the first SIGTERM or SIGINT.

        They are `drain_seconds` plus 2 s for closing connections.
        """
        return self.drain_seconds + CLOSING_SECONDS


class TlsSettings(Settings):
    """Settings of a command that serves clients, with TLS if it has a certificate.

    A part of what belongs together fails validation: a certificate without its key, or what is
    asked of clients without an authority to check it by.
    """

    tls_cert: Path | None = Field(
        None, description="PEM file with the certificate and its chain: serves https and wss"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of clients' certificates, which stand for the "
        "tenants that list them",
    )
    tls_client_auth: ClientAuth = Field(
        "optional", description="whether a client must have a certificate of these authorities"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give both --tls-cert and --tls-key, or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.tls_client_auth == "required" and not self.tls_client_ca:
            raise ValueError("--tls-client-auth required needs --tls-client-ca")
        return self


class QuotaSettings(BaseModel):
    """Quotas of a tenant or of one of its API keys; None means unlimited.

    Each quota applies to the sum over all gateways.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    requests_per_minute: int | None = Field(
        None, ge=1, description="requests in a minute", json_schema_extra=FLAG_ONLY
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="tokens in a minute, of prompts and answers together",
        json_schema_extra=FLAG_ONLY,
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="requests that have not ended", json_schema_extra=FLAG_ONLY
    )
    tokens_per_day: int | None = Field(
        None, ge=1, description="tokens in a day of UTC", json_schema_extra=FLAG_ONLY
    )
    spend_per_day: float | None = Field(
        None,
        gt=0,
        description="cost of a day of UTC, in the currency of the models' prices",
        json_schema_extra=FLAG_ONLY,
    )
    tokens_per_month: int | None = Field(
        None, ge=1, description="tokens in a month of UTC", json_schema_extra=FLAG_ONLY
    )
    spend_per_month: float | None = Field(
        None, gt=0, description="cost of a month of UTC", json_schema_extra=FLAG_ONLY
    )
    soft_quotas: tuple[SoftQuota, ...] = Field(
        (),
        description="quotas of a day or month, such as spend_per_month, that are told of and "
        "refuse nothing",
        json_schema_extra=FLAG_ONLY,
    )


class KeySettings(QuotaSettings):
    """One API key of a tenant, with limits that apply to this key beside the tenant's own.

    A bare string is taken as a key without limits.
    """

    max_connections: int | None = Field(None, ge=1, description="connections to each gateway")
    frames_per_second: int | None = Field(
        None, ge=1, description="frames over WebSockets, each 4096 bytes one more"
    )
    key: SecretStr = Field(description="the API key, kept only as a hash")
    name: Slug | None = Field(None, description="what `millstream usage` calls it")

    @model_validator(mode="before")
    @classmethod
    def _wrap_bare_key(cls, value: object) -> object:
        return {"key": value} if isinstance(value, str | SecretStr) else value


class TenantLimits(QuotaSettings):
    """A tenant's limits and its share of the fleet."""

    weight: float = Field(
        1.0, gt=0, description="share relative to the other tenants", json_schema_extra=FLAG_ONLY
    )
    reserved_tokens: int = Field(
        0,
        ge=0,
        description="KV tokens of each model that are kept for it, used or not",
        json_schema_extra=FLAG_ONLY,
    )
    max_queued: int = Field(
        1000,
        ge=1,
        le=1_000_000_000,
        description="queued requests per model and priority",
        json_schema_extra=FLAG_ONLY,
    )
    max_connections: int = Field(
        2000,
        ge=1,
        description="connections to each gateway: WebSockets, HTTP requests under way",
        json_schema_extra=FLAG_ONLY,
    )
    frames_per_second: int = Field(
        2000,
        ge=1,
        description="frames that each gateway takes from its WebSockets, each 4096 bytes one more",
        json_schema_extra=FLAG_ONLY,
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longest prompt", json_schema_extra=FLAG_ONLY
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="most tokens one request may ask for", json_schema_extra=FLAG_ONLY
    )
    max_stored_bytes: int = Field(
        2**30,
        ge=0,
        description="bytes of all files that it stores with /v1/files",
        json_schema_extra=FLAG_ONLY,
    )
    publishes: bool = Field(
        False,
        description="may submit over NATS: has an ingress stream, with 4 MiB reserved for it",
        json_schema_extra=FLAG_ONLY,
    )


class TenantSettings(TenantLimits):
    """A `[tenants.<name>]` table: the tenant's keys, limits and share of the fleet."""

    keys: tuple[KeySettings, ...] = Field(
        (), description='API keys, kept only as hashes: "sk-…" or {key = "sk-…", limits}'
    )
    certificates: tuple[CertificateIdentity, ...] = Field(
        (),
        description="names of client certificates that stand for this tenant: a URI like "
        '"spiffe://cell/acme", "DNS:host" or "CN:name"',
    )
