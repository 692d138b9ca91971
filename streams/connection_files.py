"""Paths of the files by which a process shows NATS who it is, and knows its servers. Pure."""

from dataclasses import dataclass
from pathlib import Path

from streams.errors import BrokerMisconfigured


class InvalidConnectionFiles(BrokerMisconfigured, ValueError):
    """Files that exclude each other, or of which another one is missing."""


@dataclass(frozen=True)
class ConnectionFiles:
    """Paths of the files that a connection needs; None where it needs none.

    `creds` has a user's token and seed, `nkey` a seed alone. `ca` has the certificates by which
    servers are known, in PEM, `cert` and `key` what this process shows them. With any of these
    three, the connection is encrypted. Raises `InvalidConnectionFiles`.
    """

    creds: Path | None = None
    nkey: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.creds and self.nkey:
            raise InvalidConnectionFiles("give --nats-creds or --nats-nkey, not both")
        if (self.cert is None) != (self.key is None):
            raise InvalidConnectionFiles("--nats-cert and --nats-key are given together or not")

    @property
    def identity(self) -> Path | None:
        """The file that says who this process is."""
        return self.creds or self.nkey

    @property
    def encrypts(self) -> bool:
        """True if the connection is to be encrypted."""
        return bool(self.ca or self.cert)

    @property
    def all(self) -> tuple[Path, ...]:
        """The files that are given."""
        given = (self.creds, self.nkey, self.ca, self.cert, self.key)
        return tuple(path for path in given if path)


NO_FILES = ConnectionFiles()
