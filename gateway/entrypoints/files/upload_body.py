"""Reads a request's body piece by piece, in time and within its limit."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from api.file_bodies import UPLOAD_SECONDS
from gateway.replies.record_queue import ClientGone
from streams.errors import PayloadTooLarge, TooSlow

STALL_SECONDS = 30.0


async def iterate_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield a request's body as it comes in.

    Raises `PayloadTooLarge` once it is known to have more than `limit` bytes, `TooSlow` if nothing
    comes for `STALL_SECONDS` or the whole takes longer than `UPLOAD_SECONDS`, and `ClientGone` if
    the client leaves.
    """
    check_length(request, limit)
    loop, size = asyncio.get_running_loop(), 0
    deadline = loop.time() + UPLOAD_SECONDS
    pieces = request.stream()
    while True:
        try:
            async with asyncio.timeout(min(STALL_SECONDS, deadline - loop.time())):
                piece = await anext(pieces, b"")
        except TimeoutError:
            if loop.time() >= deadline:
                raise TooSlow("the whole body", UPLOAD_SECONDS) from None
            raise TooSlow("more of the body", STALL_SECONDS) from None
        except ClientDisconnect:
            raise ClientGone from None
        if not piece:
            return
        size += len(piece)
        if size > limit:
            raise PayloadTooLarge(size, limit)
        yield piece


def check_length(request: Request, limit: int) -> int | None:
    """Return the announced length of a body in bytes, None if it has none.

    Raises `PayloadTooLarge` if it is over the limit.
    """
    announced = request.headers.get("content-length", "")
    if not announced.isdigit():
        return None
    if int(announced) > limit:
        raise PayloadTooLarge(int(announced), limit)
    return int(announced)
