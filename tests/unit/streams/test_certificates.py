"""Certificates that OpenSSL accepts for what they are made for, and the names in them."""

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from streams.certificate_files import (
    certificate_file,
    key_file,
    read_certified_key,
    write_certified_key,
)
from streams.certificates import find_identities, issue_client, issue_server, make_authority
from tests.support.certificates import CertificateAuthority

NOW = datetime.now(UTC)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """The server's end of a connection, after a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    return ends[1]


def server_context(authority: CertificateAuthority, *hosts: str) -> ssl.SSLContext:
    files = authority.make_server(*hosts)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@pytest.mark.parametrize("host", ["gateway.example", "10.0.0.7", "::1"])
def test_a_server_is_trusted_under_its_names_alone(tmp_path: Path, host: str) -> None:
    authority = CertificateAuthority(tmp_path)
    server, client = server_context(authority, host), authority.client_context()
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert shake_hands(server, client, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "other.example")


def test_a_client_is_known_by_all_its_names(tmp_path: Path) -> None:
    """As `getpeercert` tells them, which a tenant's settings are compared with."""
    authority = CertificateAuthority(tmp_path)
    client = authority.client_context("acme", "spiffe://cell/acme", "urn:uuid:1")
    end = shake_hands(server_context(authority, "localhost"), client, "localhost")
    found = find_identities(end.getpeercert() or {})
    assert found == ("spiffe://cell/acme", "urn:uuid:1", "CN:acme")


def test_a_host_name_is_in_lower_case_and_an_address_is_no_identity() -> None:
    names = (("DNS", "Worker.Example"), ("IP Address", "10.0.0.1"), ("email", "a@b"))
    assert find_identities({"subjectAltName": names}) == ("DNS:worker.example",)
    assert find_identities({}) == ()


def test_a_clients_certificate_cannot_serve(tmp_path: Path) -> None:
    """Else a tenant's key would open the way to pass as the gateway."""
    authority = CertificateAuthority(tmp_path)
    authority.client_context("gateway")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_file(tmp_path, "gateway"), key_file(tmp_path, "gateway"))
    client = authority.client_context()
    client.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake_hands(server, client, "gateway")


def test_it_is_valid_from_an_hour_ago_for_so_many_days() -> None:
    authority = make_authority("ca", NOW)
    pair = issue_server(authority, ["a.example"], NOW, days=2)
    found = x509.load_pem_x509_certificate(pair.certificate)
    assert found.not_valid_after_utc == (NOW + timedelta(days=2)).replace(microsecond=0)
    assert found.not_valid_before_utc == (NOW - timedelta(hours=1)).replace(microsecond=0)


def test_a_server_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="host name"):
        issue_server(make_authority("ca", NOW), [], NOW)


def test_a_key_is_its_owners_alone_and_in_no_text(tmp_path: Path) -> None:
    pair = issue_client(make_authority("ca", NOW), "acme", NOW)
    write_certified_key(tmp_path / "new", "acme", pair)
    write_certified_key(tmp_path / "new", "acme", pair)
    assert stat.S_IMODE((tmp_path / "new/acme-key.pem").stat().st_mode) == 0o600
    assert read_certified_key(tmp_path / "new", "acme") == pair
    assert read_certified_key(tmp_path, "acme") is None
    assert "PRIVATE" not in repr(pair)
