"""The `Host` of an HTTP request, by which a page that has rebound its name gives itself away. Pure.

A web page may let its own name resolve to 127.0.0.1, and then reads what services on its visitor's
machine say without a key: for the browser they are of the page's own origin.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

_SHOWN_CHARACTERS = 100


def is_loopback_host(host: str) -> bool:
    """Return whether only this machine reaches what listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_this_machine(host: str | None) -> bool:
    """Return whether a `Host` is `localhost` or an address, with or without a port, or is missing.

    Those are no names that anybody else could let resolve to this machine.
    """
    if not host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def refusal(host: str | None) -> str:
    """Return the sentence for whoever asks by another name."""
    shown = repr((host or "")[:_SHOWN_CHARACTERS])
    return f"this is for this machine alone: ask 127.0.0.1 or localhost, not {shown}"
