"""The gateway's certificate: what new connections get, loaded anew when its files change.

A new certificate that cannot be used leaves the old one in use. Dates of certificates are compared
with this machine's clock, as those of clients are.
"""

import asyncio
import os
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import structlog
from cryptography import x509

from gateway.metrics import CERTIFICATE_NOT_AFTER, CERTIFICATE_RELOADS
from streams.base_settings import ClientAuth, TlsSettings
from streams.errors import MillstreamError

log = structlog.get_logger()

POLL_SECONDS = 1.0  # files that have been the same for so long, and new, are loaded
WARNING_SECONDS = 24 * 3600.0  # between warnings about a certificate that will expire
EXPIRES_SOON = timedelta(days=14)  # or a third of its time, for one that is renewed more often
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all good
Fingerprint = tuple[tuple[int, ...], ...]


class CertificateUnusable(MillstreamError):
    """The gateway cannot serve TLS with the files that it was given; the sentence says why."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of certificate, key and clients' authorities; whether clients need a certificate."""

    certificate: Path
    key: Path
    client_authorities: Path | None = None
    client_auth: ClientAuth = "optional"

    @classmethod
    def from_settings(cls, settings: TlsSettings) -> Self | None:
        """Return the files of the settings; None if they name no certificate."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(
            settings.tls_cert.expanduser(),
            settings.tls_key.expanduser(),
            settings.tls_client_ca.expanduser() if settings.tls_client_ca else None,
            settings.tls_client_auth,
        )

    def fingerprint(self) -> Fingerprint:
        """Return what changes when one of the files is replaced, or its rights are changed."""
        files = (self.certificate, self.key, self.client_authorities)
        return tuple(_file_fingerprint(file) for file in files if file)


@dataclass(frozen=True)
class LoadedCertificate:
    """A TLS context with the serial number and the dates of its certificate."""

    context: ssl.SSLContext
    serial: str
    not_before: datetime
    not_after: datetime

    def expires_soon(self, now: datetime) -> bool:
        """True if the certificate should have been renewed by now."""
        lifetime = self.not_after - self.not_before
        return self.not_after - now < min(EXPIRES_SOON, lifetime / 3)


class ServerCertificate:
    """The certificate for new connections; `run` keeps it as its files are.

    Connections that are open keep the one with which they began. The constructor loads the files,
    and raises `CertificateUnusable`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._fingerprint = files.fingerprint()
        self._use(load_certificate(files, datetime.now(UTC)))

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context for a new connection."""
        return self._loaded.context

    async def run(self) -> None:
        """Load the files again after each change, and warn daily before the certificate expires.

        Runs until it is cancelled, and raises nothing: a failure is logged and counted.
        """
        seen = self._fingerprint
        next_warning = 0.0
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= next_warning and self._warn_of_expiry():
                next_warning = loop.time() + WARNING_SECONDS
            await asyncio.sleep(POLL_SECONDS)
            before, seen = seen, await asyncio.to_thread(self._files.fingerprint)
            if seen == before and seen != self._fingerprint:  # not while it is being written
                self._fingerprint = seen
                await self._reload()

    async def _reload(self) -> None:
        try:
            loaded = await asyncio.to_thread(load_certificate, self._files, datetime.now(UTC))
        except CertificateUnusable as error:
            log.error("tls_certificate_rejected", reason=str(error), in_use=self._loaded.serial)
            CERTIFICATE_RELOADS.labels("rejected").inc()
        else:
            self._use(loaded)
            CERTIFICATE_RELOADS.labels("loaded").inc()

    def _use(self, loaded: LoadedCertificate) -> None:
        self._loaded = loaded
        CERTIFICATE_NOT_AFTER.set(loaded.not_after.timestamp())
        log.info(
            "tls_certificate_loaded", serial=loaded.serial, not_after=loaded.not_after.isoformat()
        )

    def _warn_of_expiry(self) -> bool:
        """Log a warning if the certificate expires soon, or has expired; return whether it does."""
        if not self._loaded.expires_soon(datetime.now(UTC)):
            return False
        not_after = self._loaded.not_after.isoformat()
        log.warning("tls_certificate_expires", serial=self._loaded.serial, not_after=not_after)
        return True


def load_certificate(files: TlsFiles, now: datetime) -> LoadedCertificate:
    """Return the TLS context that these files make; `now` is in UTC.

    Raises `CertificateUnusable`, with the file and the reason, for files that cannot be read, that
    are no PEM or do not belong together, and for a certificate that is not valid now.
    """
    try:
        return _load(files, now)
    except OSError as error:
        raise CertificateUnusable(
            f"cannot read {error.filename or files.key} for TLS: {error.strerror}"
        ) from None


def _load(files: TlsFiles, now: datetime) -> LoadedCertificate:
    certificate = _read_first(files.certificate)
    not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not not_before <= now <= not_after:
        wrong = "expired at" if now > not_after else "is not valid before"
        date = (not_after if now > not_after else not_before).isoformat()
        raise CertificateUnusable(
            f"the TLS certificate {files.certificate} {wrong} {date}; this machine's clock says "
            f"{now.isoformat(timespec='seconds')}"
        )
    context = _make_context()
    _load_key(context, files)
    if files.client_authorities:
        _load_client_authorities(context, files.client_authorities, files.client_auth)
    return LoadedCertificate(context, f"{certificate.serial_number:x}", not_before, not_after)


def _make_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_first(file: Path) -> x509.Certificate:
    """The server's own certificate, which comes first in the file."""
    content = file.read_bytes()
    try:
        return x509.load_pem_x509_certificates(content)[0]
    except ValueError:
        raise CertificateUnusable(f"the TLS certificate {file} is not in PEM") from None


def _load_key(context: ssl.SSLContext, files: TlsFiles) -> None:
    if b"ENCRYPTED" in files.key.read_bytes():
        raise CertificateUnusable(f"the TLS key {files.key} has a passphrase: give one without")
    if files.key.stat().st_mode & stat.S_IROTH:
        log.warning("tls_key_readable_by_all", file=str(files.key))
    try:
        context.load_cert_chain(files.certificate, files.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"does not belong to the certificate {files.certificate}"
        else:
            reason = f"cannot be used with {files.certificate}: {error.reason or 'not in PEM'}"
        raise CertificateUnusable(f"the TLS key {files.key} {reason}") from None


def _load_client_authorities(context: ssl.SSLContext, file: Path, auth: ClientAuth) -> None:
    file.read_bytes()  # so that an error names the file
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise CertificateUnusable(
            f"the authorities of clients' certificates in {file} are not in PEM"
        ) from None
    is_required = auth == "required"
    context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL


def _file_fingerprint(file: Path) -> tuple[int, ...]:
    try:
        status = os.stat(file)
    except OSError as error:
        return (error.errno or 0,)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
