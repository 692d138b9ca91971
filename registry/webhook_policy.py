"""Limits where webhooks may be sent: to public addresses, and to networks of a setting. Pure.

Tenants name the URLs, so a URL must not reach what is next to the process that calls it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from registry.upstream_addresses import (
    LOCALHOST,
    Address,
    canonical_host,
    find_danger,
    is_public,
    parse_address,
)
from streams.base_settings import Settings
from streams.errors import MillstreamError

NETWORK_SETTING = "--webhook-network"
MAX_URL = 2048
_URL = re.compile(r"[!-~]*\Z")  # what may stand in the first line of an HTTP request
_PORTS = {"http": 80, "https": 443}


class WebhookRefused(MillstreamError):
    """A webhook may not be sent to an address; the sentence is for operators."""


class WebhookTarget(NamedTuple):
    """Place to which a webhook is posted: over TLS or not, host, port and path."""

    is_tls: bool
    host: str
    port: int
    path: str


def parse_webhook_url(url: str) -> WebhookTarget:
    """Return the parts of an HTTP URL; raises ValueError with the reason if it is none.

    It has at most 2,048 printable ASCII characters, no credentials and no fragment.
    """
    if len(url) > MAX_URL or not _URL.match(url) or "\\" in url:
        raise ValueError(f"must have at most {MAX_URL} ASCII characters, without blanks")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("must begin with https:// and name a host")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("must have no credentials and no fragment")
    port = _PORTS[parts.scheme] if parts.port is None else parts.port
    if not port:
        raise ValueError("must have a port between 1 and 65535")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(parts.scheme == "https", canonical_host(parts.hostname), port, path)


@dataclass(frozen=True)
class WebhookPolicy:
    """The networks to which webhooks may be sent beside public addresses, and also without TLS."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def check_target(self, target: WebhookTarget) -> None:
        """Raise `WebhookRefused` if nothing may be sent there, as far as the URL's text tells."""
        if not target.is_tls and not self.networks:
            raise WebhookRefused(
                f"http:// is for the networks that {NETWORK_SETTING} allows, of which there are "
                "none: use https://"
            )
        host = "127.0.0.1" if _is_localhost(target.host) else target.host
        if parse_address(host):
            self.check_addresses(target, [host])

    def check_addresses(self, target: WebhookTarget, addresses: Iterable[str]) -> None:
        """Raise `WebhookRefused` if one of the addresses of the host may not be called."""
        for text in addresses:
            address = parse_address(text)
            assert address, f"a resolver answers with addresses, not {text!r}"
            if danger := find_danger(address):
                raise WebhookRefused(f"{target.host} is at {text}, {danger}: no setting allows it")
            if self._is_allowed(address):
                continue
            if not is_public(address):
                raise WebhookRefused(
                    f"{target.host} is at {text}, which is not public; allow its network with "
                    f"{NETWORK_SETTING}"
                )
            if not target.is_tls:
                raise WebhookRefused(f"{target.host} is a public host: use https://")

    def _is_allowed(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _parse_network(value: object) -> object:
    """Return the network of a text; raises ValueError if it is none."""
    if not isinstance(value, str):
        return value
    try:
        return ip_network(value)
    except ValueError as error:
        raise ValueError(f"no network such as 10.0.0.0/8: {error}") from None


class WebhookSettings(Settings):
    """The setting of a policy, of jobs services and of gateways."""

    webhook_network: tuple[
        Annotated[IPv4Network | IPv6Network, BeforeValidator(_parse_network)], ...
    ] = Field(
        (),
        description="network such as 10.0.0.0/8 or 127.0.0.0/8 to which webhooks may be sent "
        "beside public addresses, and without TLS; repeatable",
    )


def _is_localhost(host: str) -> bool:
    return host == LOCALHOST or host.endswith(f".{LOCALHOST}")
