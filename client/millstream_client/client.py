"""The client: one socket to any of several gateways, shared by any number of requests."""

from collections.abc import Mapping, Sequence
from math import ceil
from types import TracebackType
from typing import Any, Self, Unpack
from uuid import uuid4

from millstream_client import records
from millstream_client.dialer import Dialer
from millstream_client.options import Common, Generation, Inputs
from millstream_client.records import Classifications, Embeddings, Result
from millstream_client.request import Request, Stream
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
        self._dialer, self._patience = Dialer(urls, api_key), patience
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        self._session = Session(self._dialer, self._patience)
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
        **options: Unpack[Generation],
    ) -> Stream:
        """Continue a prompt (text or token ids), or answer a chat.

        Nothing is sent before the stream is entered, iterated over, or awaited. `deadline` is in
        seconds, from then to the end of the answer, and raises `DeadlineExceeded`.
        """
        given = {"prompt": prompt, "messages": messages}
        said = {name: value for name, value in given.items() if value is not None}
        ask = _ask("generate", model, deadline, {**said, **options})
        return Stream(self._entered(), ask, deadline)

    async def embed(
        self,
        *,
        model: str,
        input: Inputs,
        dimensions: int | None = None,
        deadline: float | None = None,
        **options: Unpack[Common],
    ) -> Embeddings:
        """A vector for each input, each a text or token ids; only its first `dimensions`."""
        cut = {} if dimensions is None else {"dimensions": dimensions}
        said = {"input": input, **cut, **options}
        return records.embeddings(await self._result("embed", model, deadline, said))

    async def classify(
        self,
        *,
        model: str,
        input: Inputs,
        deadline: float | None = None,
        **options: Unpack[Common],
    ) -> Classifications:
        """A label for each input, each a text or token ids, with what speaks for every label."""
        said = {"input": input, **options}
        return records.classifications(await self._result("classify", model, deadline, said))

    async def _result(
        self, kind: str, model: str, deadline: float | None, said: Mapping[str, Any]
    ) -> Result:
        async with Request(self._entered(), _ask(kind, model, deadline, said), deadline) as request:
            outcome = await request.outcome()
        assert isinstance(outcome, Result)  # what is cancelled raises
        return outcome

    def _entered(self) -> Session:
        if self._session is None:
            raise RuntimeError("enter the client first: `async with Client(...) as client`")
        return self._session


def _ask(kind: str, model: str, deadline: float | None, said: Mapping[str, Any]) -> dict[str, Any]:
    """The opening frame. It is the same however often it is sent: so its key stands for it."""
    within = {} if deadline is None else {"deadline_ms": max(1, ceil(deadline * 1000))}
    return {"type": kind, "model": model, "idempotency_key": uuid4().hex, **within, **said}
