"""`/v1/uploads`: send a file in parts, as the OpenAI SDK does."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import file_bodies
from api.authentication.authenticator import Principal
from api.schemas.fields import Body
from api.schemas.files import MAX_PARTS, CompleteUpload, CreateUpload
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.files.file_routes import CLIENT_GONE
from gateway.entrypoints.files.multipart_reader import FileBegin
from gateway.entrypoints.files.transfers import receive_form, transfer
from gateway.entrypoints.plain_responses import render_json
from gateway.metrics import FILE_BYTES
from gateway.replies.record_queue import ClientGone
from registry.tenant_records import Tenant
from streams.errors import BadRequest, PayloadTooLarge
from streams.records.files.file_records import FilePart, FileState, StoredFile
from streams.records.files.file_store import PartWriter

log = structlog.get_logger()

MAX_PART_BYTES = 64 * 2**20
B = TypeVar("B", bound=Body)


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of `/v1/uploads`."""
    upload = "/v1/uploads/{upload}"
    routes = {
        "/v1/uploads": _create,
        f"{upload}/parts": _add_part,
        f"{upload}/complete": _complete,
        f"{upload}/cancel": _cancel,
    }
    return [Route(path, partial(each, context), methods=["POST"]) for path, each in routes.items()]


async def _create(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    body = await _read(context, request, CreateUpload)
    stored = await create_upload(context, principal.tenant, principal.key.id, body)
    return render_json(file_bodies.upload_object(stored))


async def create_upload(
    context: GatewayContext, tenant: Tenant, key: str, body: CreateUpload
) -> StoredFile:
    """Store the record of a file that will come in parts, and return it.

    `key` is the id of the API key, empty without one. Raises `BadRequest`, and as
    `FileStore.create` does.
    """
    file_bodies.check_file(body.filename, body.purpose)
    limit = context.settings.max_file_bytes
    if body.bytes > limit:
        raise PayloadTooLarge(body.bytes, limit)
    now = int(context.broker.clock.now())
    file = StoredFile(
        tenant=tenant.name,
        id=token_hex(12),
        filename=body.filename,
        purpose=body.purpose,
        created_at=now,
        size=body.bytes,
        expires_at=now + file_bodies.UPLOAD_SECONDS,
        expires_after_seconds=file_bodies.expiry_of(body.purpose, body.expires_after),
        mime_type=body.mime_type,
        key=key,
    )
    return await context.files.create(file, tenant.max_stored_bytes)


async def _read(context: GatewayContext, request: Request, schema: type[B]) -> B:
    body = await read_body_in_time(request, context.settings.max_body_bytes)
    return parse(schema, decode(body))


async def _add_part(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    context.check_not_draining()
    tenant, told = principal.tenant.name, request.path_params["upload"]
    upload = await _find_pending(context, tenant, told)

    async def begin(head: FileBegin, fields: dict[str, str]) -> PartWriter:
        return await _begin_part(context, upload, told)

    try:
        with transfer(context, principal) as check:
            _, part = await receive_form(request, MAX_PART_BYTES, "data", check, begin)
            stored = await _store_part(context, tenant, part, told)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    now = int(context.broker.clock.now())
    return render_json(file_bodies.part_object(stored, part.id, now))


async def add_part(context: GatewayContext, tenant: str, told: str, data: bytes) -> FilePart:
    """Store a part of a tenant's upload, and return it; raises as `FileStore.change` does."""
    upload = await _find_pending(context, tenant, told)
    async with await _begin_part(context, upload, told) as writer:
        await writer.write(data)
        part = await writer.finish()
    await _store_part(context, tenant, part, told)
    return part


async def _begin_part(context: GatewayContext, upload: StoredFile, told: str) -> PartWriter:
    part_id = token_hex(12)
    await context.files.change(upload, lambda it: _announce_part(it, part_id, told))
    return context.files.write_part(upload.tenant, part_id)


async def _store_part(
    context: GatewayContext, tenant: str, part: FilePart, told: str
) -> StoredFile:
    if part.size > MAX_PART_BYTES:
        raise PayloadTooLarge(part.size, MAX_PART_BYTES)
    current = await _find_pending(context, tenant, told)
    FILE_BYTES.labels("in").inc(part.size)
    return await context.files.change(current, lambda it: _add(it, part, told))


async def _find_pending(context: GatewayContext, tenant: str, told: str) -> StoredFile:
    found = await _find(context, tenant, told)
    _check_pending(found, told)
    return found


async def _find(context: GatewayContext, tenant: str, told: str) -> StoredFile:
    found = await context.files.find(tenant, file_bodies.parse_upload_id(told))
    if found is None:
        raise file_bodies.not_found("upload", told)
    return found


def _check_pending(upload: StoredFile, told: str) -> None:
    if upload.state is not FileState.PENDING:
        raise BadRequest(f"the upload {told!r} is completed", "upload_id")


def _announce_part(upload: StoredFile, part_id: str, told: str) -> StoredFile:
    _check_pending(upload, told)
    if len(upload.parts) >= MAX_PARTS:
        raise BadRequest(f"the upload has {MAX_PARTS} parts, the most there may be")
    return upload.with_part(FilePart(part_id))


def _add(upload: StoredFile, part: FilePart, told: str) -> StoredFile:
    """Return the record with a whole part; one that was sent twice may be in it twice."""
    _check_pending(upload, told)
    total = sum(each.size for each in upload.parts) + part.size
    if total > upload.size + MAX_PART_BYTES:
        raise BadRequest(
            f"the parts have {total} bytes, and the upload was announced with {upload.size}",
            "data",
        )
    return upload.with_part(part)


async def _complete(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    body = await _read(context, request, CompleteUpload)
    tenant, told = principal.tenant.name, request.path_params["upload"]

    async def check_sum(ready: StoredFile) -> None:
        if body.md5:
            await _check_md5(context, principal, ready, body.md5.lower())

    stored = await complete_upload(context, tenant, told, body.part_ids, check_sum)
    return render_json(file_bodies.upload_object(stored))


async def _unchecked(ready: StoredFile) -> None:
    """The bytes of a file are not looked at."""


async def complete_upload(
    context: GatewayContext,
    tenant: str,
    told: str,
    part_ids: Sequence[str],
    check: Callable[[StoredFile], Awaitable[None]] = _unchecked,
) -> StoredFile:
    """Make a file of these parts of a tenant's upload, and return its record. Idempotent.

    `check` is given the record before it is stored. Raises `BadRequest`, `NotFound`, what `check`
    raises, and as `FileStore.change` does.
    """
    wanted = [file_bodies.parse_part_id(each) for each in part_ids]
    upload = await _find(context, tenant, told)
    if upload.state is FileState.READY and [part.id for part in upload.parts] == wanted:
        return upload  # it is asked for again
    await check(_join(upload, wanted, told))
    stored = await context.files.change(upload, lambda it: _join(it, wanted, told))
    log.info(
        "file_stored", tenant=stored.tenant, file=file_bodies.file_id(stored), bytes=stored.size
    )
    return stored


def _join(upload: StoredFile, wanted: list[str], told: str) -> StoredFile:
    """Return the record of the file that consists of the wanted parts, in their order."""
    _check_pending(upload, told)
    if len(set(wanted)) < len(wanted):
        raise BadRequest("a part is named twice", "part_ids")
    parts = [upload.find_part(each) for each in wanted]
    for name, part in zip(wanted, parts, strict=True):
        if part is None or not part.is_whole:
            raise BadRequest(f"the upload has no part {file_bodies.part_id(name)!r}", "part_ids")
    whole = tuple(part for part in parts if part)
    if (size := sum(part.size for part in whole)) != upload.size:
        raise BadRequest(
            f"the parts have {size} bytes, and the upload was announced with {upload.size}",
            "part_ids",
        )
    return upload.as_ready(whole)


async def _check_md5(
    context: GatewayContext, principal: Principal, file: StoredFile, wanted: str
) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with transfer(context, principal) as check:
        async for piece in context.files.read(file):
            check()
            digest.update(piece)
    if digest.hexdigest() != wanted:
        raise BadRequest(f"the MD5 of the parts is {digest.hexdigest()}, not {wanted}", "md5")


async def _cancel(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    told = request.path_params["upload"]
    upload = await _find_pending(context, principal.tenant.name, told)
    await context.files.delete(upload)
    cancelled = replace(upload, state=FileState.DELETED)
    return render_json(file_bodies.upload_object(cancelled))
