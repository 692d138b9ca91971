"""A certificate authority of one test, and the certificates that it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files in PEM: a certificate and its private key."""

    cert: Path
    key: Path


class CertificateAuthority:
    """Signs certificates for 127.0.0.1 and writes them to a folder; `ca` is its own file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        own = _begin(self._name, self._name, self._key).add_extension(constraints, critical=True)
        self.text = _pem(own.sign(self._key, hashes.SHA256()))
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self.text)

    def issue(self, name: str, host: str = "127.0.0.1") -> Certificate:
        """Write a certificate of this name and its key; those that are there are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        unsigned = _begin(_name(name), self._name, key).add_extension(hosts, critical=False)
        found = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        found.cert.write_bytes(_pem(unsigned.sign(self._key, hashes.SHA256())))
        found.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return found


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
