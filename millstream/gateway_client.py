"""A gateway's HTTP API, as the commands `millstream batch …` and `millstream webhooks …` ask it."""

import json
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any

from millstream.connection_failures import describe_failure
from millstream.http_redirects import NoRedirects
from streams.base_settings import GatewayClientSettings
from streams.errors import MillstreamError

ANSWER_SECONDS = 60.0
_PIECE_BYTES = 65_536
_KEY_REMEDY = "; name the API key by MILLSTREAM_API_KEY or --api-key"
JsonBody = dict[str, Any]
RequestBody = bytes | Iterator[bytes] | None
OnSent = Callable[[int], None]


class GatewayRefused(MillstreamError):
    """The gateway has refused a call; `code` is the error's, the text its message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the answer names it, not the class


class GatewayUnreachable(MillstreamError):
    """No gateway answers at the address."""


class AuthorityUnreadable(MillstreamError):
    """The file of `--ca` cannot be read, or has no certificates in it."""


class GatewayClient:
    """Asks a gateway over HTTP, with a key; every method blocks.

    No proxy of the environment is used. Every method raises `GatewayRefused` or
    `GatewayUnreachable`, and making one raises `AuthorityUnreadable`.
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
            handlers.append(urllib.request.HTTPSHandler(context=_trust(settings.ca)))
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, method: str, path: str, body: JsonBody | None = None) -> JsonBody:
        """Return the JSON that a path answers with."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        return self._read_json(method, path, data, headers)

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
            return self._read_json("POST", "/v1/files", body, headers)

    def read_lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines that a path answers with, as they come."""
        with self._open("GET", path, None, {}) as answer, self._connection_errors():
            yield from answer

    def _read_json(
        self, method: str, path: str, body: RequestBody, headers: dict[str, str]
    ) -> JsonBody:
        with self._open(method, path, body, headers) as answer:
            with self._connection_errors():
                data = answer.read()
            try:
                found = json.loads(data)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise _not_a_gateway(answer.status)
            return found

    def _open(
        self, method: str, path: str, body: RequestBody, headers: dict[str, str]
    ) -> HTTPResponse:
        request = urllib.request.Request(
            self._url + path,
            body,
            {**self._headers, **headers},
            method=method,
        )
        with self._connection_errors():
            try:
                opened: HTTPResponse = self._opener.open(request, timeout=ANSWER_SECONDS)
            except urllib.error.HTTPError as error:
                with error:
                    raise _to_refusal(error.code, error.read()) from None
        return opened

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Raise `GatewayUnreachable` for a connection that cannot be made, or breaks."""
        try:
            yield
        except (OSError, HTTPException) as error:
            raise GatewayUnreachable(
                f"no gateway answers at {self._url} ({describe_failure(error)}): start one, or "
                "name it with --url"
            ) from None


def _trust(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca.expanduser()))
    except OSError as error:
        reason = "it has no certificates in PEM" if isinstance(error, ssl.SSLError) else None
        raise AuthorityUnreadable(f"--ca {ca} cannot be used: {reason or error.strerror}") from None


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
        remedy = _KEY_REMEDY if status == HTTPStatus.UNAUTHORIZED else ""
        return GatewayRefused(str(error["code"]), f"{error['message']}{remedy}")
    except (ValueError, KeyError, TypeError):
        return _not_a_gateway(status)


def _not_a_gateway(status: int) -> GatewayUnreachable:
    return GatewayUnreachable(
        f"what answered with the status {status} is no gateway: name one with --url"
    )
