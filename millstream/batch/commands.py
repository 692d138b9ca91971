"""The commands `millstream batch submit`, `list`, `status`, `watch`, `results`, `items` …"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain
from urllib.parse import quote, urlencode

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.batch.settings import (
    Action,
    EstimateSettings,
    ItemSettings,
    ListBatchesSettings,
    OneBatchSettings,
    ResultsSettings,
    RetrySettings,
    SubmitSettings,
)
from millstream.gateway_client import GatewayClient, GatewayRefused, JsonBody
from streams.usage_accounts import NO_CURRENCY

POLL_SECONDS = 0.5
ENDED = ("completed", "failed", "expired", "cancelled")
_SHOWN = ("id", "retry_of", "status", "endpoint", "model", "output_file_id", "error_file_id")


async def submit(settings: SubmitSettings, stop: asyncio.Event) -> None:
    """Store the file and create its batch; print the batch.

    A file whose batch is refused is deleted again. Raises as `GatewayClient` does.
    """
    client = GatewayClient(settings)
    file = await asyncio.to_thread(_upload, client, settings)
    batch = {"input_file_id": file["id"], "endpoint": settings.endpoint, **settings.options}
    try:
        made = await asyncio.to_thread(client.call, "POST", "/v1/batches", batch)
    except GatewayRefused:
        await asyncio.to_thread(client.call, "DELETE", f"/v1/files/{file['id']}")
        raise
    _print_batch(made, as_json=settings.as_json)


def _upload(client: GatewayClient, settings: SubmitSettings | EstimateSettings) -> JsonBody:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(settings.file.name, total=settings.file.stat().st_size)
        return client.upload(settings.file, lambda size: progress.advance(task, size))


async def estimate(settings: EstimateSettings, stop: asyncio.Event) -> None:
    """Print what a batch of a file may take; the file is stored for that time alone.

    Raises as `GatewayClient` does.
    """
    client = GatewayClient(settings)
    file = await asyncio.to_thread(_upload, client, settings)
    asked = {"input_file_id": file["id"], "endpoint": settings.endpoint}
    try:
        found = await asyncio.to_thread(client.call, "POST", "/v1/batches/estimate", asked)
    finally:
        await asyncio.to_thread(client.call, "DELETE", f"/v1/files/{file['id']}")
    if settings.as_json:
        print(json.dumps(found))
    else:
        make_console().print(_estimate_table(found))


def _estimate_table(found: JsonBody) -> Table:
    cost, tokens, size = found["cost"], found["completion_tokens"], found["result_bytes"]
    kinds = [f"{count} of {name}" for name, count in found["models"].items()]
    if found["unusable_lines"]:
        kinds.append(f"{found['unusable_lines']} that no model would answer")
    table = make_whole_table()
    table.add_row("lines", f"{found['lines']}: {', '.join(kinds)}")
    table.add_row("prompt tokens", f"some {found['prompt_tokens']}")
    table.add_row("generated tokens", _range(tokens["expected"], tokens["at_most"]))
    table.add_row("cost", _describe_cost(cost))
    if found["seconds"] is not None:
        table.add_row("time", f"some {found['seconds']} s")
    table.add_row("results", f"at most {size['at_most']} bytes, of {size['free']} that are free")
    table.add_row("how", found["basis"])
    return table


def _describe_cost(cost: JsonBody) -> str:
    if cost["currency"] == NO_CURRENCY:
        return "none: no model has a price"
    expected = None if cost["expected"] is None else _amount(cost["expected"])
    return f"{_range(expected, _amount(cost['at_most']))} {cost['currency']}"


def _amount(value: float) -> str:
    return f"{Decimal(str(value)):f}"


def _range(expected: object, at_most: object) -> str:
    return f"at most {at_most}" if expected is None else f"some {expected}, at most {at_most}"


async def list_batches(settings: ListBatchesSettings, stop: asyncio.Event) -> None:
    """Print the tenant's batches, the newest first; raises as `GatewayClient` does."""
    asked = {"limit": settings.limit, **({"after": settings.after} if settings.after else {})}
    path = f"/v1/batches?{urlencode(asked)}"
    found = await asyncio.to_thread(GatewayClient(settings).call, "GET", path)
    if settings.as_json:
        print_json_lines(found["data"])
        return
    table = make_whole_table("id", "status", "endpoint", "created (UTC)", "lines")
    for batch in found["data"]:
        created = datetime.fromtimestamp(batch["created_at"], UTC)
        row = (batch["id"], batch["status"], batch["endpoint"], f"{created:%Y-%m-%d %H:%M}")
        table.add_row(*row, _describe_counts(batch))
    make_console().print(table)


async def status(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Print a batch; raises as `GatewayClient` does."""
    client = GatewayClient(settings)
    found = await asyncio.to_thread(client.call, "GET", _path(settings.id))
    _print_batch(found, as_json=settings.as_json)


async def watch(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Show how far a batch is until it has ended; with `--json` a line for each change.

    Raises as `GatewayClient` does, and `SystemExit` with the status 1 if it has not completed.
    """
    client, last = GatewayClient(settings), ""
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
    `GatewayClient` does, and `OSError` if the file cannot be written.
    """
    client = GatewayClient(settings)
    lines = client.read_lines(f"{_path(settings.id)}/results")
    await asyncio.to_thread(_write_lines, lines, settings)


def _write_lines(lines: Iterator[bytes], settings: ResultsSettings) -> None:
    first = next(lines, b"")  # a call that is refused leaves the file as it is
    if settings.output is None:
        sys.stdout.buffer.writelines(chain([first], lines))
        sys.stdout.buffer.flush()
        return
    with settings.output.open("wb") as out:
        out.writelines(chain([first], lines))


async def items(settings: ItemSettings, stop: asyncio.Event) -> None:
    """Print one line of a batch and what has come of it; raises as `GatewayClient` does."""
    client = GatewayClient(settings)
    path = f"{_path(settings.id)}/items/{quote(settings.item, safe='')}"
    found = await asyncio.to_thread(client.call, "GET", path)
    print(json.dumps(found, indent=None if settings.as_json else 2))


async def cancel(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """End a batch; what had ended is kept. Raises as `GatewayClient` does."""
    await _change(settings, "cancel")


async def retry(settings: RetrySettings, stop: asyncio.Event) -> None:
    """Run the failed lines of a batch as a new one, and print that; raises as `GatewayClient`."""
    path = f"{_path(settings.id)}/retry"
    made = await asyncio.to_thread(GatewayClient(settings).call, "POST", path, settings.options)
    _print_batch(made, as_json=settings.as_json)


async def pause(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Publish no further lines of a batch; raises as `GatewayClient` does."""
    await _change(settings, "pause")


async def resume(settings: OneBatchSettings, stop: asyncio.Event) -> None:
    """Go on with a batch that was paused; raises as `GatewayClient` does."""
    await _change(settings, "resume")


async def _change(settings: OneBatchSettings, action: Action) -> None:
    client = GatewayClient(settings)
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
    for key, value in (batch["metadata"] or {}).items():
        table.add_row("metadata", f"{key}={value}")
    table.add_row("lines", _describe_counts(batch))
    for error in (batch["errors"] or {"data": []})["data"]:
        line = "" if error["line"] is None else f"line {error['line']}: "
        table.add_row("error", f"{line}{error['message']}")
    make_console().print(table)


def _describe_counts(batch: JsonBody) -> str:
    return ", ".join(f"{count} {name}" for name, count in batch["request_counts"].items())
