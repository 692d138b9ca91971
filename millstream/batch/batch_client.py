"""A gateway's files and batches, as the commands ask for them."""

import json
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from millstream.http_redirects import NoRedirects
from streams.base_settings import GatewayClientSettings
from streams.errors import MillstreamError

ANSWER_SECONDS = 60.0
_PIECE_BYTES = 65_536
JsonBody = dict[str, Any]
OnSent = Callable[[int], None]


class GatewayRefused(MillstreamError):
    """The gateway has refused a call; `code` is the error's, the text its message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the answer names it, not the class


class GatewayUnreachable(MillstreamError):
    """No gateway answers at the address."""


class BatchClient:
    """Asks a gateway over HTTP, with a key; every method blocks.

    No proxy of the environment is used. Every method raises `GatewayRefused` or
    `GatewayUnreachable`.
    """

    def __init__(self, settings: GatewayClientSettings) -> None:
        self._url = settings.url.rstrip("/")
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        handlers: list[urllib.request.BaseHandler] = [
            NoRedirects(),
            urllib.request.ProxyHandler({}),
        ]
        if settings.ca:
            context = ssl.create_default_context(cafile=str(settings.ca))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, method: str, path: str, body: JsonBody | None = None) -> JsonBody:
        """Return the JSON that a path answers with."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        with self._open(method, path, data, headers) as answer:
            found: JsonBody = json.loads(answer.read())
            return found

    def upload(self, file: Path, on_sent: OnSent) -> JsonBody:
        """Store a file for a batch, and return its object; `on_sent` hears of the bytes sent.

        Raises `OSError` if the file cannot be read.
        """
        boundary = secrets.token_hex(16)
        head, tail = _form(boundary, file.name)
        with file.open("rb") as source:
            size = len(head) + source.seek(0, 2) + len(tail)
            source.seek(0)
            body = _iterate_form(head, source, tail, on_sent)
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(size),
            }
            with self._open("POST", "/v1/files", body, headers) as answer:
                found: JsonBody = json.loads(answer.read())
                return found

    def read_lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines that a path answers with, as they come."""
        with self._open("GET", path, None, {}) as answer:
            yield from answer

    def _open(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: dict[str, str]
    ) -> IO[bytes]:
        request = urllib.request.Request(
            self._url + path,
            body,
            {**self._headers, **headers},
            method=method,
        )
        try:
            opened: IO[bytes] = self._opener.open(request, timeout=ANSWER_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise _to_refusal(error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise GatewayUnreachable(
                f"no gateway answers at {self._url} ({reason}): start one, or name it with --url"
            ) from None
        return opened


def _form(boundary: str, filename: str) -> tuple[bytes, bytes]:
    """Return what is before and behind the file in a form for /v1/files."""
    shown = filename.replace('"', "_")
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{shown}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return head.encode(), f"\r\n--{boundary}--\r\n".encode()


def _iterate_form(head: bytes, source: IO[bytes], tail: bytes, on_sent: OnSent) -> Iterator[bytes]:
    yield head
    while piece := source.read(_PIECE_BYTES):
        yield piece
        on_sent(len(piece))
    yield tail


def _to_refusal(status: int, body: bytes) -> MillstreamError:
    try:
        error = json.loads(body)["error"]
        return GatewayRefused(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return GatewayUnreachable(f"what answered with the status {status} is no gateway")
