"""One identity provider: verifies the signatures and claims of its tokens (RFC 7519, RFC 9068)."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import jwt
from jwt.exceptions import InvalidAudienceError, InvalidIssuerError, PyJWTError

from api.authentication.key_set_cache import KeySetCache
from api.authentication.oidc_settings import OidcSettings
from api.authentication.token_claims import VerifiedToken, read_claims
from streams.errors import TokenRefused

MAX_TOKEN_BYTES = 16 * 1024
_MAX_VERIFIED = 10_000
# Times are checked by the cluster's clock, not by this machine's
_OPTIONS: dict[str, Any] = {
    "require": ["iss", "sub", "aud", "exp", "iat"],
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
}


def is_token(text: str) -> bool:
    """Return True for what has the form of a signed token: three parts, of which one is JSON."""
    return text.startswith("ey") and text.count(".") == 2


def read_issuer(token: str) -> str:
    """Return the issuer that a token claims, unverified; raises `TokenRefused` if it has none."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenRefused(f"this token has more than {MAX_TOKEN_BYTES} bytes")
    try:
        issuer = jwt.decode(token, options={"verify_signature": False}).get("iss")
    except (PyJWTError, ValueError, RecursionError):
        raise TokenRefused("this token cannot be read") from None
    if not isinstance(issuer, str):
        raise TokenRefused("this token names no issuer")
    return issuer


class IdentityProvider:
    """Verifies the tokens of one configured issuer; those it has verified are remembered by hash.

    `name` is that of its table in the settings.
    """

    def __init__(self, name: str, settings: OidcSettings, key_sets: KeySetCache) -> None:
        self.name, self._settings, self._key_sets = name, settings, key_sets
        self._verified = OrderedDict[bytes, VerifiedToken]()

    @property
    def issuer(self) -> str:
        """The issuer whose tokens are verified here."""
        return self._settings.issuer

    async def verify(self, token: str, now: float) -> VerifiedToken:
        """Return what a token says, if all of it is right as of `now` (epoch seconds).

        Raises `TokenRefused`, `CredentialExpired`, or `IssuerUnreachable`. The time of a token that
        was verified before is left to the caller.
        """
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        if found := self._verified.get(digest):
            return found
        claims = await self._read_signed(token)
        verified = read_claims(claims, self._settings, self.name, now)
        self._verified[digest] = verified
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.popitem(last=False)
        return verified

    async def close(self) -> None:
        """End a fetch of keys that runs. Idempotent."""
        await self._key_sets.close()

    async def _read_signed(self, token: str) -> dict[str, Any]:
        """Return the claims of a token whose signature, issuer and audience are right."""
        algorithm, kid = self._check_header(token)
        key_set = await self._key_sets.find(kid)
        for key in key_set.find(kid, algorithm):
            try:
                return jwt.decode(
                    token,
                    key,
                    algorithms=[algorithm],
                    audience=self._settings.audience,
                    issuer=self._settings.issuer,
                    options=_OPTIONS,  # type: ignore[arg-type]  # PyJWT's TypedDict
                )
            except InvalidAudienceError:
                raise TokenRefused("this token is for another audience") from None
            except InvalidIssuerError:
                raise TokenRefused("this token is of another issuer") from None
            except (PyJWTError, ValueError, RecursionError):
                continue
        raise TokenRefused(
            "this token is not signed by a key of its issuer, or lacks a claim that it needs"
        )

    def _check_header(self, token: str) -> tuple[str, str | None]:
        """Return algorithm and key id of a token's header; refuse what is not accepted."""
        try:
            header = jwt.get_unverified_header(token)
        except (PyJWTError, ValueError, RecursionError):
            raise TokenRefused("this token cannot be read") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            raise TokenRefused("this token is signed by an algorithm that is not accepted")
        if _plain_type(header.get("typ")) != _plain_type(self._settings.token_type):
            raise TokenRefused(f"this token is not of the type {self._settings.token_type!r}")
        if "crit" in header:
            raise TokenRefused("this token needs an extension that is not known")
        return str(algorithm), kid


def _plain_type(value: object) -> str:
    """Return a media type as RFC 7515 compares it: without `application/`, in lower case."""
    return str(value).lower().removeprefix("application/")


def open_providers(
    stack: AsyncExitStack, settings: Mapping[str, OidcSettings]
) -> list[IdentityProvider]:
    """Return the configured providers, by the names of their tables; `stack` closes them."""
    providers = [IdentityProvider(name, each, KeySetCache(each)) for name, each in settings.items()]
    for provider in providers:
        stack.push_async_callback(provider.close)
    return providers
