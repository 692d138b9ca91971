"""Who may use the admin API over HTTP: the holder of the key that this process was given."""

import hmac
import time

from api.wrong_keys import WrongKeyLimiter
from registry.tenants import hash_key
from streams.errors import Unauthenticated


class AdminKeys:
    """Finds the name of a key's holder; slows addresses from which wrong keys come.

    `keys` has the names of the holders, by key in clear text; only hashes are kept.
    """

    def __init__(self, keys: dict[str, str]) -> None:
        self._holders = {hash_key(key): name for key, name in keys.items()}
        self._wrong_keys = WrongKeyLimiter()

    def authenticate(self, key: str | None, address: str) -> str:
        """Return the name of a key's holder, by which log events call it.

        The time that this takes says nothing about the keys. Raises `Unauthenticated` for no key or
        an unknown one, `TooManyWrongKeys` if too many wrong ones came from `address`.
        """
        if not self._holders:
            raise Unauthenticated(
                "this admin service has no key: set MILLSTREAM_ADMIN_KEY or --admin-key-file"
            )
        if not key:
            raise Unauthenticated("no key: send `Authorization: Bearer <key>`")
        digest, now = hash_key(key), time.monotonic()
        self._wrong_keys.check(address, digest, now)
        found = [name for own, name in self._holders.items() if hmac.compare_digest(own, digest)]
        if not found:
            self._wrong_keys.record_wrong(address, digest, now)
            raise Unauthenticated("this key does not open the admin API")
        self._wrong_keys.record_right(address, digest)
        return found[0]
