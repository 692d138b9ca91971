"""A credentials file is read as it was written, and its faults are told in a sentence."""

import stat
from pathlib import Path

import pytest

from streams.accounts.claims_token import decode, encode
from streams.accounts.credentials_file import (
    InvalidCredentials,
    UserCredentials,
    credentials_of,
    read_credentials,
    write_credentials,
)
from streams.accounts.nkeys import KeyKind, KeyPair

NOW = 1_800_000_000
ACCOUNT, USER = KeyPair.generate(KeyKind.ACCOUNT), KeyPair.generate(KeyKind.USER)


def credentials(kind: str = "user", subject: str = USER.public, **more: int) -> UserCredentials:
    claims = {"sub": subject, "name": "gw", "iat": NOW, "nats": {"type": kind}, **more}
    token = encode(claims, ACCOUNT)
    return credentials_of(token, decode(token), USER)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Only its owner can read it: whoever can is that user."""
    path = tmp_path / "gateway.creds"
    write_credentials(path, credentials())
    write_credentials(path, credentials(exp=NOW + 60))
    found = read_credentials(path, NOW)
    assert (found.name, found.user, found.account) == ("gw", USER.public, ACCOUNT.public)
    assert (found.issued_at, found.expires_at) == (NOW, NOW + 60)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_secret_is_shown(tmp_path: Path) -> None:
    """A repr lands in a log."""
    shown = repr(credentials())
    assert USER.seed not in shown
    assert credentials().token not in shown


TEXT = credentials().text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed: a token and a seed"),
        (TEXT.partition("****")[0], "malformed: a token and a seed"),
        (TEXT.replace(USER.seed, USER.seed[:-2]), "malformed: the text is no seed"),
        (TEXT.replace(USER.seed, ACCOUNT.seed), "malformed: the seed is that of an account"),
        (TEXT.replace(".", "", 1), "malformed: the text is no token"),
        (TEXT.replace(USER.seed, KeyPair.generate(KeyKind.USER).seed), "foreign"),
        (credentials(kind="account").text(), "not that of a user"),
        (credentials(exp=NOW - 3600).text(), "expired at 2027-01-15 07:00:00 UTC"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_and_the_remedy(
    tmp_path: Path, text: str, reason: str
) -> None:
    """The broker itself says no more than "Authorization Violation"."""
    path = tmp_path / "gateway.creds"
    path.write_text(text)
    with pytest.raises(InvalidCredentials, match=reason) as refused:
        read_credentials(path, NOW)
    assert str(path) in str(refused.value)
    assert "millstream broker user" in str(refused.value)
    assert USER.seed not in str(refused.value)
    assert ACCOUNT.seed not in str(refused.value)


def test_a_token_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Whoever edits a right into a token has not signed it."""
    _, body, _ = credentials().token.split(".")
    other = encode({"sub": USER.public, "nats": {"type": "user"}}, ACCOUNT).split(".")[1]
    path = tmp_path / "gateway.creds"
    path.write_text(TEXT.replace(body, other))
    with pytest.raises(InvalidCredentials, match="changed after it was signed"):
        read_credentials(path, NOW)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A missing mount is the most frequent mistake in a container."""
    for path, content in ((tmp_path / "absent", None), (tmp_path / "binary", b"\xff\xfe\x00")):
        if content:
            path.write_bytes(content)
        with pytest.raises(InvalidCredentials, match="cannot be read|are no text"):
            read_credentials(path, NOW)
