"""Health probes: one HTTP GET with a timeout."""

import asyncio
import ssl
from contextlib import closing
from typing import NamedTuple


class ProbeResult(NamedTuple):
    """The answer to a probe: `is_healthy` is True for HTTP status 200, and `text` is the body."""

    is_healthy: bool
    text: str


async def send_probe(
    host: str,
    port: int,
    path: str,
    seconds: float,
    api_key: str = "",
    *,
    uses_tls: bool = False,
) -> ProbeResult | None:
    """Send one HTTP GET for `path` to `host` and `port`, with the API key if one is given.

    With TLS the certificate is not verified: a probe goes to a process of our own on this machine,
    under an address that is seldom a name of its certificate.

    Returns the answer; None, and raises nothing, if the connection is refused or breaks or the
    whole answer has not come within `seconds`. An answer with an error status is returned as
    unhealthy.
    """
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_make_unverified_context() if uses_tls else None
            )
            with closing(writer):
                key_line = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{key_line}\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except OSError:  # includes TimeoutError
        return None
    return ProbeResult(
        b" 200 " in head.partition(b"\r\n")[0], body.decode(errors="replace").strip()
    )


def _make_unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
