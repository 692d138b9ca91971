"""Serves /v1/embeddings, /v1/classify and /v1/rerank: one response for all inputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from api import openai_bodies
from api.authentication.authenticator import Principal
from api.schemas.classify_rerank import ClassificationBody, ClassifyRequest, RerankRequest
from api.schemas.embeddings import EmbeddingBody, EmbeddingRequest
from api.submission.submission_record import Submission
from gateway.context import GatewayContext
from gateway.entrypoints.choice_fanout import ChoiceFanout, submit_choices
from gateway.entrypoints.endpoint import response_headers

MIN_PIECE_BYTES = 32_768  # of all pieces but the last


@dataclass
class ResultRows:
    """The whole result of one request: a row of little-endian float32 for each input, in order.

    `labels` name the numbers of a row of a classification. `timing` is in milliseconds by stage.
    """

    rows: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    async def collect(cls, fanout: ChoiceFanout) -> "ResultRows":
        """Wait until the request is done, and return all of its rows.

        Raises `Ended` if the request fails, and `ClientGone` if the client leaves.
        """
        result = cls()
        while (record := await fanout.next())["type"] != "done":
            result.rows += record.get("vectors", ())
            result.labels = record.get("labels", result.labels)
        result.usage, result.timing = record["usage"], record["timing"]
        return result


def to_submissions(body: EmbeddingBody | ClassificationBody | RerankRequest) -> list[Submission]:
    """Return the one submission that has all inputs of a body, as a list for `Endpoint`."""
    return [Submission.from_body(body)]


async def serve_embeddings(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: EmbeddingRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Wait for the result and return the response of /v1/embeddings: a vector per input, in order.

    Raises `MillstreamError` if the request is refused or fails, and `ClientGone` if the client
    leaves.
    """
    async with submit_choices(context, request, principal, *submissions) as fanout:
        result = await ResultRows.collect(fanout)
    encoding = body.encoding_format or "float"
    parts = openai_bodies.embeddings(
        body.model, result.rows, result.usage["prompt_tokens"], encoding
    )
    return _respond_in_pieces(parts, response_headers(fanout.ticket, result.timing))


async def serve_classify(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: ClassifyRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Wait for the result and return the response of /v1/classify.

    The response has each input's likeliest label and the probabilities of all labels, in the order
    of the inputs. Raises `MillstreamError` if the request is refused or fails, and `ClientGone` if
    the client leaves.
    """
    async with submit_choices(context, request, principal, *submissions) as fanout:
        result = await ResultRows.collect(fanout)
    head = openai_bodies.classification_head(
        fanout.ticket.request_id, body.model, int(time.time()), result.usage
    )
    data = (
        openai_bodies.classification(i, row, result.labels) for i, row in enumerate(result.rows)
    )
    return _respond_in_pieces(
        openai_bodies.iterate_list_json(head, "data", data),
        response_headers(fanout.ticket, result.timing),
    )


async def serve_rerank(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: RerankRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    """Wait for the scores and return the response of /v1/rerank, the most relevant document first.

    Raises `MillstreamError` if the request is refused or fails, and `ClientGone` if the client
    leaves.
    """
    async with submit_choices(context, request, principal, *submissions) as fanout:
        result = await ResultRows.collect(fanout)
    documents = None if body.return_documents is False else body.documents
    head = openai_bodies.rerank_head(fanout.ticket.request_id, body.model, result.usage)
    results = openai_bodies.rank_documents(result.rows, documents, body.top_n)
    return _respond_in_pieces(
        openai_bodies.iterate_list_json(head, "results", results),
        response_headers(fanout.ticket, result.timing),
    )


def _respond_in_pieces(parts: Iterator[bytes], headers: dict[str, str]) -> Response:
    """A whole response if it is short; else one in pieces, between which the event loop goes on."""
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
    """Join parts to pieces of `MIN_PIECE_BYTES` or little more, which take short to encode."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= MIN_PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)
