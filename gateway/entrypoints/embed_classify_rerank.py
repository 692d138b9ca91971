"""/v1/embeddings, /v1/classify and /v1/rerank: one answer for all inputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from api import openai_bodies
from api.schemas.classify_rerank import ClassificationBody, ClassifyRequest, RerankRequest
from api.schemas.embeddings import EmbeddingBody, EmbeddingRequest
from api.submission.submission import Submission
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import response_headers
from gateway.entrypoints.http_request import HttpRequest, submit_http_request
from registry.tenant_records import Tenant

MIN_PIECE_BYTES = 32_768


@dataclass
class ResultRows:
    """What came for one request: a row of little-endian float32 per input, in order."""

    rows: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    async def collect(cls, running: HttpRequest) -> "ResultRows":
        """All of them, once the request is done."""
        found = cls()
        while (record := await running.next())["type"] != "done":
            found.rows += record.get("vectors", ())
            found.labels = record.get("labels", found.labels)
        found.usage, found.timing = record["usage"], record["timing"]
        return found


def to_submissions(body: EmbeddingBody | ClassificationBody | RerankRequest) -> list[Submission]:
    """The one for all inputs of a body."""
    return [Submission.from_body(body)]


async def serve_embeddings(
    door: GatewayContext,
    request: Request,
    tenant: Tenant,
    body: EmbeddingRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with one vector per input, in order."""
    async with submit_http_request(door, request, tenant, *submissions) as running:
        found = await ResultRows.collect(running)
    encoding = body.encoding_format or "float"
    parts = openai_bodies.embeddings(body.model, found.rows, found.usage["prompt_tokens"], encoding)
    return _respond_in_pieces(parts, response_headers(running.ticket, found.timing))


async def serve_classify(
    door: GatewayContext,
    request: Request,
    tenant: Tenant,
    body: ClassifyRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with the likeliest label of each input and the probabilities of all labels."""
    async with submit_http_request(door, request, tenant, *submissions) as running:
        found = await ResultRows.collect(running)
    head = openai_bodies.classification_head(
        running.ticket.request_id, body.model, int(time.time()), found.usage
    )
    data = (openai_bodies.classification(i, row, found.labels) for i, row in enumerate(found.rows))
    return _respond_in_pieces(
        openai_bodies.iterate_list_json(head, "data", data),
        response_headers(running.ticket, found.timing),
    )


async def serve_rerank(
    door: GatewayContext,
    request: Request,
    tenant: Tenant,
    body: RerankRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Answer with the documents by falling relevance to the query."""
    async with submit_http_request(door, request, tenant, *submissions) as running:
        found = await ResultRows.collect(running)
    documents = None if body.return_documents is False else body.documents
    head = openai_bodies.rerank_head(running.ticket.request_id, body.model, found.usage)
    results = openai_bodies.rank_documents(found.rows, documents, body.top_n)
    return _respond_in_pieces(
        openai_bodies.iterate_list_json(head, "results", results),
        response_headers(running.ticket, found.timing),
    )


def _respond_in_pieces(parts: Iterator[bytes], headers: dict[str, str]) -> Response:
    """Whole if it is short; else in pieces, between which the event loop serves others."""
    pieces = _join_pieces(parts)
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


def _join_pieces(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are neither tiny nor long to make."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= MIN_PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)
