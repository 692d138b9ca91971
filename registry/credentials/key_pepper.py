"""The pepper: a secret of the cell, kept outside the broker, under which managed keys are sealed.

Whoever reads or writes the bucket of keys without it can neither test guesses nor seal a key of
their own. A pepper that is lost cannot be had back: all managed keys must be made anew.
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from streams.errors import MillstreamError

MIN_BYTES = 32
_FINGERPRINT_DIGITS = 8


class PepperUnreadable(MillstreamError):
    """The file of the pepper cannot be read, or what is in it is too short."""


@dataclass(frozen=True)
class Pepper:
    """The pepper of one cell, the same for all gateways and admin services."""

    secret: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Name this pepper without telling it, so that a record says by which it was sealed."""
        return self._digest(b"fingerprint")[:_FINGERPRINT_DIGITS]

    def seal(self, id: str, secret: str) -> str:
        """Return the HMAC-SHA256 (hex) of a key's id and secret, which its record keeps."""
        return self._digest(f"key\0{id}\0{secret}".encode())

    def _digest(self, message: bytes) -> str:
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


def read_pepper(file: Path) -> Pepper:
    """Return the pepper in a file, without white space around it; `~` is expanded.

    Raises `PepperUnreadable` if the file cannot be read or holds fewer than 32 bytes.
    """
    file = file.expanduser()
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise PepperUnreadable(
            f"cannot read the pepper of API keys in {file}: {error.strerror}"
        ) from None
    if len(secret) < MIN_BYTES:
        raise PepperUnreadable(
            f"the pepper of API keys in {file} has {len(secret)} bytes, it needs {MIN_BYTES}: "
            "`openssl rand -hex 32` makes one"
        )
    return Pepper(secret)
