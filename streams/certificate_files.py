"""Certificates and private keys as files that only their owner may read."""

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from streams.certificates import (
    CERTIFICATE_DAYS,
    CertifiedKey,
    issue_server,
    make_authority,
)

OWNER_ONLY = 0o600
AUTHORITY = "ca"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def certificate_file(directory: Path, name: str) -> Path:
    """Return the path of the certificate called `name`."""
    return directory / f"{name}.pem"


def key_file(directory: Path, name: str) -> Path:
    """Return the path of the private key of the certificate called `name`."""
    return directory / f"{name}-key.pem"


def write_certified_key(directory: Path, name: str, pair: CertifiedKey) -> None:
    """Write `NAME.pem` and `NAME-key.pem` with mode 0600, each replaced atomically.

    The directory is made if it is missing, with mode 0700. Raises `OSError`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _replace(key_file(directory, name), pair.key)
    _replace(certificate_file(directory, name), pair.certificate)


def read_certified_key(directory: Path, name: str) -> CertifiedKey | None:
    """Return the certificate called `name` with its key; None if one of them is missing.

    Raises another `OSError` if they cannot be read. The contents are not checked.
    """
    try:
        certificate = certificate_file(directory, name).read_bytes()
        return CertifiedKey(certificate, key_file(directory, name).read_bytes())
    except FileNotFoundError:
        return None


def open_authority(directory: Path, now: datetime) -> CertifiedKey:
    """Return the authority of a directory, `ca.pem` with its key, which is made if it is missing.

    `now` is in UTC. Raises `OSError`.
    """
    authority = read_certified_key(directory, AUTHORITY)
    if authority is None:
        authority = make_authority("Millstream development", now)
        write_certified_key(directory, AUTHORITY, authority)
    return authority


def write_server(
    directory: Path,
    name: str,
    hosts: Iterable[str],
    now: datetime,
    days: float = CERTIFICATE_DAYS,
) -> None:
    """Write a server's certificate, made anew by the directory's authority.

    It is for `hosts`, and for clients on the same machine. Raises `OSError`, and `ValueError` if
    the authority cannot be used.
    """
    authority = open_authority(directory, now)
    pair = issue_server(authority, (*hosts, *LOCAL_HOSTS), now, days)
    write_certified_key(directory, name, pair)


def _replace(path: Path, content: bytes) -> None:
    new_file = path.with_suffix(".new")
    new_file.unlink(missing_ok=True)
    descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with open(descriptor, "wb") as file:
        file.write(content)
    new_file.replace(path)
