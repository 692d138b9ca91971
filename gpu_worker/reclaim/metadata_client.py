"""Talks HTTP with a machine's metadata service, within bounds of time and size."""

import asyncio
import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from streams.errors import MillstreamError

ANSWER_SECONDS = 2.0
_MAX_BYTES = 64 * 1024


class MetadataUnavailable(MillstreamError):
    """The metadata service does not answer, or not as it documents."""


@dataclass(frozen=True)
class MetadataAnswer:
    """An answer; names of headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataClient:
    """Sends requests to the metadata service at `url`, each on a connection of its own.

    It follows neither redirects nor variables such as HTTP_PROXY: what answers must be the service.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        seconds: float = ANSWER_SECONDS,
    ) -> MetadataAnswer:
        """Return the whole answer, whatever its status.

        Raises `MetadataUnavailable` if it has not come within `seconds`, is over 64 KiB, or is no
        HTTP.
        """
        lines = {**headers, "Host": self._host, "Connection": "close"}
        if body or method != "GET":
            lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            async with asyncio.timeout(seconds):
                raw = await self._exchange(
                    f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body
                )
            return _parse(raw)
        except TimeoutError as error:
            raise MetadataUnavailable(f"no answer to {path} within {seconds:g} s") from error
        except (OSError, HTTPException, ValueError) as error:
            raise MetadataUnavailable(f"no answer to {path}: {error!r}") from error

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        with closing(writer):
            writer.write(request)
            raw = bytearray()
            while piece := await reader.read(_MAX_BYTES):
                raw += piece
                if len(raw) > _MAX_BYTES:
                    raise ValueError(f"it is over {_MAX_BYTES} bytes")
        return bytes(raw)


class _ReadSocket:
    """A socket for `HTTPResponse` that has its bytes already."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parse(raw: bytes) -> MetadataAnswer:
    response = HTTPResponse(_ReadSocket(raw))  # type: ignore[arg-type]  # it needs makefile alone
    with response:
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
    return MetadataAnswer(response.status, body, headers)
