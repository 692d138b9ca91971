"""The commands `millstream batch submit`, `status`, `watch`, `results`, `items`, `cancel` …"""

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

from millstream.admin.console_output import make_console, make_whole_table
from millstream.batch.batch_client import BatchClient, JsonBody
from millstream.batch.settings import (
    Action,
    ItemSettings,
    OneBatchSettings,
    ResultsSettings,
    SubmitSettings,
)

POLL_SECONDS = 0.5
ENDED = ("completed", "failed", "expired", "cancelled")
_SHOWN = ("id", "status", "endpoint", "model", "output_file_id", "error_file_id")


async def submit(settings: SubmitSettings, stop: asyncio.Event) -> None:
    """Store the file and create its batch; print the batch. Raises as `BatchClient` does."""
    client = BatchClient(settings)
    file = await asyncio.to_thread(_upload, client, settings)
    batch = {
        "input_file_id": file["id"],
        "endpoint": settings.endpoint,
        "completion_window": settings.window,
        **({"not_before": settings.not_before} if settings.not_before else {}),
    }
    made = await asyncio.to_thread(client.call, "POST", "/v1/batches", batch)
    _print_batch(made, as_json=settings.as_json)


def _upload(client: BatchClient, settings: SubmitSettings) -> JsonBody:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(settings.file.name, total=settings.file.stat().st_size)
        return client.upload(settings.file, lambda size: progress.advance(task, size))


async def status(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Print a batch; raises as `BatchClient` does."""
    client = BatchClient(settings)
    found = await asyncio.to_thread(client.call, "GET", _path(settings.id))
    _print_batch(found, as_json=settings.as_json)


async def watch(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Show how far a batch is until it has ended; with `--json` a line for each change.

    Raises as `BatchClient` does, and `SystemExit` with the status 1 if it has not completed.
    """
    client, last = BatchClient(settings), ""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with ExitStack() as stack:
        counted = TextColumn("{task.fields[counts]}")
        progress = Progress(*columns, counted, console=Console(stderr=True))
        stack.enter_context(nullcontext() if settings.as_json else progress)
        task = progress.add_task("validating", total=None, counts="")
        while not stop.is_set():
            batch = await asyncio.to_thread(client.call, "GET", _path(settings.id))
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"]
            shown = f"{done}/{total}, {counts['failed']} failed"
            progress.update(
                task, description=batch["status"], completed=done, total=total or None, counts=shown
            )
            if settings.as_json and (line := json.dumps(batch)) != last:
                print(line, flush=True)
                last = line
            if batch["status"] in ENDED:
                break
            await asyncio.sleep(POLL_SECONDS)
        else:
            return
    if not settings.as_json:
        _print_batch(batch, as_json=False)
    if batch["status"] != "completed":
        raise SystemExit(1)


async def results(settings: ResultsSettings, stop: asyncio.Event) -> None:
    """Print, or write into a file, the output lines of all lines that have ended.

    Those of the output and of the error file are merged, in the order of the input. Raises as
    `BatchClient` does, and `OSError` if the file cannot be written.
    """
    client = BatchClient(settings)
    lines = client.read_lines(f"{_path(settings.id)}/results")
    await asyncio.to_thread(_write_lines, lines, settings)


def _write_lines(lines: Iterable[bytes], settings: ResultsSettings) -> None:
    if settings.output is None:
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return
    with settings.output.open("wb") as out:
        for line in lines:
            out.write(line)


async def items(settings: ItemSettings, stop: asyncio.Event) -> None:
    """Print one line of a batch and what has come of it; raises as `BatchClient` does."""
    client = BatchClient(settings)
    path = f"{_path(settings.id)}/items/{quote(settings.item, safe='')}"
    found = await asyncio.to_thread(client.call, "GET", path)
    print(json.dumps(found, indent=None if settings.as_json else 2))


async def cancel(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """End a batch; what had ended is kept. Raises as `BatchClient` does."""
    await _change(settings, "cancel")


async def pause(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Publish no further lines of a batch; raises as `BatchClient` does."""
    await _change(settings, "pause")


async def resume(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Go on with a batch that was paused; raises as `BatchClient` does."""
    await _change(settings, "resume")


async def _change(settings: OneBatchSettings, action: Action) -> None:
    client = BatchClient(settings)
    found = await asyncio.to_thread(client.call, "POST", f"{_path(settings.id)}/{action}")
    _print_batch(found, as_json=settings.as_json)


def _path(batch: str) -> str:
    return f"/v1/batches/{quote(batch, safe='')}"


def _print_batch(batch: JsonBody, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(batch))
        return
    table = make_whole_table()
    for name in _SHOWN:
        if batch[name] is not None:
            table.add_row(name, str(batch[name]))
    counts = batch["request_counts"]
    table.add_row("lines", ", ".join(f"{count} {name}" for name, count in counts.items()))
    for error in (batch["errors"] or {"data": []})["data"]:
        line = "" if error["line"] is None else f"line {error['line']}: "
        table.add_row("error", f"{line}{error['message']}")
    make_console().print(table)
