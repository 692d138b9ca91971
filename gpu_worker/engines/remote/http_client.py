"""The HTTP client of one server: connections, timeouts, and bounds on the size of answers.

Only this file and `checked_connections` know the HTTP library and its errors.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from gpu_worker.engines.engine import EngineError
from gpu_worker.engines.remote import call_errors
from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.checked_connections import CheckedTransport
from registry.destination_policy import DestinationPolicy

MAX_ANSWER_BYTES = 64 * 2**20
MAX_ERROR_BYTES = 64 * 2**10
MAX_EVENT_BYTES = 2**20


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds.

    A whole answer, or a stream's first event, must come within `first_seconds`; each further event
    within `chunk_seconds`.
    """

    connect_seconds: float = 5.0
    first_seconds: float = 60.0
    chunk_seconds: float = 30.0


class HttpClient:
    """Sends requests to one server, over at most `connections` connections.

    Use it as an async context manager, on one event loop. With a `key`, it is sent as a bearer
    token. It connects only where `policy` allows, and follows neither redirects nor variables such
    as HTTPS_PROXY. Calls raise `RetryableError` if another try may help (no connection, timeout,
    broken answer, overload), else `EngineError`.
    """

    def __init__(
        self,
        url: str,
        key: str,
        timeouts: Timeouts,
        connections: int,
        policy: DestinationPolicy,
    ) -> None:
        self._url, self._timeouts = url.rstrip("/"), timeouts
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(None, connect=timeouts.connect_seconds),
            transport=CheckedTransport(policy, connections),
            follow_redirects=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Send a JSON body by POST, and return the whole body of the answer.

        Raises `RetryableError` if no whole answer has come within `first_seconds`, if the
        connection fails, or for an answer that is worth another try. Raises `EngineError` for an
        answer that rejects the request or is over 64 MiB.
        """
        with _translate_errors():
            async with asyncio.timeout(self._timeouts.first_seconds):
                response = await self._open_response(path, body)
                try:
                    return await _read_body(response, MAX_ANSWER_BYTES)
                finally:
                    await response.aclose()

    async def stream_events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Send a JSON body by POST, and yield the data of each server-sent event of the answer.

        Ends when the server ends the stream. Raises `RetryableError` if an event does not come in
        time (see `Timeouts`), if the connection fails, or for an answer that is worth another try.
        Raises `EngineError` for an answer that rejects the request. Closing the generator
        (`aclosing`) closes the connection.
        """
        loop_time = asyncio.get_running_loop().time
        deadline = loop_time() + self._timeouts.first_seconds
        with _translate_errors():
            async with asyncio.timeout_at(deadline):
                response = await self._open_response(path, body)
            try:
                source = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
                while True:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(source, None)
                    if event is None:
                        return
                    yield event.data
                    deadline = loop_time() + self._timeouts.chunk_seconds
            finally:
                await response.aclose()

    async def _open_response(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        """Send a POST and return the answer, its body unread; the caller closes it.

        Raises the error of an answer that is not a success.
        """
        request = self._client.build_request("POST", self._url + path, json=body)
        response = await self._client.send(request, stream=True)
        if response.status_code == 200:
            return response
        try:
            error_body = await _read_body(response, MAX_ERROR_BYTES)
        finally:
            await response.aclose()
        raise call_errors.error_from_status(
            response.status_code, response.headers, error_body, time.time()
        )


async def _read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise EngineError("upstream_failed", f"the server's answer is over {max_bytes} bytes")
    return b"".join(parts)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate the library's errors into `RetryableError`.

    Those of a request that never reached the server are not `suspicious`.
    """
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise RetryableError("unreachable", f"the server cannot be reached: {error!r}") from error
    except TimeoutError as error:
        raise RetryableError(
            "timeout", "the server sent nothing for too long", suspicious=True
        ) from error
    except httpx2.NetworkError as error:
        raise RetryableError(
            "reset", f"the connection broke: {error!r}", suspicious=True
        ) from error
    except httpx2.HTTPError as error:
        raise RetryableError(
            "protocol", f"the server breaks the HTTP protocol: {error!r}", suspicious=True
        ) from error
