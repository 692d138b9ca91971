"""The client: any number of requests over one WebSocket to one of several gateways."""

from collections.abc import Mapping, Sequence
from math import ceil
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self, Unpack
from uuid import uuid4

from millstream_client import records
from millstream_client.connector import Connector
from millstream_client.records import Classifications, Embeddings, Result
from millstream_client.request_handle import RequestHandle, Stream
from millstream_client.request_params import CommonParams, GenerationParams, Inputs
from millstream_client.session import Session

PATIENCE_SECONDS = 30.0


class Client:
    """Client of Millstream over a WebSocket, used as an asynchronous context in one event loop.

    `gateways` are URLs like `http://10.0.0.1:8080`, all of one installation; one is used at a time.
    When that gateway dies, shuts down or freezes, the client connects to the next one and every
    request continues where it was: no token is lost, none comes twice, nothing runs twice. The
    constructor raises `ValueError` for an empty list or a URL of another form, and connects to
    nothing.

    `ssl` is a TLS context for https gateways, for an authority that the system does not trust or a
    certificate of the client's own, which may stand in for `api_key`.

    If a gateway refuses a request and says when to try again, the client sends the request again
    then. Such retries are limited to a tenth of the number of requests plus ten a second; further
    ones wait. `patience` is how many seconds a request may be delayed by refusals, or by gateways
    that cannot be reached, before it fails with the refusal or with `NotConnected`.
    """

    def __init__(
        self,
        gateways: str | Sequence[str],
        *,
        api_key: str | None = None,
        ssl: SSLContext | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        urls = [gateways] if isinstance(gateways, str) else gateways
        self._connector, self._patience = Connector(urls, api_key, ssl), patience
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        self._session = Session(self._connector, self._patience)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all running requests, and return when the connection is closed. Idempotent.

        Code that waits for a cancelled request gets `Cancelled`, and a request that is sent later
        raises `NotConnected`. If requests run and there is no connection at present, this waits up
        to one second for a new one over which to cancel them.
        """
        if self._session:
            await self._session.close()

    @property
    def gateway(self) -> str | None:
        """The WebSocket URL of the gateway that is connected now; None without a connection."""
        return self._session.gateway if self._session else None

    def generate(
        self,
        *,
        model: str,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        deadline: float | None = None,
        **options: Unpack[GenerationParams],
    ) -> Stream:
        """Return a stream that continues a prompt (text or token ids) or answers chat `messages`.

        Nothing is sent yet: the request is sent when the stream is first entered (`async with`),
        iterated over, or awaited. `deadline` is in seconds, from then to the end of the answer;
        when it passes, reading raises `DeadlineExceeded`. Reading also raises the `MillstreamError`
        of a request that was refused or has failed. Raises `RuntimeError` if the client was not
        entered.
        """
        given = {"prompt": prompt, "messages": messages}
        fields = {name: value for name, value in given.items() if value is not None}
        frame = _make_request_frame("generate", model, deadline, {**fields, **options})
        return Stream(self._require_session(), frame, deadline)

    async def embed(
        self,
        *,
        model: str,
        input: Inputs,
        dimensions: int | None = None,
        deadline: float | None = None,
        **options: Unpack[CommonParams],
    ) -> Embeddings:
        """Return an embedding vector for each input, in the order of the inputs.

        An input is a text or token ids. Waits for the answer. `dimensions` asks for only so many of
        a vector's first numbers. `deadline` is in seconds; when it passes, `DeadlineExceeded` is
        raised. Raises the `MillstreamError` of a request that was refused or has failed, and
        `RuntimeError` if the client was not entered. Cancelling cancels the request.
        """
        truncation = {} if dimensions is None else {"dimensions": dimensions}
        fields = {"input": input, **truncation, **options}
        return records.parse_embeddings(await self._run_unary("embed", model, deadline, fields))

    async def classify(
        self,
        *,
        model: str,
        input: Inputs,
        deadline: float | None = None,
        **options: Unpack[CommonParams],
    ) -> Classifications:
        """Return the likeliest label, and the score of every label, for each input in their order.

        An input is a text or token ids. Waits for the answer. `deadline` is in seconds; when it
        passes, `DeadlineExceeded` is raised. Raises the `MillstreamError` of a request that was
        refused or has failed, and `RuntimeError` if the client was not entered. Cancelling cancels
        the request.
        """
        fields = {"input": input, **options}
        return records.parse_classifications(
            await self._run_unary("classify", model, deadline, fields)
        )

    async def _run_unary(
        self, kind: str, model: str, deadline: float | None, fields: Mapping[str, Any]
    ) -> Result:
        frame = _make_request_frame(kind, model, deadline, fields)
        async with RequestHandle(self._require_session(), frame, deadline) as request:
            outcome = await request.outcome()
        assert isinstance(outcome, Result)  # a cancelled request raises instead
        return outcome

    def _require_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("enter the client first: `async with Client(...) as client`")
        return self._session


def _make_request_frame(
    kind: str, model: str, deadline: float | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The request's opening frame, with an idempotency key of its own unless `fields` has one.

    The frame is the same each time it is sent, so the gateway recognises it by that key.
    """
    limit = {} if deadline is None else {"deadline_ms": max(1, ceil(deadline * 1000))}
    return {"type": kind, "model": model, "idempotency_key": uuid4().hex, **limit, **fields}
