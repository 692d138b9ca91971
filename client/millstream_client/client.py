"""The client: one socket to any of several gateways, shared by any number of requests."""

from collections.abc import Mapping, Sequence
from math import ceil
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
    """Millstream over a WebSocket; use it as an asynchronous context, in one event loop.

    `gateways` are URLs like `http://10.0.0.1:8080`, all of one cell; one is used at a time. When it
    dies, drains or freezes, the next one is taken and every request goes on where it was: no token
    is lost, none comes twice, nothing runs twice.

    A refusal that says when to try again is tried again, within a budget of a tenth of the requests
    and some per second. `patience` is how long in seconds a request may be held up by refusals, or
    by gateways that cannot be reached, before it fails.
    """

    def __init__(
        self,
        gateways: str | Sequence[str],
        *,
        api_key: str,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        urls = [gateways] if isinstance(gateways, str) else gateways
        self._connector, self._patience = Connector(urls, api_key), patience
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
        """Cancel what is under way and close the socket. Idempotent."""
        if self._session:
            await self._session.close()

    @property
    def gateway(self) -> str | None:
        """The URL of the socket in use; None while there is none."""
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
        """Continue a prompt (text or token ids), or answer a chat.

        Nothing is sent before the stream is entered, iterated over, or awaited. `deadline` is in
        seconds, from then to the end of the answer, and raises `DeadlineExceeded`.
        """
        given = {"prompt": prompt, "messages": messages}
        said = {name: value for name, value in given.items() if value is not None}
        ask = _make_request_frame("generate", model, deadline, {**said, **options})
        return Stream(self._require_session(), ask, deadline)

    async def embed(
        self,
        *,
        model: str,
        input: Inputs,
        dimensions: int | None = None,
        deadline: float | None = None,
        **options: Unpack[CommonParams],
    ) -> Embeddings:
        """A vector for each input, each a text or token ids; only its first `dimensions`."""
        cut = {} if dimensions is None else {"dimensions": dimensions}
        said = {"input": input, **cut, **options}
        return records.parse_embeddings(await self._run_unary("embed", model, deadline, said))

    async def classify(
        self,
        *,
        model: str,
        input: Inputs,
        deadline: float | None = None,
        **options: Unpack[CommonParams],
    ) -> Classifications:
        """A label for each input, each a text or token ids, with what speaks for every label."""
        said = {"input": input, **options}
        return records.parse_classifications(
            await self._run_unary("classify", model, deadline, said)
        )

    async def _run_unary(
        self, kind: str, model: str, deadline: float | None, said: Mapping[str, Any]
    ) -> Result:
        async with RequestHandle(
            self._require_session(), _make_request_frame(kind, model, deadline, said), deadline
        ) as request:
            outcome = await request.outcome()
        assert isinstance(outcome, Result)  # what is cancelled raises
        return outcome

    def _require_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("enter the client first: `async with Client(...) as client`")
        return self._session


def _make_request_frame(
    kind: str, model: str, deadline: float | None, said: Mapping[str, Any]
) -> dict[str, Any]:
    """The opening frame. It is the same however often it is sent: so its key stands for it."""
    within = {} if deadline is None else {"deadline_ms": max(1, ceil(deadline * 1000))}
    return {"type": kind, "model": model, "idempotency_key": uuid4().hex, **within, **said}
