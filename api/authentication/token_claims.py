"""A token's claims: what they must say, and which tenant and scopes they mean here. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api.authentication.oidc_settings import OidcSettings
from registry.tenant_records import ApiKey, Scope
from streams.errors import CredentialExpired, TokenRefused

Claims = Mapping[str, Any]


@dataclass(frozen=True)
class VerifiedToken:
    """A token whose signature and claims are right; `key` is what it may do here, and until when.

    Times are in epoch seconds.
    """

    issuer: str
    subject: str
    token_id: str | None
    issued_at: float
    key: ApiKey


def read_claims(claims: Claims, settings: OidcSettings, name: str, now: float) -> VerifiedToken:
    """Return the token with these claims, whose signature, issuer and audience are right.

    `name` is the provider's, by which its tokens are called in usage. Raises `TokenRefused` for a
    claim that is missing, of another type, or that means nothing here, and `CredentialExpired`.
    """
    issued_at, expires_at = _time(claims, "iat"), _time(claims, "exp")
    not_before = _time(claims, "nbf") if "nbf" in claims else issued_at
    leeway = settings.leeway_seconds
    if max(issued_at, not_before) > now + leeway:
        raise TokenRefused("this token is not valid yet; is a clock off?")
    if expires_at + leeway <= now:
        raise CredentialExpired("this token has expired")
    token_id = claims.get("jti")
    if token_id is not None and not isinstance(token_id, str):
        raise TokenRefused("the claim 'jti' of this token must be a text")
    key = ApiKey(
        tenant=_find_tenant(claims, settings),
        id=f"oidc-{name}",
        name=f"oidc-{name}",
        scopes=_find_scopes(claims, settings),
        expires_at=expires_at + leeway,
    )
    return VerifiedToken(settings.issuer, _text(claims, "sub"), token_id, issued_at, key)


def _time(claims: Claims, name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise TokenRefused(f"the claim {name!r} of this token must be a time in seconds")
    return float(value)


def _text(claims: Claims, name: str) -> str:
    value = claims.get(name)
    if not isinstance(value, str) or not value:
        raise TokenRefused(f"the claim {name!r} of this token must be a text")
    return value


def _find_tenant(claims: Claims, settings: OidcSettings) -> str:
    values = _words(claims.get(settings.tenant_claim), is_split=False)
    found = {settings.tenants[value] for value in values if value in settings.tenants}
    if len(found) != 1:
        how = "no tenant" if not found else "several tenants"
        raise TokenRefused(f"the claim {settings.tenant_claim!r} of this token means {how} here")
    return found.pop()


def _find_scopes(claims: Claims, settings: OidcSettings) -> tuple[Scope, ...]:
    words = _words(claims.get(settings.scope_claim), is_split=True)
    found = {scope for word in words for scope in settings.scopes.get(word, ())}
    return tuple(sorted(found))


def _words(value: object, *, is_split: bool) -> list[str]:
    """The values of a claim that is a text or a list of texts; a text of words may be split."""
    if isinstance(value, str):
        return value.split() if is_split else [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
