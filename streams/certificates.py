"""A certificate authority for development and tests, and the certificates that it signs.

Keys are of the curve P-256. A certificate is valid from an hour before it is made, since clocks of
machines differ. Names that a certificate may be mapped to a tenant by are read here, too. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 365
CLOCK_TOLERANCE = timedelta(hours=1)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_SIGNS_CERTIFICATES = ("key_cert_sign", "crl_sign")
_KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class CertifiedKey:
    """A certificate with its private key, both in PEM; the key has no passphrase."""

    certificate: bytes
    key: bytes = field(repr=False)


def make_authority(name: str, now: datetime, days: float = AUTHORITY_DAYS) -> CertifiedKey:
    """Return a new certificate authority, which signs itself and certificates of servers and users.

    `now` is in UTC, and the authority is valid for `days` after it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(name)
    builder = _builder(subject, subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(*_SIGNS_CERTIFICATES), critical=True)
    return _sign(builder, key, key)


def issue_server(
    authority: CertifiedKey, hosts: Iterable[str], now: datetime, days: float = CERTIFICATE_DAYS
) -> CertifiedKey:
    """Return a certificate for a server that clients reach under these host names and addresses.

    A server that connects to others of its kind, as in a NATS cluster, may show it to them as well.
    Raises `ValueError` if `hosts` is empty.
    """
    names = [_host_name(host) for host in hosts]
    if not names:
        raise ValueError("a server's certificate needs a host name or address")
    return _issue(authority, str(names[0].value), names, (_SERVER, _CLIENT), now, days)


def issue_client(
    authority: CertifiedKey,
    name: str,
    now: datetime,
    days: float = CERTIFICATE_DAYS,
    uris: Iterable[str] = (),
) -> CertifiedKey:
    """Return a client's certificate with this common name and these URIs as alternative names."""
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    return _issue(authority, name, names, (_CLIENT,), now, days)


def find_identities(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a client certificate, as tenants' settings list them.

    `certificate` is the mapping that `ssl.SSLObject.getpeercert` returns. A URI is listed as it is,
    a host name as `DNS:name`, and the subject's common name as `CN:name`; host names are in lower
    case. Names of other kinds are left out.
    """
    found = []
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "URI":
            found.append(str(value))
        elif kind == "DNS":
            found.append(f"DNS:{value.lower()}")
    for relative_name in certificate.get("subject", ()):
        found += [f"CN:{value}" for kind, value in relative_name if kind == "commonName"]
    return tuple(found)


def _issue(
    authority: CertifiedKey,
    common_name: str,
    names: Sequence[x509.GeneralName],
    usages: Iterable[x509.ObjectIdentifier],
    now: datetime,
    days: float,
) -> CertifiedKey:
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)  # `make_authority` makes no other
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_subject(common_name), issuer.subject, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_key_usage("digital_signature"), True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return _sign(builder, key, issuer_key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - CLOCK_TOLERANCE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> CertifiedKey:
    certificate = builder.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return CertifiedKey(
        certificate, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _KEY_USAGES})
