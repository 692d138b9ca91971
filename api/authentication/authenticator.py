"""Authentication: an API key or a bearer token becomes a principal, which is kept current."""

import hmac
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from api.authentication.identity_provider import IdentityProvider, is_token, read_issuer
from api.authentication.token_claims import VerifiedToken
from registry.credentials.key_format import PREFIX, KeyText
from registry.credentials.key_pepper import Pepper
from registry.credentials.key_records import ManagedKey, is_in_networks
from registry.credentials.keys import Keys
from registry.tenant_records import ApiKey, Scope, Tenant
from registry.tenants import Tenants, hash_key
from streams.errors import (
    AddressNotAllowed,
    BadRequest,
    CredentialExpired,
    CredentialRevoked,
    Forbidden,
    InsufficientScope,
    TokenRefused,
    Unauthenticated,
)

FindTenant = Callable[[], Tenant]


@dataclass(frozen=True)
class ClientOrigin:
    """The origin of a request: its IP address, and the names in the client's certificate."""

    address: str
    identities: tuple[str, ...] = ()


class Principal:
    """One authenticated client: its tenant, and under `tenant.key` what its credential may do.

    It stays the same object while the client is connected; `check` notices when tenants, keys or
    the deny-list have changed since, and when the credential has expired.
    """

    def __init__(
        self,
        authenticator: "Authenticator",
        find: FindTenant,
        origin: ClientOrigin,
        subject: str = "",
    ) -> None:
        self._authenticator, self._find, self._origin = authenticator, find, origin
        self._subject = subject  # of a token
        self._load(Forbidden)

    @property
    def holder(self) -> str:
        """The holder's name: a key's id, or `oidc-<provider>:<subject>` for a token."""
        return f"{self.key.id}:{self._subject}" if self._subject else self.key.id

    @property
    def expires_at(self) -> float:
        """The time at which the credential expires, in epoch seconds; infinite if it never does."""
        return self._expires_at

    def check(self, needed: Scope) -> Tenant:
        """Return the tenant as it is now; cheap enough for every frame.

        Raises `CredentialRevoked` or `CredentialExpired` if the credential has ended, and
        `AddressNotAllowed` or `InsufficientScope` if it may not do what needs this scope.
        """
        authenticator = self._authenticator
        if self._generation != authenticator.generation:
            self._load(CredentialRevoked)
        if authenticator.now() >= self._expires_at:
            raise CredentialExpired("this API key or token has expired")
        if needed not in self.key.scopes:
            raise InsufficientScope(needed, self.key.scopes)
        return self.tenant

    def _load(self, mismatch: type[BadRequest]) -> None:
        """Look the credential up; raises `mismatch` if the certificate is of another tenant."""
        self.tenant = self._find()
        assert self.tenant.key
        self.key: ApiKey = self.tenant.key
        if not is_in_networks(self._origin.address, self.key.networks):
            raise AddressNotAllowed(self._origin.address)
        if self._authenticator.has_foreign_certificate(self.tenant.name, self._origin):
            raise mismatch("the API key and the client certificate are of different tenants")
        self._expires_at = math.inf if self.key.expires_at is None else self.key.expires_at
        self._generation = self._authenticator.generation


