"""Tokens of an identity provider, and those that attackers would make."""

import base64
import json
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from jwt.warnings import InsecureKeyLengthWarning
from pydantic import ValidationError

from api.authentication.identity_provider import IdentityProvider, is_token, read_issuer
from api.authentication.key_set_cache import IssuerUnreachable, KeySetCache
from api.authentication.oidc_settings import OidcSettings
from streams.errors import CredentialExpired, TokenRefused

ISSUER = "https://id.example.com"
NOW = 1_800_000_000.0
RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
SHORT_RSA = rsa.generate_private_key(65537, 1024)
EC = ec.generate_private_key(ec.SECP256R1())
SETTINGS: dict[str, Any] = {
    "issuer": ISSUER,
    "audience": "millstream",
    "tenant_claim": "org",
    "tenants": {"org-17": "acme", "org-18": "other"},
    "scopes": {"llm": ("infer", "models:read"), "ops": ("operator",)},
}
CLAIMS: dict[str, Any] = {
    "iss": ISSUER,
    "sub": "ada",
    "aud": "millstream",
    "iat": NOW,
    "exp": NOW + 60,
    "jti": "t-1",
    "org": "org-17",
    "scope": "openid llm",
}


def public(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    algorithm = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, **more}


class Issuer:
    """What an issuer answers; `keys` None means that it is away."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys: list[dict[str, Any]] | None = list(keys)
        self.discovery: dict[str, Any] = {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys"}
        self.asked: list[str] = []

    def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if self.keys is None:
            raise OSError("no answer")
        is_discovery = url.endswith("/.well-known/openid-configuration")
        return json.dumps(self.discovery if is_discovery else {"keys": self.keys}).encode()


def provider_of(
    issuer: Issuer, monotonic: Callable[[], float] = lambda: 0.0, **settings: Any
) -> IdentityProvider:
    made = OidcSettings(**{**SETTINGS, **settings})
    return IdentityProvider("corp", made, KeySetCache(made, issuer.fetch, monotonic))


def token(key: Any = RSA, algorithm: str = "RS256", kid: str = "k1", **claims: Any) -> str:
    """A token of the issuer; a claim of None is left out."""
    headers = {"kid": kid, "typ": claims.pop("typ", "at+jwt")}
    wanted = {n: v for n, v in {**CLAIMS, **claims}.items() if v is not None}
    return jwt.encode(wanted, key, algorithm, headers)


async def test_claims_become_a_tenant_and_scopes() -> None:
    """As the tables say, and nothing by its own name."""
    issuer = Issuer(public(RSA, "k1"), public(EC, "k2"))
    provider = provider_of(issuer)
    verified = await provider.verify(token(), NOW)
    assert (verified.issuer, verified.subject, verified.token_id) == (ISSUER, "ada", "t-1")
    assert (verified.key.tenant, verified.key.scopes) == ("acme", ("infer", "models:read"))
    assert (verified.key.name, verified.key.expires_at) == ("oidc-corp", NOW + 90)
    listed = token(EC, "ES256", "k2", aud=["x", "millstream"], scope=["ops", 7], org=["org-18"])
    assert (await provider.verify(listed, NOW)).key.scopes == ("operator",)
    assert issuer.asked == [f"{ISSUER}/.well-known/openid-configuration", f"{ISSUER}/keys"]


def unsigned(**header: Any) -> str:
    parts = [{"alg": "none", "kid": "k1", "typ": "at+jwt", **header}, CLAIMS]
    packed = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts]
    return b".".join([*packed, b""]).decode()


def hs256_with_public_key() -> str:
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    secret = base64.urlsafe_b64encode(pem).decode()  # PyJWT makes no such token of a PEM
    return token(secret, "HS256")


def short_token() -> str:
    """A token of a key that can be broken, of which PyJWT warns whoever signs by it."""
    with pytest.warns(InsecureKeyLengthWarning):
        return token(SHORT_RSA, kid="short")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (unsigned, "algorithm"),
        (lambda: unsigned(alg="RS256"), "not signed"),
        (lambda: unsigned(alg=["RS256"]), "algorithm"),
        (lambda: unsigned(alg="RS256", kid=7), "cannot be read"),
        (lambda: unsigned(alg="RS256", crit=["x"]), "cannot be read"),
        (hs256_with_public_key, "algorithm"),
        (lambda: token(algorithm="RS512"), "algorithm"),
        (lambda: token(OTHER_RSA), "not signed"),
        (lambda: token(EC, "ES256"), "not signed"),
        (short_token, "not signed"),
        (lambda: token(kid="unknown"), "not signed"),
        (lambda: token(typ="JWT"), "type"),
        (lambda: token(typ="id+jwt"), "type"),
        (lambda: token(aud="another"), "audience"),
        (lambda: token(aud=None), "lacks a claim"),
        (lambda: token(iss="https://evil.example.com"), "issuer"),
        (lambda: token(sub=None), "lacks a claim"),
        (lambda: token(exp=None), "lacks a claim"),
        (lambda: token(iat=NOW + 31), "not valid yet"),
        (lambda: token(nbf=NOW + 31), "not valid yet"),
        (lambda: token(iat=True), "'iat'"),
        (lambda: token(exp=1e30), "'exp'"),
        (lambda: token(jti=[]), "claim"),
        (lambda: token(org="org-99"), "no tenant"),
        (lambda: token(org=None), "no tenant"),
        (lambda: token(org=["org-17", "org-18"]), "several tenants"),
        (lambda: token(org={"org-17": 1}), "no tenant"),
    ],
)
async def test_what_is_not_right_is_refused(make: Callable[[], str], why: str) -> None:
    """Each with its own sentence."""
    provider = provider_of(Issuer(public(RSA, "k1"), public(SHORT_RSA, "short")))
    with pytest.raises(TokenRefused, match=why):
        await provider.verify(make(), NOW)


async def test_times_are_judged_with_little_leeway() -> None:
    """An hour off is not forgiven, half a minute is."""
    provider = provider_of(Issuer(public(RSA, "k1")))
    await provider.verify(token(exp=NOW - 29), NOW)
    with pytest.raises(CredentialExpired):
        await provider.verify(token(exp=NOW - 31), NOW)
    with pytest.raises(TokenRefused, match="clock"):
        await provider.verify(token(iat=NOW + 3600, exp=NOW + 7200), NOW)


async def test_keys_with_one_id_are_all_tried() -> None:
    """A key set in rotation may have that; each signature must be of one of them."""
    provider = provider_of(Issuer(public(OTHER_RSA, "k1"), public(EC, "k1"), public(RSA, "k1")))
    await provider.verify(token(), NOW)
    await provider.verify(token(EC, "ES256"), NOW)
    with pytest.raises(TokenRefused):
        await provider.verify(token(rsa.generate_private_key(65537, 2048)), NOW)


async def test_a_new_key_is_fetched_and_the_last_good_ones_are_kept() -> None:
    """At most one fetch in 30 s for ids that are not known; none that fails takes a key away."""
    now = [0.0]
    issuer = Issuer(public(RSA, "k1"))
    provider = provider_of(issuer, lambda: now[0], jwks_url=f"{ISSUER}/keys")
    await provider.verify(token(), NOW)
    issuer.keys = [public(RSA, "k1"), public(EC, "k2")]
    for _ in range(3):
        with pytest.raises(TokenRefused):
            await provider.verify(token(EC, "ES256", "k2"), NOW)
    assert len(issuer.asked) == 1
    now[0] += 30
    await provider.verify(token(EC, "ES256", "k2"), NOW)
    issuer.keys = None
    now[0] += 3600
    await provider.verify(token(sub="eve"), NOW)
    await provider.verify(token(EC, "ES256", "k2", sub="eve"), NOW)


async def test_without_any_keys_the_client_may_come_again() -> None:
    """The token may be right: this is a 503, and not a 401."""
    now = [0.0]
    issuer = Issuer()
    issuer.keys = None
    provider = provider_of(issuer, lambda: now[0])
    for _ in range(2):
        with pytest.raises(IssuerUnreachable, match="id.example.com"):
            await provider.verify(token(), NOW)
    assert len(issuer.asked) == 1
    issuer.keys = [public(RSA, "k1")]
    now[0] += 2
    await provider.verify(token(), NOW)


@pytest.mark.parametrize(
    "discovery",
    [
        {"issuer": "https://evil.example.com", "jwks_uri": f"{ISSUER}/keys"},
        {"issuer": ISSUER, "jwks_uri": "http://id.example.com/keys"},
        {"issuer": ISSUER, "jwks_uri": "file:///etc/passwd"},
        {"issuer": ISSUER},
    ],
)
async def test_a_discovery_document_leads_nowhere_else(discovery: dict[str, Any]) -> None:
    """Whoever answers in the issuer's place must not choose where keys come from."""
    issuer = Issuer(public(RSA, "k1"))
    issuer.discovery = discovery
    with pytest.raises(IssuerUnreachable):
        await provider_of(issuer).verify(token(), NOW)


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c", "sk-key", "eyJ.e30", "eyJ.e30.e30.e30"])
def test_what_has_not_the_form_of_a_token_is_a_key(text: str) -> None:
    """It is looked up as one, and who guesses is slowed."""
    assert not is_token(text)
    assert is_token(token())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eyJ.e30.e30", "cannot be read"),
        ("ey..", "cannot be read"),
        ("ey\udcff.\udcff.x", "cannot be read"),
        (jwt.encode({}, RSA, "RS256"), "names no issuer"),
        (jwt.encode({"a": "x" * 20_000}, RSA, "RS256"), "more than 16384 bytes"),
    ],
    ids=["json", "empty", "characters", "issuer", "huge"],
)
def test_a_token_without_an_issuer_is_refused(text: str, why: str) -> None:
    """A huge one before anything is decoded."""
    assert is_token(text)
    with pytest.raises(TokenRefused, match=why):
        read_issuer(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("issuer", "http://id.example.com"),
        ("issuer", "https://user:word@id.example.com"),
        ("jwks_url", "ftp://id.example.com"),
        ("algorithms", ("HS256",)),
        ("algorithms", ("none",)),
        ("algorithms", ()),
        ("scopes", {"llm": ("everything",)}),
        ("tenants", {}),
        ("leeway_seconds", 3600),
    ],
)
def test_settings_that_would_let_others_in_are_refused(field: str, value: object) -> None:
    """At the start, and not at the first token."""
    with pytest.raises(ValidationError):
        OidcSettings.model_validate({**SETTINGS, field: value})
