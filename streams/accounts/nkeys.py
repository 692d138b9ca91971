"""NATS's keys: Ed25519 pairs in the text forms that nats-server, nsc and every client read.

A public key begins with a letter that says whose it is (O operator, A account, U user), a seed with
`S` and that letter. Both are base32 of a prefix, 32 bytes, and a CRC-16. Pure.
"""

import base64
import binascii
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from streams.errors import BrokerMisconfigured

_SEED = 18 << 3  # the letter S
_KEY_BYTES = 32


class InvalidKey(BrokerMisconfigured, ValueError):
    """A text is no key of NATS, or a key of another kind; the message has nothing of a seed."""


class KeyKind(IntEnum):
    """Whose key it is; the value is the first byte of the public key before base32."""

    ACCOUNT = 0
    OPERATOR = 14 << 3
    USER = 20 << 3


class KeyPair:
    """A private key with its public form. Nothing but `seed` shows the private key."""

    def __init__(self, kind: KeyKind, raw_seed: bytes) -> None:
        self.kind = kind
        self._raw = raw_seed
        self._private = Ed25519PrivateKey.from_private_bytes(raw_seed)
        self.public = _encode(bytes([kind]) + self._private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, kind: KeyKind) -> "KeyPair":
        """Make a new pair from the system's randomness."""
        return cls(kind, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_seed(cls, text: str, kind: KeyKind | None = None) -> "KeyPair":
        """Read a seed, such as `SUA…`; with `kind`, only one of that kind.

        Raises `InvalidKey`, whose message tells nothing of the seed.
        """
        try:
            data = _decode(text.strip())
            found = KeyKind((data[0] & 7) << 5 | data[1] >> 3)
            is_seed = data[0] & 0xF8 == _SEED and len(data) == _KEY_BYTES + 2
        except (ValueError, IndexError):
            raise InvalidKey(_NO_SEED) from None
        if not is_seed:
            raise InvalidKey(_NO_SEED)
        if kind is not None and found is not kind:
            raise InvalidKey(f"the seed is that of {_a(found)}, not of {_a(kind)}")
        return cls(found, data[2:])

    @property
    def seed(self) -> str:
        """The private key as text: whoever has it is this operator, account or user."""
        head = bytes([_SEED | self.kind >> 5, (self.kind & 31) << 3])
        return _encode(head + self._raw)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, 64 bytes."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


_NO_SEED = "the text is no seed of NATS: one has 58 characters and begins with SO, SA or SU"


def kind_of(public: str) -> KeyKind:
    """Return whose key a public key is. Raises `InvalidKey`."""
    return _public(public)[0]


def verifies(public: str, data: bytes, signature: bytes) -> bool:
    """Return whether the owner of `public` signed `data`. Raises `InvalidKey` for no public key."""
    _, raw = _public(public)
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _public(text: str) -> tuple[KeyKind, bytes]:
    try:
        data = _decode(text)
        kind = KeyKind(data[0])
    except (ValueError, IndexError):
        data, kind = b"", KeyKind.USER
    if len(data) != _KEY_BYTES + 1:
        raise InvalidKey(f"{text[:60]!r} is no public key of an operator, account or user")
    return kind, data[1:]


def _a(kind: KeyKind) -> str:
    return f"{'a' if kind is KeyKind.USER else 'an'} {kind.name.lower()}"


def _encode(data: bytes) -> str:
    checked = data + _crc16(data).to_bytes(2, "little")
    return base64.b32encode(checked).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Return what `_encode` encoded; raises ValueError for anything else."""
    data = base64.b32decode(text + "=" * (-len(text) % 8))
    body, check = data[:-2], data[-2:]
    if _crc16(body).to_bytes(2, "little") != check:
        raise ValueError("the checksum does not match")
    return body


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM, as `binascii` has it."""
    return binascii.crc_hqx(data, 0)
