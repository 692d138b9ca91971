"""`/v1/files`: send, list, read and delete files, as the OpenAI SDK does."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from secrets import token_hex
from urllib.parse import quote

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import file_bodies
from api.authentication.authenticator import Principal
from api.openai_bodies import page_body
from api.schemas.files import ExpiresAfter
from api.schemas.parsing import parse
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import request_key
from gateway.entrypoints.files.multipart_reader import FileBegin
from gateway.entrypoints.files.openapi_paths import MAX_PAGE
from gateway.entrypoints.files.transfers import FORM_BYTES, receive_form, transfer
from gateway.entrypoints.files.upload_body import check_length
from gateway.entrypoints.plain_responses import cut_page, render_json, respond_in_pieces
from gateway.metrics import FILE_BYTES
from gateway.replies.record_queue import ClientGone
from streams.errors import BadRequest, MillstreamError, PayloadTooLarge, UnknownField
from streams.records.files.file_records import FilePart, FileState, StoredFile
from streams.records.files.file_store import PartWriter

log = structlog.get_logger()

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
CLIENT_GONE = 499  # nobody gets this response


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of `/v1/files`."""
    file = "/v1/files/{file}"
    return [
        Route("/v1/files", partial(_create, context), methods=["POST"]),
        Route("/v1/files", partial(_list, context), methods=["GET"]),
        Route(file, partial(_show, context), methods=["GET"]),
        Route(file, partial(_delete, context), methods=["DELETE"]),
        Route(f"{file}/content", partial(_read, context), methods=["GET"]),
    ]


async def _create(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    context.check_not_draining()
    upload = _NewFile(context, principal, request)
    try:
        with transfer(context, principal) as check:
            limit = context.settings.max_file_bytes
            file = upload.complete(*await receive_form(request, limit, "file", check, upload.begin))
            stored = await context.files.change(
                file, lambda it: replace(file, revision=it.revision)
            )
    except ClientGone:
        await upload.abandon("client_left")
        return Response(status_code=CLIENT_GONE)
    except MillstreamError as error:
        await upload.abandon(error.code)
        raise
    FILE_BYTES.labels("in").inc(stored.size)
    log.info(
        "file_stored", tenant=stored.tenant, file=file_bodies.file_id(stored), bytes=stored.size
    )
    return render_json(file_bodies.file_object(stored))


class _NewFile:
    """A file that is being sent in one request, with its record once there is one."""

    def __init__(self, context: GatewayContext, principal: Principal, request: Request) -> None:
        self._context, self._principal = context, principal
        limit = context.settings.max_file_bytes
        self._announced = check_length(request, limit + FORM_BYTES)
        self._file: StoredFile | None = None

    async def begin(self, head: FileBegin, fields: dict[str, str]) -> PartWriter:
        """Store the record of the pending file, and return the writer of its bytes."""
        if "purpose" in fields:
            file_bodies.check_file(head.filename, fields["purpose"])
        settings, tenant = self._context.settings, self._principal.tenant
        now, name = int(self._context.broker.clock.now()), token_hex(12)
        size = settings.max_file_bytes if self._announced is None else self._announced
        file = StoredFile(
            tenant=tenant.name,
            id=name,
            filename=head.filename,
            purpose=fields.get("purpose", ""),
            created_at=now,
            size=min(size, settings.max_file_bytes),
            expires_at=now + file_bodies.UPLOAD_SECONDS,
            mime_type=head.content_type,
            parts=(FilePart(name),),
            key=self._principal.key.id,
        )
        self._file = await self._context.files.create(file, tenant.max_stored_bytes)
        return self._context.files.write_part(tenant.name, name)

    def complete(self, fields: dict[str, str], part: FilePart) -> StoredFile:
        """Return the record of the file that is ready; raises `BadRequest` for a wrong form."""
        assert self._file
        limit = self._context.settings.max_file_bytes
        if part.size > limit:
            raise PayloadTooLarge(part.size, limit)
        if not part.size:
            raise BadRequest("the file is empty", "file")
        if unknown := fields.keys() - set(FIELDS):
            name = min(unknown)
            raise UnknownField(f"{name!r} is none of: {', '.join(FIELDS)}", name)
        purpose = fields.get("purpose", "")
        file_bodies.check_file(self._file.filename, purpose)
        kept = file_bodies.expiry_of(purpose, _parse_expiry(fields))
        return self._file.with_purpose(purpose, kept).as_ready((part,))

    async def abandon(self, reason: str) -> None:
        """Delete the record, if there is one; if the broker does not answer, the file expires."""
        if self._file is None:
            return
        log.info("upload_abandoned", tenant=self._file.tenant, reason=reason)
        try:
            await self._context.files.delete(self._file)
        except MillstreamError as error:
            log.warning("file_not_deleted", tenant=self._file.tenant, reason=str(error))


def _parse_expiry(fields: dict[str, str]) -> ExpiresAfter | None:
    _, anchor, seconds = (fields.get(name) for name in FIELDS)
    if anchor is None and seconds is None:
        return None
    if seconds is None or not seconds.isdecimal():
        raise BadRequest(f"{FIELDS[2]} is {seconds!r}, not a number of seconds", FIELDS[2])
    return parse(ExpiresAfter, {"anchor": anchor, "seconds": int(seconds)})


async def _list(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    query = request.query_params
    files = [
        file
        for file in await context.files.list(principal.tenant.name)
        if file.state is FileState.READY and query.get("purpose", file.purpose) == file.purpose
    ]
    if _choice(query.get("order", "desc"), ("asc", "desc"), "order") == "desc":
        files.reverse()
    page, has_more = cut_page(files, file_bodies.file_id, query, MAX_PAGE, MAX_PAGE)
    data = [file_bodies.file_object(file) for file in page]
    return render_json(page_body(data, has_more=has_more))


def _choice(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise BadRequest(f"{name} is {value!r}, not one of: {', '.join(allowed)}", name)
    return value


async def find_ready(context: GatewayContext, tenant: str, told: str) -> StoredFile:
    """Return a tenant's file by the id that a client has told; raises `NotFound` without one."""
    found = await context.files.find(tenant, file_bodies.parse_file_id(told))
    if found is None or found.state is not FileState.READY:
        raise file_bodies.not_found("file", told)
    return found


async def _show(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    file = await find_ready(context, principal.tenant.name, request.path_params["file"])
    return render_json(file_bodies.file_object(file))


async def _delete(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    file = await find_ready(context, principal.tenant.name, request.path_params["file"])
    await context.files.delete(file)
    log.info("file_deleted", tenant=file.tenant, file=file_bodies.file_id(file))
    return render_json(file_bodies.deleted_file(file))


async def _read(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    file = await find_ready(context, principal.tenant.name, request.path_params["file"])
    pieces = _iterate_content(context, principal, file)
    headers = {
        "Content-Length": str(file.size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return await respond_in_pieces(pieces, "application/octet-stream", headers)


async def _iterate_content(
    context: GatewayContext, principal: Principal, file: StoredFile
) -> AsyncIterator[bytes]:
    with transfer(context, principal) as check:
        async for piece in context.files.read(file):
            check()
            yield piece
            FILE_BYTES.labels("out").inc(len(piece))