class Authenticator:
    """Finds the principal of a credential: a key of the configuration, a managed key, or a token.

    `now` returns epoch seconds. Without a pepper managed keys are refused. With `refuses_weak`
    keys that could be guessed are unknown.
    """

    def __init__(
        self,
        tenants: Tenants,
        keys: Keys,
        pepper: Pepper | None,
        providers: Iterable[IdentityProvider],
        now: Callable[[], float],
        *,
        refuses_weak: bool,
    ) -> None:
        self._tenants, self._keys, self._pepper = tenants, keys, pepper
        self._providers = {each.issuer: each for each in providers}
        self._refuses_weak, self.now = refuses_weak, now
        self.generation = 0  # counts changes of tenants, keys and denials
        tenants.on_change(self._notice_change)
        keys.on_change(self._notice_change)

    def _notice_change(self) -> None:
        self.generation += 1

    def authenticate_certificate(self, origin: ClientOrigin) -> Principal:
        """Return the principal that a client's certificate alone stands for.

        Raises `Unauthenticated` if no tenant lists it, `Forbidden` if several do.
        """
        holders = self._tenants.find_certificate_holders(origin.identities)
        if not holders:
            hint = "; no tenant lists this client certificate" if origin.identities else ""
            raise Unauthenticated(f"no API key: send `Authorization: Bearer <key>`{hint}")
        if len(holders) > 1:
            raise Forbidden("the names of this client certificate are of different tenants")
        return Principal(self, lambda: self._find_by_certificate(origin), origin)

    def has_foreign_certificate(self, tenant: str, origin: ClientOrigin) -> bool:
        """Return True if the client's certificate stands for another tenant."""
        return bool(self._tenants.find_certificate_holders(origin.identities) - {tenant})

    async def authenticate(self, credential: str, origin: ClientOrigin) -> Principal:
        """Return the principal of an API key or token.

        Raises `Unauthenticated` for one that is not known, or the subclass that says why it is not
        accepted; `AddressNotAllowed` if it may not be used from there, `Forbidden` beside a
        certificate of another tenant; `IssuerUnreachable` if the keys of a token's issuer cannot be
        had. Comparing takes the same time for all wrong keys.
        """
        if self.takes_as_token(credential):
            token = await self._verify_token(credential)
            find = partial(self._find_by_token, token)
            principal = Principal(self, find, origin, token.subject)
        elif parts := KeyText.parse(credential):
            record = self._find_sealed(parts)
            principal = Principal(self, lambda: self._find_by_id(record.id), origin)
        else:
            digest = hash_key(credential)
            if self._tenants.find_key_holder(digest) is None:
                raise Unauthenticated(_describe_unknown(credential))
            principal = Principal(self, lambda: self._find_by_hash(digest), origin)
        if self.now() >= principal.expires_at:
            raise CredentialExpired("this API key or token has expired")
        return principal

    def takes_as_token(self, credential: str) -> bool:
        """Return True if a credential is judged as a token: nobody can guess one by trying."""
        return bool(self._providers) and is_token(credential)

    async def _verify_token(self, token: str) -> VerifiedToken:
        provider = self._providers.get(read_issuer(token))
        if provider is None:
            raise TokenRefused("the issuer of this token is not one that is configured here")
        return await provider.verify(token, self.now())

    def _find_sealed(self, parts: KeyText) -> ManagedKey:
        """Return the record of a key whose secret is right."""
        if self._pepper is None:
            raise Unauthenticated(
                "no managed keys are taken here: this service was given no pepper"
            )
        record = self._keys.get(parts.id)
        if record is None:
            raise Unauthenticated("this API key is not known")
        if record.pepper != self._pepper.fingerprint:
            raise Unauthenticated("this API key was made under another pepper: create a new one")
        if not hmac.compare_digest(record.seal, self._pepper.seal(parts.id, parts.secret)):
            raise Unauthenticated("this API key is not known")
        return record

    def _find_by_hash(self, digest: str) -> Tenant:
        tenant = self._tenants.find_key_holder(digest)
        if tenant is None:
            raise CredentialRevoked("this API key, or its tenant, was removed")
        if self._refuses_weak and tenant.key and tenant.key.is_weak:
            raise Unauthenticated("this API key could be guessed: it works on loopback alone")
        return tenant

    def _find_by_id(self, id: str) -> Tenant:
        record = self._keys.get(id)
        if record is None or record.revoked_at is not None:
            raise CredentialRevoked("this API key was revoked")
        if record.is_disabled:
            raise CredentialRevoked("this API key is disabled for now")
        return self._find_tenant(record)

    def _find_by_certificate(self, origin: ClientOrigin) -> Tenant:
        holders = self._tenants.find_certificate_holders(origin.identities)
        if len(holders) != 1:
            raise CredentialRevoked("no tenant, or several, list this client certificate now")
        return self._find_tenant(ApiKey(tenant=holders.pop(), name="certificate"))

    def _find_by_token(self, token: VerifiedToken) -> Tenant:
        if self._keys.is_denied(token.issuer, token.subject, token.token_id, token.issued_at):
            raise CredentialRevoked("this token was revoked")
        return self._find_tenant(token.key)

    def _find_tenant(self, key: ApiKey) -> Tenant:
        tenant = self._tenants.get(key.tenant)
        if tenant is None:
            raise CredentialRevoked("the tenant of this credential does not exist")
        return tenant.model_copy(update={"key": key})


def _describe_unknown(credential: str) -> str:
    if credential.startswith(PREFIX):
        return "this API key is not whole: its checksum does not match"
    return "this API key is not known"
