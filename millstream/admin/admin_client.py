"""Client of the admin service for commands: over HTTP where an address is known, else over NATS."""

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.client import HTTPException
from typing import IO, Any, Protocol
from urllib.parse import quote, urlencode

from admin.operation_table import OPERATIONS, PREFIX, Operation
from millstream.admin.settings import AdminClientSettings
from millstream.connection_failures import describe_failure
from millstream.http_redirects import NoRedirects
from registry.models import Model
from streams import subjects
from streams.broker.broker_client import Broker, connect
from streams.errors import MillstreamError

ANSWER_SECONDS = 15.0  # longer than a change waits for the broker
FIND_SECONDS = 5.0  # for an admin service that is about to start
_RETRY_SECONDS = 0.1
_KEY_REMEDY = "; name the key of the admin service by MILLSTREAM_ADMIN_KEY or --admin-key-file"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

JsonBody = dict[str, Any]


class AdminRefused(MillstreamError):
    """The admin service has refused an operation; `code` is the error's, the text its message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the answer names it, not the class


class AdminUnreachable(MillstreamError):
    """No admin service answers; the message says where it was looked for, and the remedy."""


class AdminClient(Protocol):
    """A client of the admin service, by HTTP or over NATS."""

    async def call(self, operation: str, **arguments: Any) -> JsonBody:
        """Return the answer of an operation; raises `AdminRefused` or `AdminUnreachable`."""
        ...


@asynccontextmanager
async def admin_client(settings: AdminClientSettings) -> AsyncIterator[AdminClient]:
    """Yield a client of the admin service at `settings.admin`, else of one that NATS knows.

    Raises `BrokerUnavailable` if NATS is to be asked and does not answer, `OSError` if the file
    with the key cannot be read.
    """
    if settings.admin:
        yield HttpAdminClient(settings.admin, settings.read_admin_key())
        return
    async with connect(settings.nats, "millstream-command", settings.nats_files) as broker:
        yield NatsAdminClient(broker)


async def list_all(
    client: AdminClient, operation: str, *, by: str = "name", **arguments: Any
) -> list[JsonBody]:
    """Return all records of an operation that lists them, page by page; raises as `call`.

    `by` is the field by which they are ordered.
    """
    found: list[JsonBody] = []
    while True:
        page = await client.call(operation, **arguments)
        found += page["data"]
        if not page["has_more"]:
            return found
        arguments["after"] = found[-1][by]


async def put_model(
    admin: AdminClient, model: Model, alias: str | None = None, why: str = ""
) -> None:
    """Register a model version; fields that the record does not set stay as they are registered.

    Raises as `AdminClient.call`.
    """
    record = model.model_dump(mode="json", exclude_unset=True)
    await admin.call("models.put", name=model.name, model=record, alias=alias, why=why)


class NatsAdminClient:
    """Asks over NATS, as whoever has the broker's credentials may."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def call(self, operation: str, **arguments: Any) -> JsonBody:
        """Return the answer of an operation; raises `AdminRefused` or `AdminUnreachable`."""
        found: JsonBody = json.loads(await self._ask(operation, json.dumps(arguments).encode()))
        if "error" in found:
            raise _to_refusal(found)
        result: JsonBody = found["result"]
        return result

    async def _ask(self, operation: str, payload: bytes) -> bytes:
        """Return the answer; where nobody listens yet, one may be starting."""
        deadline = time.monotonic() + FIND_SECONDS
        while True:
            answer = await self._broker.request(subjects.admin(operation), payload, ANSWER_SECONDS)
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise AdminUnreachable(
                    f"no admin service answers over NATS at {self._broker.url}: start `millstream "
                    "admin` there, or name one with --admin"
                )
            await asyncio.sleep(_RETRY_SECONDS)


class HttpAdminClient:
    """Asks over HTTP, with a key; no proxy of the environment is used."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._opener = urllib.request.build_opener(NoRedirects(), urllib.request.ProxyHandler({}))

    async def call(self, operation: str, **arguments: Any) -> JsonBody:
        """Return the answer of an operation; raises `AdminRefused` or `AdminUnreachable`."""
        request = self._make_request(OPERATIONS[operation], arguments)
        return await asyncio.to_thread(self._send, request)

    def _make_request(self, operation: Operation, arguments: JsonBody) -> urllib.request.Request:
        named = set(operation.path_arguments)
        path = _PLACEHOLDER.sub(
            lambda found: quote(str(arguments[found[1]]), safe=""), operation.documented_path
        )
        others = {name: value for name, value in arguments.items() if name not in named}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        body = None
        if operation.has_body:
            body, headers["Content-Type"] = json.dumps(others).encode(), "application/json"
        elif others:
            path += f"?{urlencode(others)}"
        return urllib.request.Request(self.url + path, body, headers, method=operation.method)

    def _send(self, request: urllib.request.Request) -> JsonBody:
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return self._read(answer)
        except urllib.error.HTTPError as error:
            with error:
                remedy = _KEY_REMEDY if error.code == HTTPStatus.UNAUTHORIZED else ""
                raise _to_refusal(self._read(error), remedy) from None
        except (OSError, HTTPException) as error:
            raise AdminUnreachable(
                f"no admin service answers at {self.url}: {describe_failure(error)}; start "
                "`millstream up` or `millstream admin`, or name another one with --admin"
            ) from None

    def _read(self, answer: IO[bytes]) -> JsonBody:
        try:
            found = json.loads(answer.read())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise AdminUnreachable(f"what answers at {self.url}{PREFIX} is no admin service")
        return found


def _to_refusal(answer: JsonBody, remedy: str = "") -> MillstreamError:
    error = answer.get("error")
    if not isinstance(error, dict) or not {"code", "message"} <= error.keys():
        return AdminUnreachable("what answered is no admin service")
    return AdminRefused(str(error["code"]), f"{error['message']}{remedy}")
