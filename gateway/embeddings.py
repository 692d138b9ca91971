"""/v1/embeddings."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from gateway import answers
from gateway.door import Door
from gateway.endpoint import answer_headers
from gateway.exchange import exchange
from gateway.schemas.embeddings import EmbeddingRequest
from gateway.submission import Submission
from registry.tenants import Tenant


async def serve(
    door: Door, request: Request, tenant: Tenant, body: EmbeddingRequest, send: Send
) -> Response:
    """Answer with one vector per input, in order."""
    vectors: list[bytes] = []
    async with exchange(door, request, tenant, Submission.of(body)) as running:
        while (record := await running.next())["type"] != "done":
            vectors += record.get("vectors", ())
    prompt_tokens = record["usage"]["prompt_tokens"]

    async def parts() -> AsyncIterator[bytes]:
        encoding = body.encoding_format or "float"
        for part in answers.embeddings(body.model, vectors, prompt_tokens, encoding):
            yield part

    headers = answer_headers(running.ticket, record["timing"])
    return StreamingResponse(parts(), headers=headers, media_type="application/json")
