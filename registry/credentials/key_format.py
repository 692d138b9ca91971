"""The text of managed API keys: `ms_<id>_<secret>_<checksum>`. Pure.

The prefix and the checksum let scanners recognise a key that has leaked, and tell a mistyped key
from a wrong one without a look-up. The id is no secret: it names the key's record. The secret is of
256 bits, in base 62, and the checksum is the CRC-32 of all that comes before it.
"""

import re
import secrets
import zlib
from dataclasses import dataclass
from typing import Self

PREFIX = "ms_"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # valid in subjects
_ID_LENGTH, _SECRET_BYTES, _SECRET_LENGTH, _CHECKSUM_LENGTH = 12, 32, 43, 6
_PATTERN = re.compile(
    rf"ms_([0-9a-z]{{{_ID_LENGTH}}})_([0-9A-Za-z]{{{_SECRET_LENGTH}}})_"
    rf"([0-9A-Za-z]{{{_CHECKSUM_LENGTH}}})"
)


@dataclass(frozen=True)
class KeyText:
    """The parts of one key: the id of its record, and its secret, which is nowhere stored."""

    id: str
    secret: str

    @classmethod
    def mint(cls) -> Self:
        """Return a new key, of an id and a secret that nobody can guess."""
        id = "".join(secrets.choice(_ID_DIGITS) for _ in range(_ID_LENGTH))
        number = int.from_bytes(secrets.token_bytes(_SECRET_BYTES))
        return cls(id, _encode(number, _SECRET_LENGTH))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parts of a key; None for a text that is no whole key, as its checksum says."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            return None
        parts = cls(match[1], match[2])
        return parts if str(parts) == text else None

    def __str__(self) -> str:
        """Return the key as clients send it."""
        unchecked = f"{PREFIX}{self.id}_{self.secret}"
        return f"{unchecked}_{_encode(zlib.crc32(unchecked.encode()), _CHECKSUM_LENGTH)}"

    def __repr__(self) -> str:
        return f"KeyText({self.id!r}, …)"


def _encode(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
