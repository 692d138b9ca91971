"""Records of the bucket `keys`: managed API keys, and the deny-list for tokens. Pure."""

import hashlib
from ipaddress import ip_address, ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from registry.models import Record
from registry.tenant_records import ApiKey


def _check_network(value: str) -> str:
    """Return a network in CIDR; raises ValueError for anything else, as for set host bits."""
    return str(ip_network(value))


Network = Annotated[str, AfterValidator(_check_network)]


class ManagedKey(ApiKey):
    """A key that was created at run time; it keeps its record when it works no more.

    `seal` is `Pepper.seal` of its secret, by the pepper with the fingerprint `pepper`. Times are in
    epoch seconds. A rotated key works until it expires, beside the one that names it in
    `rotated_from`. `revoked_at` is final; a key that is disabled can be enabled again.
    """

    seal: str
    pepper: str
    created_at: float
    networks: tuple[Network, ...] = ()
    rotated_from: str | None = None
    revoked_at: float | None = None
    is_disabled: bool = False


class Denial(Record):
    """An entry of the deny-list: tokens of an issuer that are refused though their signature holds.

    It is about one token (`token_id`, the claim `jti`), about all of a subject, or about all of the
    issuer. With `not_before` (epoch seconds) only those are refused that were issued before it.
    """

    issuer: str
    subject: str | None = None
    token_id: str | None = None
    not_before: float | None = None
    created_at: float

    @model_validator(mode="after")
    def _names_one_thing(self) -> Self:
        if self.subject is not None and self.token_id is not None:
            raise ValueError("a denial is about a subject or about a token id, not both")
        return self

    @property
    def id(self) -> str:
        """The name of the entry, made of what it denies: a later one about the same replaces it."""
        return denial_id(self.issuer, self.subject, self.token_id)

    def covers(self, issued_at: float) -> bool:
        """Return True if a token that was issued then (epoch seconds) is denied."""
        return self.not_before is None or issued_at < self.not_before


def denial_id(issuer: str, subject: str | None = None, token_id: str | None = None) -> str:
    """Return the id of the deny-list's entry about an issuer, one of its subjects or tokens."""
    parts = repr((issuer, subject, token_id)).encode(errors="surrogatepass")
    return hashlib.sha256(parts).hexdigest()[:32]


def is_in_networks(address: str, networks: tuple[str, ...]) -> bool:
    """Return True if an IP address is in one of the networks (CIDR); True for no networks at all.

    An IPv4 address that is written as IPv6 (`::ffff:10.0.0.1`) counts as IPv4.
    """
    if not networks:
        return True
    try:
        found = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in ip_network(each) for each in networks)
