"""Authenticates callers of the admin API over HTTP, by own keys, managed keys, and tokens."""

import hmac
import time
from dataclasses import replace

from admin.caller import Caller
from api.authentication.authenticator import Authenticator, ClientOrigin
from api.wrong_keys import WrongKeyLimiter
from registry.credentials.key_format import KeyText
from registry.tenants import hash_key
from streams.errors import CredentialExpired, CredentialRevoked, Unauthenticated


class AdminKeys:
    """Finds the holder of a key; slows addresses from which wrong keys come.

    `keys` has the names of the holders of this process's own keys, by key in clear text; only
    hashes are kept. They may do everything. `managed` judges managed keys and tokens, whose scopes
    decide.
    """

    def __init__(self, keys: dict[str, str], managed: Authenticator) -> None:
        self._holders = {hash_key(key): Caller(name) for key, name in keys.items()}
        self._managed = managed
        self._wrong_keys = WrongKeyLimiter()

    async def authenticate(self, key: str | None, address: str) -> Caller:
        """Return a key's holder as it is now, whatever their scopes are.

        A holder of a managed key is named by the key's id, that of a token by its provider and
        subject. The time that this takes says nothing
        about the keys. Raises `Unauthenticated` for no key or an unknown one, or the subclass that
        says why it works no more; `AddressNotAllowed` if it may not be used from `address`, and
        `TooManyWrongKeys` if too many wrong ones came from there.
        """
        if not key:
            raise Unauthenticated("no key: send `Authorization: Bearer <key>`")
        digest, now = hash_key(key), time.monotonic()
        self._wrong_keys.check(address, digest, now)
        try:
            caller = self._find_own(digest) or await self._find_managed(key, address)
        except (CredentialExpired, CredentialRevoked):
            raise  # nobody guesses these
        except Unauthenticated:
            if not self._managed.takes_as_token(key):
                self._wrong_keys.record_wrong(address, digest, now)
            raise
        self._wrong_keys.record_right(address, digest)
        return replace(caller, address=address)

    def _find_own(self, digest: str) -> Caller | None:
        found = [who for own, who in self._holders.items() if hmac.compare_digest(own, digest)]
        return found[0] if found else None

    async def _find_managed(self, key: str, address: str) -> Caller:
        if KeyText.parse(key) is None and not self._managed.takes_as_token(key):
            raise Unauthenticated(self._describe_unknown())
        principal = await self._managed.authenticate(key, ClientOrigin(address))
        return Caller(principal.holder, principal.key.scopes)

    def _describe_unknown(self) -> str:
        if self._holders:
            return "this key does not open the admin API"
        return (
            "this admin service has no key of its own: set MILLSTREAM_ADMIN_KEY or "
            "--admin-key-file, or send a managed key"
        )
