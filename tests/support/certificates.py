"""A certificate authority of a test: files of servers, and files or TLS contexts of clients."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from streams.certificate_files import certificate_file, key_file, write_certified_key
from streams.certificates import issue_client, issue_server, make_authority

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Certificate:
    """Files in PEM: a certificate and its private key."""

    cert: Path
    key: Path


class CertificateAuthority:
    """An authority whose certificates lie in one directory; another name makes another one."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory, self.name = directory, name
        self.pair = make_authority(f"Test {name}", datetime.now(UTC))
        write_certified_key(directory, name, self.pair)
        self.file = certificate_file(directory, name)

    def make_server(
        self,
        *hosts: str,
        days: float = 1,
        begins_in_days: float = 0,
        name: str = "server",
    ) -> dict[str, Any]:
        """Write a server's certificate; return the gateway's settings for it."""
        now = datetime.now(UTC) + timedelta(days=begins_in_days)
        write_certified_key(
            self.directory, name, issue_server(self.pair, hosts or HOSTS, now, days)
        )
        return {
            "tls_cert": certificate_file(self.directory, name),
            "tls_key": key_file(self.directory, name),
        }

    def issue(self, name: str, host: str = "127.0.0.1") -> Certificate:
        """Write a certificate, for a server or a client; those of this name are replaced."""
        issued = issue_server(self.pair, [host], datetime.now(UTC), days=1)
        write_certified_key(self.directory, name, issued)
        return Certificate(certificate_file(self.directory, name), key_file(self.directory, name))

    def server_words(self) -> list[str]:
        """The options of a command that serves with a new certificate."""
        files = self.make_server()
        return ["--tls-cert", str(files["tls_cert"]), "--tls-key", str(files["tls_key"])]

    def client_context(
        self, name: str = "", *uris: str, days: float = 1, trusts: Path | None = None
    ) -> ssl.SSLContext:
        """A client that trusts this authority, or another; with a certificate if it has a name."""
        context = ssl.create_default_context(cafile=trusts or self.file)
        if name:
            pair = issue_client(self.pair, name, datetime.now(UTC), days, uris)
            write_certified_key(self.directory, name, pair)
            context.load_cert_chain(
                certificate_file(self.directory, name), key_file(self.directory, name)
            )
        return context
