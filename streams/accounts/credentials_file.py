"""Credentials files: a user's token and seed, in the form that all NATS clients and nsc read.

Whoever can read such a file is that user. nats-py reads one only with two packages more, and tells
nothing of what is wrong with it.
"""

import base64
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from streams.accounts.claims_token import Claims, InvalidClaims, decode
from streams.accounts.nkeys import InvalidKey, KeyKind, KeyPair
from streams.accounts.private_file import write_whole
from streams.errors import BrokerMisconfigured

_PART = re.compile(r"-{3,}BEGIN [^-\n]+-{3,}\s*(?P<text>[^\s-][^\s]*)\s*-{3,}END [^-\n]+-{3,}")
_REMEDY = "`millstream broker user` writes new ones"
_FORM = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

************************* IMPORTANT *************************
Whoever can read this file is this user: keep it to yourself.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class InvalidCredentials(BrokerMisconfigured):
    """A credentials file cannot be used; the message names the file, the reason and the remedy."""

    def __init__(self, source: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"the NATS credentials in {os.fspath(source)} {reason}; {_REMEDY}")


@dataclass(frozen=True)
class UserCredentials:
    """Credentials of a user: a token that others signed, and the key to sign a nonce with.

    `name` and `user` (the public key) say who it is, `account` whose user it is.
    """

    token: str = field(repr=False)
    key: KeyPair = field(repr=False)
    name: str
    account: str
    issued_at: int
    expires_at: int | None

    @property
    def inbox_prefix(self) -> str:
        """The prefix of the user's inboxes: it may subscribe to no others."""
        return f"_INBOX.{self.name}"

    @property
    def user(self) -> str:
        """The public key of the user."""
        return self.key.public

    def user_jwt(self) -> bytes:
        """The token, as nats-py's `user_jwt_cb` wants it."""
        return self.token.encode()

    def sign_nonce(self, nonce: str) -> bytes:
        """The signature of a server's nonce in base64, as nats-py's `signature_cb` wants it."""
        return base64.b64encode(self.key.sign(nonce.encode()))

    def text(self) -> str:
        """The text of a credentials file."""
        return _FORM.format(token=self.token, seed=self.key.seed)


def read_credentials(path: str | os.PathLike[str], now: float) -> UserCredentials:
    """Read a credentials file; `now` is the time by this machine's clock, in seconds.

    Raises `InvalidCredentials` if it cannot be read, is malformed, holds a token and a seed of two
    users, or has expired.
    """
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError:
        raise InvalidCredentials(path, "are no text") from None
    except OSError as error:
        raise InvalidCredentials(path, f"cannot be read ({error.strerror})") from error
    return parse_credentials(text, path, now)


def parse_credentials(text: str, source: str | os.PathLike[str], now: float) -> UserCredentials:
    """Read the text of a credentials file; `source` names it in errors.

    Raises `InvalidCredentials` as `read_credentials` does.
    """
    parts = [match["text"] for match in _PART.finditer(text)]
    if len(parts) != 2:
        raise InvalidCredentials(source, "are malformed: a token and a seed are wanted")
    try:
        claims, key = decode(parts[0]), KeyPair.from_seed(parts[1], KeyKind.USER)
    except (InvalidClaims, InvalidKey) as error:
        raise InvalidCredentials(source, f"are malformed: {error}") from error
    if claims["nats"].get("type") != "user":
        raise InvalidCredentials(source, "are malformed: the token is not that of a user")
    if claims.get("sub") != key.public:
        raise InvalidCredentials(source, "are foreign: the token and the seed are of two users")
    credentials = credentials_of(parts[0], claims, key)
    _check_expiry(credentials, source, now)
    return credentials


def credentials_of(token: str, claims: Claims, key: KeyPair) -> UserCredentials:
    """Return a user's token, of which these are the claims, together with its key."""
    return UserCredentials(
        token,
        key,
        name=str(claims.get("name", "")),
        account=str(claims["nats"].get("issuer_account") or claims["iss"]),
        issued_at=int(claims.get("iat", 0)),
        expires_at=int(claims["exp"]) if claims.get("exp") else None,
    )


def _check_expiry(credentials: UserCredentials, source: str | os.PathLike[str], now: float) -> None:
    expiry = credentials.expires_at
    if expiry is not None and expiry <= now:
        raise InvalidCredentials(
            source, f"expired at {_utc(expiry)} (this machine's clock says {_utc(now)})"
        )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def write_credentials(path: str | os.PathLike[str], credentials: UserCredentials) -> None:
    """Write a credentials file that its owner alone may read; replaces one that is there."""
    write_whole(Path(path), credentials.text())
