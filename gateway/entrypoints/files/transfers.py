"""One transfer of a file: who may make it, and how a form's file gets into the broker."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from starlette.requests import Request

from api.authentication.authenticator import Principal
from gateway.context import GatewayContext
from gateway.entrypoints.files.multipart_reader import FileBegin, FormField, MultipartReader
from gateway.entrypoints.files.upload_body import iterate_body
from streams.errors import BadRequest, MillstreamError
from streams.records.files.file_records import FilePart
from streams.records.files.file_store import PartWriter

FORM_BYTES = 65_536  # of a form beside its file
Check = Callable[[], None]
Begin = Callable[[FileBegin, dict[str, str]], Awaitable[PartWriter]]


@contextmanager
def transfer(context: GatewayContext, principal: Principal) -> Iterator[Check]:
    """Count one transfer of a tenant for the time of the block.

    Yields a function that raises the reason once the principal's key or token has ended. Raises
    `TooManyConnections` or `TooManyTransfers`.
    """
    ended: list[MillstreamError] = []

    def check() -> None:
        if ended:
            raise ended[0]

    with (
        context.connection_limits.admit(principal.tenant),
        context.transfer_slots.take(principal.tenant.name),
        context.watching(principal, "jobs", ended.append),
    ):
        yield check


async def receive_form(
    request: Request, limit: int, file_field: str, check: Check, begin: Begin
) -> tuple[dict[str, str], FilePart]:
    """Store the file of a form, of `limit` bytes at most, while the form comes in.

    `begin` is called with the file's head and the fields before it, and returns the writer. Returns
    all fields, and the part that holds the file's bytes, whole. `file_field` is the name that the
    file must have in the form. Raises as `iterate_body`, `MultipartReader` and `PartWriter` do, and
    what `check` raises; then some chunks may be stored.
    """
    reader = MultipartReader(request.headers.get("content-type", ""))
    fields: dict[str, str] = {}
    writer: PartWriter | None = None
    async with AsyncExitStack() as stack:
        async for piece in iterate_body(request, limit + FORM_BYTES):
            check()
            for event in reader.feed(piece):
                if isinstance(event, FormField):
                    fields[event.name] = event.value
                elif isinstance(event, FileBegin):
                    if event.name != file_field:
                        raise BadRequest(f"the file is called {event.name!r}, not {file_field!r}")
                    writer = await stack.enter_async_context(await begin(event, fields))
                else:
                    assert writer
                    await writer.write(event)
        if not reader.is_complete:
            raise BadRequest("the body ends before the form does")
        if writer is None:
            raise BadRequest("the form has no file", file_field)
        return fields, await writer.finish()
