"""Checks hosts and IP addresses of remote models' URLs, however they are written. Pure.

An address can be spelled as one number, in hex or in octal, and an IPv6 address can carry an IPv4
address that a gateway on the way takes out again. Both are read here as what they reach.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
LOCALHOST = "localhost"
_PORTS = {"http": 80, "https": 443}
# Where clouds hand out a machine's credentials, beside the link-local 169.254.169.254:
# AWS and Google over IPv6, Alibaba, Azure, Oracle.
_METADATA = frozenset(
    map(
        ip_address,
        (
            "fd00:ec2::254",
            "fd20:ce::254",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
        ),
    )
)
_THIS_NETWORK = IPv4Network("0.0.0.0/8")  # Linux connects 0.0.0.0 to this machine
_BROADCAST = IPv4Address("255.255.255.255")
_SITE_LOCAL = IPv6Network("fec0::/10")
# Networks whose last four bytes are an IPv4 address: RFC 4291 (2.5.5.1 and 2.5.5.2), 6052, 7915
_IPV4_AT_END = tuple(
    map(IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
)
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # RFC 8215; the prefix's length is the network's own


def validate_url(url: str) -> str:
    """Return `url` unchanged if it is an HTTP URL without credentials, query or fragment.

    Raises ValueError with the reason otherwise: the record of the model that holds it can be read
    by anyone.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{parts.scheme or 'no'}://… is not an HTTP URL")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("the URL must have no credentials, query or fragment: anyone may read it")
    if re.search(r"[\s\\]", url):
        raise ValueError("the URL must have no blanks and no backslashes")
    if parts.port == 0:
        raise ValueError("the URL's port must be between 1 and 65535")
    return url


def host_and_port(url: str) -> tuple[str, int]:
    """Return the canonical host and the port of a URL; raises ValueError as `validate_url` does."""
    parts = urlsplit(validate_url(url))
    assert parts.hostname, "a valid URL has a host"
    return canonical_host(parts.hostname), parts.port or _PORTS[parts.scheme]


def canonical_host(host: str) -> str:
    """Return a host in lower case without the root's dot; an address in its usual spelling."""
    plain = host.lower().removesuffix(".")
    address = parse_address(plain)
    return str(address) if address else plain


def parse_address(host: str) -> Address | None:
    """Return the IP address that a host is, in any spelling that resolvers take; None for a name.

    IPv4 addresses may have one to four parts, each decimal, octal (`0…`) or hexadecimal (`0x…`), as
    with inet_aton. The zone of an IPv6 address (`%eth0`) is left out.
    """
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return _parse_inet_aton(host)


def _parse_inet_aton(host: str) -> IPv4Address | None:
    """Read an IPv4 address whose last part fills all bytes that the parts before it leave."""
    try:
        *first, last = [_parse_number(part) for part in host.split(".")]
    except ValueError:
        return None
    rest = 4 - len(first)
    if rest < 1 or any(part > 255 for part in first) or last >= 256**rest:
        return None
    return IPv4Address(bytes(first) + last.to_bytes(rest, "big"))


def _parse_number(text: str) -> int:
    """Read a number as C does: `0x` is hexadecimal, a leading 0 octal; raises ValueError."""
    if not re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]+", text):
        raise ValueError(f"no number: {text!r}")
    is_octal = len(text) > 1 and text[0] == "0" and text[1].isdigit()
    return int(text, 8 if is_octal else 0)


def is_loopback(address: Address) -> bool:
    """Return whether an address, or the IPv4 address that it is mapped from, is this machine's."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_public(address: Address) -> bool:
    """Return whether an address, and any IPv4 address that it carries, is of the public internet.

    Private, shared, loopback, link-local, reserved and multicast addresses are not.
    """
    return all(
        each.is_global and not each.is_multicast and not _find_own_danger(each)
        for each in _with_embedded(address)
    )


def find_danger(address: Address) -> str | None:
    """Return why no model server may be called at `address`; None if one may.

    The reason is a noun phrase, such as `a link-local address`. Addresses of private networks are
    no danger by themselves: the host must be one that the worker's settings name.
    """
    return next(filter(None, map(_find_own_danger, _with_embedded(address))), None)


def _find_own_danger(address: Address) -> str | None:
    if address in _METADATA:
        return "a cloud's metadata address"
    if address.is_link_local or (isinstance(address, IPv6Address) and address in _SITE_LOCAL):
        return "a link-local address, where clouds serve metadata"
    if address.is_multicast or address == _BROADCAST:
        return "a multicast address"
    if address.is_unspecified or (isinstance(address, IPv4Address) and address in _THIS_NETWORK):
        return "the unspecified address"
    return None


def _with_embedded(address: Address) -> list[Address]:
    """The address and those IPv4 addresses to which gateways would translate it.

    `::` and `::1` are themselves, though they lie in the old range of IPv4-compatible addresses.
    """
    if isinstance(address, IPv4Address) or address.is_unspecified or address.is_loopback:
        return [address]
    packed, found = address.packed, list[Address]()
    if any(address in network for network in _IPV4_AT_END):
        found.append(IPv4Address(packed[12:]))
    if address in _LOCAL_NAT64:
        found += [IPv4Address(packed[6:8] + packed[9:11]), IPv4Address(packed[12:])]
    if address.sixtofour:
        found.append(address.sixtofour)
    if address.teredo:
        found += address.teredo
    return [address, *found]
