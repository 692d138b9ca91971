"""Responses that no request of a model has: JSON, pages of lists, and bodies in pieces."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import orjson
from starlette.datastructures import QueryParams
from starlette.responses import Response, StreamingResponse

from streams.errors import BadRequest

T = TypeVar("T")
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def render_json(content: object, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def cut_page(
    items: Sequence[T], id_of: Callable[[T], str], query: QueryParams, default: int, most: int
) -> tuple[Sequence[T], bool]:
    """Return the items that `after` and `limit` of a query ask for, and whether others follow.

    Without `limit` they are `default`. Raises `BadRequest` for an `after` that is in no item, and
    for a `limit` that is not from 1 to `most`.
    """
    if after := query.get("after"):
        ids = [id_of(item) for item in items]
        if after not in ids:
            raise BadRequest(f"after is {after!r}, which is not in this list", "after")
        items = items[ids.index(after) + 1 :]
    told = query.get("limit", str(default))
    if not told.isdecimal() or not 1 <= int(told) <= most:
        raise BadRequest(f"limit is {told!r}, not a number from 1 to {most}", "limit")
    return items[: int(told)], len(items) > int(told)


async def respond_in_pieces(
    pieces: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    """Return a response with a body in pieces; waits for the first one.

    So what cannot be read at all is an error response. Raises what `pieces` raises at its start.
    """
    first = await anext(pieces, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(body(), headers=headers, media_type=media_type)
