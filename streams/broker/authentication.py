"""Reads the files of a connection: the identity that it shows NATS, and the servers it trusts.

They are read anew for each connection and each reconnect, so that a rotated file is taken up.
"""

import os
import re
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path

import nats.errors

from streams.accounts import claims_token
from streams.accounts.access import UserClass
from streams.accounts.credentials_file import InvalidCredentials, read_credentials
from streams.accounts.minting import class_of
from streams.accounts.nkeys import InvalidKey, KeyKind, KeyPair
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerMisconfigured

RENEWED_AFTER = 0.8  # of the life of a token
_INBOX = "_INBOX"
_ONE_WORD = re.compile(r"[^\s.*>]+")  # of a subject
Fingerprint = tuple[tuple[int, int, int] | None, ...]


class InvalidCertificates(BrokerMisconfigured):
    """A file with certificates or their key cannot be used; names the file and the reason."""


class UnusableFile(nats.errors.Error):
    """A file of the connection cannot be used now; to nats-py a reason to try again."""


@dataclass(frozen=True)
class Identity:
    """Identity of a connection: a key to sign with, and for users of an account token and name.

    `expires_soon_at` is when 80 % of the token's life are over and `expires_at` when all is, in
    epoch seconds; None for what does not expire. `allowed_subscriptions` are the token's patterns;
    there are none if it says nothing of them. `user_class` is what the user is, if a cell's keys
    have made it.
    """

    key: KeyPair = field(repr=False)
    token: str | None = field(default=None, repr=False)
    name: str = ""
    expires_soon_at: float | None = None
    expires_at: float | None = None
    allowed_subscriptions: tuple[str, ...] = ()
    user_class: UserClass | None = None

    @property
    def expires_soon(self) -> bool:
        """True once 80 % of the token's life are over, by this machine's clock."""
        return self.expires_soon_at is not None and time.time() >= self.expires_soon_at


class Authentication:
    """Credentials and trust of a process, as its `files` say at the moment."""

    def __init__(self, files: ConnectionFiles) -> None:
        self.files = files

    def check(self) -> Identity | None:
        """Read all files, and return the identity; None if no file has one.

        Raises `InvalidCredentials` or `InvalidCertificates`, with the file's name and nothing of
        its content.
        """
        if self.files.encrypts:
            self._read_certificates()
        return self._read_identity()

    def identity(self) -> Identity:
        """Read the identity for a connection; there must be a file. Raises `UnusableFile`."""
        try:
            found = self._read_identity()
        except BrokerMisconfigured as error:
            raise UnusableFile(str(error)) from error
        assert found
        return found

    def ssl_context(self) -> ssl.SSLContext:
        """Read the certificates for a connection; without a CA, the system's are trusted.

        Raises `UnusableFile`.
        """
        try:
            return self._read_certificates()
        except BrokerMisconfigured as error:
            raise UnusableFile(str(error)) from error

    def fingerprint(self) -> Fingerprint:
        """Return what differs once a file has been replaced or written to."""
        return tuple(_fingerprint(path) for path in self.files.all)

    def _read_identity(self) -> Identity | None:
        if self.files.creds:
            return _read_user(self.files.creds)
        return _read_nkey(self.files.nkey) if self.files.nkey else None

    def _read_certificates(self) -> ssl.SSLContext:
        context = _trust(self.files.ca)
        if self.files.cert and self.files.key:
            _load_own(context, self.files.cert, self.files.key)
        return context


def inbox_prefix(name: str, identity: Identity | None) -> str:
    """Return what the reply subjects of a process begin with, so that nobody else hears them.

    That is `_INBOX.` and the name of its user, or of the process `name` if it shows no token; or
    what the token itself says.
    """
    for pattern in identity.allowed_subscriptions if identity else ():
        words = pattern.split(".")[:-1]
        if pattern.endswith(".>") and words[0] == _INBOX and words[1:] and "*" not in words:
            return ".".join(words)
    user = identity.name if identity else ""
    return f"{_INBOX}.{user if _ONE_WORD.fullmatch(user) else name}"


def sign(identity: Identity, nonce: str) -> bytes:
    """Return the signature of a server's nonce, in base64 as NATS wants it."""
    return b64encode(identity.key.sign(nonce.encode()))


def _read_user(path: Path) -> Identity:
    user = read_credentials(path, time.time())
    claims = claims_token.decode(user.token)["nats"]
    allowed = claims.get("sub", {}).get("allow") or ()
    soon = None
    if user.expires_at is not None:
        soon = user.issued_at + RENEWED_AFTER * (user.expires_at - user.issued_at)
    return Identity(
        user.key,
        user.token,
        user.name,
        soon,
        user.expires_at,
        tuple(allowed),
        class_of(claims.get("tags") or ()),
    )


def _read_nkey(path: Path) -> Identity:
    try:
        return Identity(KeyPair.from_seed(path.read_text(), KeyKind.USER))
    except OSError as error:
        raise InvalidCredentials(path, f"cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, InvalidKey):
        raise InvalidCredentials(path, "are malformed: the seed of a user is wanted") from None


def _trust(ca: Path | None) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    try:
        # without a text, the system's CAs would be trusted instead
        return ssl.create_default_context(cadata=ca.read_text() or " ")
    except (ssl.SSLError, UnicodeDecodeError):
        reason = "has no certificates in PEM"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    raise InvalidCertificates(f"the CA of NATS in {ca} {reason}: name its file with --nats-ca")


def _load_own(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        context.load_cert_chain(cert, key, password="")  # not one of a person at a terminal
    except ssl.SSLError as error:
        reason = f"are no certificate in PEM with its own unencrypted key ({error.reason})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    else:
        return
    raise InvalidCertificates(
        f"the client's {cert} and {key} {reason}: name them with --nats-cert and --nats-key"
    )


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
