"""Clients' certificates: their names travel from the connection to authentication in the scope."""

import ssl
from collections.abc import Collection
from typing import Any

from starlette.types import Scope

from streams.certificates import find_identities
from streams.errors import Forbidden

_STATE = "certificate_identities"


def read_state(connection: ssl.SSLObject) -> dict[str, Any]:
    """Return what the scopes of a connection get as state: the names of its client certificate.

    A certificate that was not verified has none.
    """
    return {_STATE: find_identities(connection.getpeercert() or {})}


def certificate_identities(scope: Scope) -> tuple[str, ...]:
    """Return the names of the client certificate with which a request or handshake came."""
    found: tuple[str, ...] = scope.get("state", {}).get(_STATE, ())
    return found


def check_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Raise `Forbidden` if a web page of another origin makes this request.

    A browser shows its certificate for any page, unlike an API key, which only a page that has it
    can send. `allowed` are origins that may; `*` does not count among them.
    """
    headers = dict(scope["headers"])
    origin = headers.get(b"origin", b"").decode("latin-1")
    own = f"https://{headers.get(b'host', b'').decode('latin-1')}"
    if origin and origin != own and origin not in allowed:
        raise Forbidden(
            f"pages of {origin} may not use their visitors' client certificates: send an API key, "
            "or list the origin in cors_origins"
        )
