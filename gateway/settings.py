"""Settings of `millstream gateway`."""

from ipaddress import ip_address
from pathlib import Path

from pydantic import Field

from api.authentication.oidc_settings import OidcSettings
from registry.webhook_policy import WebhookSettings
from streams.base_settings import Port, ServiceSettings, Slug, TlsSettings
from streams.topology import MAX_DEADLINE_SECONDS as LATEST  # token logs do not live longer


class GatewaySettings(ServiceSettings, TlsSettings, WebhookSettings):
    """Settings of a gateway: its address, its certificate, its limits."""

    user_class = "gateway"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8080, description="port for HTTP and WebSocket")
    fd: int | None = Field(
        None,
        ge=3,
        description="descriptor of a socket that is bound to this address already, and inherited: "
        "several gateways can share one",
    )
    public_metrics: bool = Field(
        False, description="serve /metrics, with tenants' names, on the public port too"
    )
    key_pepper_file: Path | None = Field(
        None,
        description="file with the secret under which managed API keys are sealed, the same for "
        "all gateways and admin services; without it such keys are refused",
    )
    oidc: dict[Slug, OidcSettings] = Field({}, description="issuers whose tokens are accepted")
    grace_seconds: float = Field(
        10, ge=0, description="time that requests live on after their connection dropped"
    )
    max_body_bytes: int = Field(1_000_000, ge=1, description="largest HTTP body or WebSocket frame")
    max_file_bytes: int = Field(
        512_000_000, ge=1, description="largest file that may be stored with /v1/files"
    )
    response_days: float = Field(
        30, gt=0, le=30, description="days for which /v1/responses keeps what it stores"
    )
    max_connections: int = Field(
        16_384, ge=1, description="open connections, as far as file descriptors allow"
    )
    idle_seconds: int = Field(
        620, ge=1, description="time that a connection stays open between requests"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web origins whose pages may call the API, or *"
    )
    default_deadline_seconds: float = Field(
        600, gt=0, le=LATEST, description="deadline of a request that names none"
    )
    max_deadline_seconds: float = Field(
        600, gt=0, le=LATEST, description="latest deadline a request may name"
    )

    @property
    def has_public_metrics(self) -> bool:
        """True if /metrics is on the public port: on loopback, or where that is wished."""
        return self.public_metrics or self.is_on_loopback

    @property
    def is_on_loopback(self) -> bool:
        """True if only this machine can reach the gateway."""
        return _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
