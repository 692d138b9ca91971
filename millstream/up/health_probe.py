"""Asking a process how it is, at its port for that."""

import asyncio
from contextlib import closing
from typing import NamedTuple


class ProbeResult(NamedTuple):
    """Whether it is well, and what it says."""

    is_healthy: bool
    text: str


async def send_probe(host: str, port: int, path: str, seconds: float) -> ProbeResult | None:
    """What is answered to a GET; None if nobody answers in time."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            with closing(writer):
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except OSError:  # a time-out is one too
        return None
    return ProbeResult(
        b" 200 " in head.partition(b"\r\n")[0], body.decode(errors="replace").strip()
    )
