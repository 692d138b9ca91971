"""A NATS operator of a test's own: accounts and users as JWTs, made here and signed by ed25519."""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_OPERATOR, _ACCOUNT, _USER = 14 << 3, 0, 20 << 3  # first bytes of public keys
_NO_LIMIT = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
_JETSTREAM = ("mem_storage", "disk_storage", "streams", "consumer")


class MintingKey:
    """A key pair that signs JWTs; `public` is its name as NATS writes it."""

    def __init__(self, kind: int) -> None:
        self._key = Ed25519PrivateKey.generate()
        raw = bytes([kind]) + self._key.public_key().public_bytes_raw()
        self.public = _base32(raw + _crc16(raw).to_bytes(2, "little"))

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def mint(self, subject: str, kind: str, **claims: Any) -> str:
        """A JWT about `subject`."""
        body: dict[str, Any] = {"iat": int(time.time()), "iss": self.public, "sub": subject}
        body |= {"name": kind, "nats": {"type": kind, "version": 2, **claims}}
        body["jti"] = _base32(hashlib.sha256(json.dumps(body).encode()).digest())
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_base64url(json.dumps(part).encode()) for part in (head, body))
        return f"{signed}.{_base64url(self.sign(signed.encode()))}"


class MintedAccounts:
    """An operator with a system account and stores, which are accounts with JetStream."""

    def __init__(self, stores: Sequence[str]) -> None:
        self._operator, self._system = MintingKey(_OPERATOR), MintingKey(_ACCOUNT)
        self._stores = {name: MintingKey(_ACCOUNT) for name in stores}

    def key(self, store: str) -> str:
        """The public key of a store, which is also the name of its folder."""
        return self._stores[store].public

    def write_configuration(self, path: Path, store_dir: Path) -> Path:
        """A configuration for one server whose streams are in `store_dir`."""
        system = self._system.public
        operator = self._operator.mint(
            self._operator.public, "operator", system_account=self._system.public
        )
        claims = {system: self._account(system, jetstream=False)}
        claims |= {
            each.public: self._account(each.public, jetstream=True)
            for each in self._stores.values()
        }
        preload = ", ".join(f'{public}: "{jwt}"' for public, jwt in claims.items())
        path.write_text(
            f'jetstream {{ store_dir: "{store_dir}" }}\n'
            f'operator: "{operator}"\nsystem_account: {system}\n'
            f"resolver: MEMORY\nresolver_preload: {{ {preload} }}\n"
        )
        return path

    def _account(self, public: str, *, jetstream: bool) -> str:
        limits: dict[str, Any] = dict.fromkeys(_NO_LIMIT + _JETSTREAM * jetstream, -1)
        return self._operator.mint(public, "account", limits={**limits, "wildcards": True})

    def user(self, store: str) -> dict[str, Callable[..., bytes]]:
        """What `nats.connect` takes to enter a store."""
        key = MintingKey(_USER)
        jwt = self._stores[store].mint(key.public, "user", subs=-1, data=-1, payload=-1)
        return {
            "user_jwt_cb": jwt.encode,
            "signature_cb": lambda nonce: base64.b64encode(key.sign(nonce.encode())),
        }


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _base32(data: bytes) -> str:
    return base64.b32encode(data).rstrip(b"=").decode()


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = ((crc << 1) ^ 0x1021) & 0xFFFF if crc & 0x8000 else (crc << 1) & 0xFFFF
    return crc
