"""Settings of an identity provider whose tokens are accepted: a table `[oidc.<name>]`. Pure."""

from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from registry.tenant_records import Scope
from streams.base_settings import Slug

# Of these alone: a shared secret, or none at all, lets whoever knows a public key make tokens
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


def check_url(value: str) -> str:
    """Return a URL to which keys may be asked; raises ValueError unless it is https or loopback."""
    parts = urlsplit(value)
    if parts.username or parts.query or parts.fragment or not parts.hostname:
        raise ValueError("the URL must have a host, and neither user, query nor fragment")
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname)):
        return value
    raise ValueError("the URL must begin with https://, unless its host is this machine")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Url = Annotated[str, AfterValidator(check_url)]


class OidcSettings(BaseModel):
    """One identity provider, and what its claims mean here; what is not mapped is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: Url = Field(description="the claim iss, letter by letter; its keys are looked up there")
    audience: str = Field(min_length=1, description="a token's claim aud must be or contain it")
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256"), min_length=1, description="signatures that are accepted"
    )
    token_type: str = Field("at+jwt", description="a token's header typ; at+jwt is RFC 9068's")
    jwks_url: Url | None = Field(
        None, description="URL of the issuer's public keys; None: as its discovery document says"
    )
    tenant_claim: str = Field(min_length=1, description="the claim that says whose token it is")
    tenants: dict[str, Slug] = Field(
        min_length=1, description="tenant for each value of that claim"
    )
    scope_claim: str = Field("scope", description="the claim with words apart, or a list of them")
    scopes: dict[str, tuple[Scope, ...]] = Field(
        min_length=1, description="scopes for each word of that claim"
    )
    leeway_seconds: float = Field(
        30, ge=0, le=120, description="how far the issuer's clock may be off"
    )
