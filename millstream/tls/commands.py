"""The command `millstream tls init`, which makes certificates or renews them."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

from millstream.tls.settings import TlsInitSettings
from streams.certificate_files import (
    AUTHORITY,
    certificate_file,
    key_file,
    open_authority,
    write_certified_key,
    write_server,
)
from streams.certificates import issue_client
from streams.errors import MillstreamError

SERVER = "server"


class CertificatesNotMade(MillstreamError):
    """The certificates cannot be written, or the authority that is there cannot be used."""


async def init(settings: TlsInitSettings, stop: asyncio.Event) -> None:
    """Make the certificates that the settings name, by the directory's authority or a new one.

    A gateway that serves with them takes the new ones while it runs. Raises `CertificatesNotMade`.
    """
    directory = settings.directory.expanduser()
    try:
        files = _make_files(directory, settings)
    except OSError as error:
        raise CertificatesNotMade(
            f"cannot write certificates into {directory}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CertificatesNotMade(
            f"cannot sign with {certificate_file(directory, AUTHORITY)}: {error}"
        ) from error
    print(json.dumps(files) if settings.as_json else _render(files, settings.client))


def _make_files(directory: Path, settings: TlsInitSettings) -> dict[str, str]:
    """Write the certificates; return the paths by what they are for."""
    now = datetime.now(UTC)
    authority = open_authority(directory, now)
    write_server(directory, SERVER, settings.host, now, settings.days)
    files = {
        "ca": certificate_file(directory, AUTHORITY),
        "tls_cert": certificate_file(directory, SERVER),
        "tls_key": key_file(directory, SERVER),
    }
    for name in settings.client:
        uris = (f"spiffe://millstream/{name}",)
        file_name = f"client-{name}"
        write_certified_key(
            directory, file_name, issue_client(authority, name, now, settings.days, uris)
        )
        files |= {
            f"{name}_cert": certificate_file(directory, file_name),
            f"{name}_key": key_file(directory, file_name),
        }
    return {what: str(path.resolve()) for what, path in files.items()}


def _render(files: dict[str, str], clients: tuple[str, ...]) -> str:
    lines = [
        f"millstream up --tls-cert {files['tls_cert']} --tls-key {files['tls_key']}",
        f"export SSL_CERT_FILE={files['ca']}   # for clients: curl, Python",
    ]
    for name in clients:
        lines += [
            f'[tenants.{name}] certificates = ["spiffe://millstream/{name}"]   # with '
            f"--tls-client-ca {files['ca']}",
            f"curl --cert {files[f'{name}_cert']} --key {files[f'{name}_key']}",
        ]
    return "\n".join(lines)
