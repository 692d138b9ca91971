"""/v1/embeddings, /v1/classify and /v1/rerank: one answer for all inputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from gateway import answers
from gateway.door import Door
from gateway.endpoint import answer_headers
from gateway.exchange import Exchange, exchange
from gateway.schemas.classification import Classification, ClassifyRequest, RerankRequest
from gateway.schemas.embeddings import Embedding, EmbeddingRequest
from gateway.submission import Submission
from registry.tenants import Tenant

PIECE_BYTES = 32_768


@dataclass
class Rows:
    """What came for one request: a row of little-endian float32 per input, in order."""

    rows: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    async def of(cls, running: Exchange) -> "Rows":
        """All of them, once the request is done."""
        found = cls()
        while (record := await running.next())["type"] != "done":
            found.rows += record.get("vectors", ())
            found.labels = record.get("labels", found.labels)
        found.usage, found.timing = record["usage"], record["timing"]
        return found


def submissions(body: Embedding | Classification | RerankRequest) -> list[Submission]:
    """The one for all inputs of a body."""
    return [Submission.of(body)]


async def embed(
    door: Door,
    request: Request,
    tenant: Tenant,
    body: EmbeddingRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with one vector per input, in order."""
    async with exchange(door, request, tenant, *submissions) as running:
        found = await Rows.of(running)
    encoding = body.encoding_format or "float"
    parts = answers.embeddings(body.model, found.rows, found.usage["prompt_tokens"], encoding)
    return _response(parts, answer_headers(running.ticket, found.timing))


async def classify(
    door: Door,
    request: Request,
    tenant: Tenant,
    body: ClassifyRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with the likeliest label of each input and the probabilities of all labels."""
    async with exchange(door, request, tenant, *submissions) as running:
        found = await Rows.of(running)
    head = answers.classification_head(
        running.ticket.request_id, body.model, int(time.time()), found.usage
    )
    data = (answers.classification(i, row, found.labels) for i, row in enumerate(found.rows))
    return _response(
        answers.listed(head, "data", data), answer_headers(running.ticket, found.timing)
    )


async def rerank(
    door: Door,
    request: Request,
    tenant: Tenant,
    body: RerankRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with the documents by falling relevance to the query."""
    async with exchange(door, request, tenant, *submissions) as running:
        found = await Rows.of(running)
    documents = None if body.return_documents is False else body.documents
    head = answers.rerank_head(running.ticket.request_id, body.model, found.usage)
    results = answers.ranked(found.rows, documents, body.top_n)
    return _response(
        answers.listed(head, "results", results), answer_headers(running.ticket, found.timing)
    )


def _response(parts: Iterator[bytes], headers: dict[str, str]) -> Response:
    """Whole if it is short; else in pieces, between which the event loop serves others."""
    pieces = _pieces(parts)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return Response(first, headers=headers, media_type="application/json")

    async def breathing() -> AsyncIterator[bytes]:
        yield first
        yield second
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    return StreamingResponse(breathing(), headers=headers, media_type="application/json")


def _pieces(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are neither tiny nor long to make."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)
