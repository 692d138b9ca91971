"""URLs of NATS servers as an operator gives them: addresses, and credentials apart from them.

Whatever is shown to anybody (log events, errors, the command line) has the addresses alone, and
`redact` removes credentials from text that somebody else made. Pure.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from streams.errors import BrokerMisconfigured

_SCHEMES = ("nats", "tls", "ws", "wss")
_SEPARATOR = re.compile(r",\s*(?=(?:nats|tls|wss?)://)")
_CREDENTIALS = re.compile(r"(://)[^\s\"'<>]+@")


class InvalidServerUrl(BrokerMisconfigured, ValueError):
    """A URL that names no NATS server; the message has no credentials in it."""


@dataclass(frozen=True)
class ServerUrls:
    """Addresses of the servers of one cluster, and the credentials that all of them accept.

    A user name without a password is a token, as in every NATS client.
    """

    addresses: tuple[str, ...]
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The addresses, separated by commas."""
        return ",".join(self.addresses)

    @property
    def has_credentials(self) -> bool:
        """True if the URL has a user or a token."""
        return self.user is not None or self.token is not None

    @property
    def encrypts(self) -> bool:
        """True if an address asks for TLS; then all servers must have it."""
        return any(address.startswith(("tls://", "wss://")) for address in self.addresses)

    @property
    def are_websockets(self) -> bool:
        """True if the servers are reached over WebSockets, whose TLS is that of HTTP."""
        return all(address.startswith(("ws://", "wss://")) for address in self.addresses)


def parse_server_urls(text: str) -> ServerUrls:
    """Parse `nats://user:password@host:port`, one or several separated by commas.

    Scheme, credentials and port may be left out. Percent-encoding in credentials is undone; what
    stands before the last `@` of a URL belongs to them. Raises `InvalidServerUrl`.
    """
    addresses: list[str] = []
    found: set[tuple[str | None, str | None, str | None]] = set()
    for part in filter(None, (each.strip() for each in _SEPARATOR.split(text))):
        scheme, separator, rest = part.partition("://")
        if not separator:
            scheme, rest = "nats", part
        userinfo, at, hosts = rest.rpartition("@")
        addresses += [_address(scheme, host) for host in hosts.split(",")]
        if at:
            found.add(_credentials(userinfo))
    if not addresses:
        raise InvalidServerUrl("the URL of NATS is empty: give nats://host:port")
    if len(found) > 1:
        raise InvalidServerUrl(
            "the URLs of NATS have different credentials: all servers need the same ones"
        )
    return ServerUrls(tuple(addresses), *(found.pop() if found else ()))


def _credentials(userinfo: str) -> tuple[str | None, str | None, str | None]:
    """Return user, password and token, of which one or two are set."""
    user, colon, password = userinfo.partition(":")
    return (unquote(user), unquote(password), None) if colon else (None, None, unquote(user))


def _address(scheme: str, host: str) -> str:
    """Return `scheme://host:port`."""
    address = f"{scheme}://{host.strip().rstrip('/')}"
    try:
        parts = urlsplit(address)
        known = scheme in _SCHEMES and parts.hostname and not parts.path
        port = parts.port
    except ValueError:
        known = port = None
    if not known:
        raise InvalidServerUrl(
            f"{address!r} is no address of a NATS server: give nats://host:port, with special "
            "characters of a password percent-encoded"
        )
    default = ":4222" if port is None and scheme in ("nats", "tls") else ""
    return address + default


def redact(text: str) -> str:
    """Return `text` with the credentials of all URLs in it replaced by three asterisks."""
    return _CREDENTIALS.sub(r"\1***@", text) if "@" in text else text
