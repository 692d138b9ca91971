"""An identity provider's public keys, from the JSON of its key set (RFC 7517). Pure."""

import json
from collections import defaultdict
from typing import Any

from jwt import PyJWK
from jwt.exceptions import PyJWTError

MAX_KEYS, MAX_UNNAMED = 64, 4
MIN_RSA_BITS = 2048


class KeySet:
    """Public keys by their ids. A key is used for the algorithms that fit its type alone.

    Keys that cannot be read, are for encryption, or are short are left out. Several keys may have
    one id; a signature by any of them holds. Raises ValueError for what is no key set.
    """

    def __init__(self, text: bytes) -> None:
        document = json.loads(text)
        found = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(found, list) or len(found) > MAX_KEYS:
            raise ValueError(f"a key set is an object with a list of at most {MAX_KEYS} `keys`")
        self._keys = defaultdict[str, list[dict[str, Any]]](list)
        for each in found:
            if isinstance(each, dict) and isinstance(each.get("kid"), str) and _signs(each):
                self._keys[each["kid"]].append(each)

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._keys)

    def has(self, kid: str) -> bool:
        """Return True if there is a key with this id."""
        return kid in self._keys

    def find(self, kid: str | None, algorithm: str) -> list[PyJWK]:
        """Return the keys with this id that can verify a signature of this algorithm.

        For a token that names no key (None) these are all, but at most `MAX_UNNAMED`.
        """
        ids = [kid] if kid is not None else [*self._keys]
        named = (each for id in ids for each in self._keys.get(id, ()))
        found = [key for each in named if (key := _read(each, algorithm))]
        return found if kid is not None else found[:MAX_UNNAMED]


def _signs(key: dict[str, Any]) -> bool:
    operations = key.get("key_ops")
    can_verify = not isinstance(operations, list) or "verify" in operations
    return key.get("use", "sig") == "sig" and can_verify and key.get("kty") in ("RSA", "EC", "OKP")


def _read(key: dict[str, Any], algorithm: str) -> PyJWK | None:
    if key.get("alg", algorithm) != algorithm:
        return None
    public = {name: value for name, value in key.items() if name != "d"}
    try:
        found = PyJWK.from_dict(public, algorithm)
    except (PyJWTError, ValueError, TypeError):
        return None
    is_short = found.key_type == "RSA" and found.key.key_size < MIN_RSA_BITS
    return None if is_short else found
