"""What a gateway serves TLS with, and what it says of files with which it cannot."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.server.tls_certificate import (
    CertificateUnusable,
    LoadedCertificate,
    TlsFiles,
    load_certificate,
)
from gateway.settings import GatewaySettings
from streams.base_settings import TenantSettings
from tests.support.certificates import CertificateAuthority

NOW = datetime.now(UTC)
PASSPHRASE = "-----BEGIN ENCRYPTED PRIVATE KEY-----\n-----END ENCRYPTED PRIVATE KEY-----\n"


def files_in(directory: Path, **server: float) -> TlsFiles:
    authority = CertificateAuthority(directory)
    made = authority.make_server(**server)  # type: ignore[arg-type]
    return TlsFiles(made["tls_cert"], made["tls_key"], authority.file)


def replace_key(files: TlsFiles) -> None:
    CertificateAuthority(files.key.parent, "other").make_server(name="other")
    files.key.write_bytes((files.key.parent / "other-key.pem").read_bytes())


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


BROKEN: dict[str, tuple[Callable[[TlsFiles], object], str]] = {
    "no certificate": (lambda files: files.certificate.unlink(), "server.pem for TLS: No such"),
    "no key": (lambda files: files.key.unlink(), "server-key.pem for TLS: No such"),
    "a directory": (
        lambda files: replace_by_directory(files.key),
        "server-key.pem for TLS: Is a directory",
    ),
    "no PEM": (lambda files: files.certificate.write_text("x"), "certificate .* is not in PEM"),
    "half a certificate": (
        lambda files: files.certificate.write_bytes(files.certificate.read_bytes()[:200]),
        "certificate .* is not in PEM",
    ),
    "no key in PEM": (lambda files: files.key.write_text("x"), "key .* cannot be used"),
    "another key": (replace_key, "key .* does not belong to the certificate"),
    "a passphrase": (lambda files: files.key.write_text(PASSPHRASE), "key .* has a passphrase"),
    "no authorities": (
        lambda files: (files.certificate.parent / "ca.pem").write_text("x"),
        "authorities .* are not in PEM",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_cannot_serve_are_named(tmp_path: Path, what: str) -> None:
    """In a sentence that says which file, since a gateway ends with it, or keeps the old ones."""
    files = files_in(tmp_path)
    assert load_certificate(files, NOW)
    break_files, sentence = BROKEN[what]
    break_files(files)
    with pytest.raises(CertificateUnusable, match=sentence):
        load_certificate(files, NOW)


@pytest.mark.parametrize(
    ("server", "sentence"),
    [({"days": -1}, "expired at"), ({"begins_in_days": 2}, "is not valid before")],
)
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, server: dict[str, float], sentence: str
) -> None:
    """No client would take it; the clock's time is told, since it may be the one that is wrong."""
    with pytest.raises(CertificateUnusable, match=f"{sentence} 2.* clock says 2"):
        load_certificate(files_in(tmp_path, **server), NOW)


@pytest.mark.parametrize(
    ("lifetime_days", "left_days", "soon"),
    [(365, 15, False), (365, 13, True), (3, 2, False), (3, 0.9, True), (90, -1, True)],
)
def test_a_warning_comes_in_time_for_any_lifetime(
    tmp_path: Path, lifetime_days: float, left_days: float, soon: bool
) -> None:
    """Certificates of a day are renewed daily: two weeks before their end they do not exist."""
    context = load_certificate(files_in(tmp_path), NOW).context
    not_after = NOW + timedelta(days=left_days)
    loaded = LoadedCertificate(context, "1", not_after - timedelta(days=lifetime_days), not_after)
    assert loaded.expires_soon(NOW) is soon


def test_what_changes_is_noticed(tmp_path: Path) -> None:
    """Contents, rights, and a link that leads elsewhere, as Kubernetes replaces secrets."""
    files = files_in(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(files.certificate)
    seen = [TlsFiles(link, files.key).fingerprint()]

    def is_new() -> bool:
        seen.append(TlsFiles(link, files.key).fingerprint())
        return seen[-1] != seen[-2]

    assert not is_new()
    files.key.chmod(0o400)
    assert is_new()
    other = tmp_path / "other.pem"
    other.write_bytes(files.certificate.read_bytes())
    link.unlink()
    link.symlink_to(other)
    assert is_new()
    other.unlink()
    assert is_new()


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_cert": "a.pem"},
        {"tls_key": "a.pem"},
        {"tls_client_ca": "ca.pem"},
        {"tls_cert": "a.pem", "tls_key": "b.pem", "tls_client_auth": "required"},
    ],
)
def test_half_of_what_belongs_together_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="tls"):
        GatewaySettings.model_validate(settings)


@pytest.mark.parametrize("name", ["acme", "CN:", "DNS:a b", "://x", "cn:acme"])
def test_a_name_that_no_certificate_has_is_refused(name: str) -> None:
    """A typo would otherwise let nobody in, in silence."""
    with pytest.raises(ValidationError):
        TenantSettings.model_validate({"certificates": [name]})


def test_names_of_hosts_are_compared_in_lower_case() -> None:
    found = TenantSettings.model_validate({"certificates": ["DNS:A.Example", "CN:A", "urn:A"]})
    assert found.certificates == ("DNS:a.example", "CN:A", "urn:A")
