"""The commands `millstream audit` and `millstream audit export`."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import islice
from typing import Any

import orjson

from millstream.admin.admin_client import AdminClient, JsonBody, admin_client
from millstream.admin.console_output import make_console
from millstream.audit import exported_files
from millstream.audit.record_text import render_record
from millstream.audit.settings import AuditExportSettings, AuditSettings
from streams.records.audit_chain import ChainHead, ChainVerifier

_FOLLOW_SECONDS = 1.0


async def run(settings: AuditSettings, stop: asyncio.Event) -> None:
    """Print what was changed, in order, or check the chain.

    Raises as `AdminClient.call`, and `ChainBroken` at the first record that is not as it was
    written.
    """
    if settings.verify_chain:
        await _verify(settings)
    else:
        async with admin_client(settings) as admin:
            await _show(admin, settings, stop)


async def export(settings: AuditExportSettings, stop: asyncio.Event) -> None:
    """Write the records that the directory lacks into one more file of it.

    Raises as `AdminClient.call`, `ChainBroken` if they do not follow those in the directory, and
    OSError if the file cannot be written.
    """
    files = await asyncio.to_thread(exported_files.list_files, settings.directory)
    last = files[-1].head if files else None
    verifier, lines, first = ChainVerifier(after=last), [], 0
    async with admin_client(settings) as admin:
        async for page in _read_pages(admin, after=last.sequence if last else 0):
            for record in page:
                verifier.add(line := orjson.dumps(record))
                first = first or record["sequence"]
                lines.append(line)
    if verifier.head and lines:
        write = exported_files.write_file
        await asyncio.to_thread(write, settings.directory, lines, first, verifier.head)
    _print_head(verifier, settings.as_json, "exported")


async def _verify(settings: AuditSettings) -> None:
    known = [ChainHead.parse(head) for head in settings.head]
    if settings.directory:
        verifier = await asyncio.to_thread(exported_files.verify_files, settings.directory, known)
    else:
        verifier = ChainVerifier(known)
        async with admin_client(settings) as admin:
            async for page in _read_pages(admin):
                for record in page:
                    verifier.add(orjson.dumps(record))
        verifier.finish()
    _print_head(verifier, settings.as_json, "verified")


def _print_head(verifier: ChainVerifier, as_json: bool, done: str) -> None:
    head = str(verifier.head) if verifier.head else None
    if as_json:
        print(json.dumps({done: verifier.records, "head": head}))
    else:
        make_console().print(
            f"{done}: {verifier.records} records; head {head or 'of an empty log'}"
        )


async def _show(admin: AdminClient, settings: AuditSettings, stop: asyncio.Event) -> None:
    wanted = {"who": settings.who, "what": settings.what, "since": settings.since}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    after, left, found = settings.after, settings.limit, False
    while True:
        answer = await admin.call("audit.list", after=after, **chosen)
        after = answer["last"]
        found = found or bool(answer["data"])
        for record in islice(answer["data"], left):
            print(json.dumps(record) if settings.as_json else render_record(record), flush=True)
        left = None if left is None else max(0, left - len(answer["data"]))
        if left == 0 or (not answer["has_more"] and not settings.follow):
            break
        if not answer["has_more"]:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FOLLOW_SECONDS):
                    await stop.wait()
        if stop.is_set():
            break
    if not found:
        print("millstream: the log has no such record", file=sys.stderr)


async def _read_pages(admin: AdminClient, after: int = 0) -> AsyncIterator[list[JsonBody]]:
    """Yield all records above a sequence, page by page."""
    while True:
        answer: dict[str, Any] = await admin.call("audit.list", after=after, limit=1000)
        yield answer["data"]
        if not answer["has_more"]:
            return
        after = answer["last"]
