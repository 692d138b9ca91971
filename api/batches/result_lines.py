"""Renders the results of a batch, in the order of its input."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from api.batches.batch_line import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
    BatchLine,
    InputLine,
    parse_line,
    render_result,
    render_unrun,
)
from api.batches.input_lines import iterate_lines
from registry.models import Model
from registry.store import Registry
from streams.broker.broker_client import Broker
from streams.errors import ModelNotFound
from streams.records.files.file_records import StoredFile
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.item_results import CANCELLED, ItemResult, make_request_id
from streams.records.jobs.result_store import read_current_result, read_result

READS_AT_ONCE = 64


class RenderedLine(NamedTuple):
    """A line of the output file, or of the error file.

    `is_unrun` is True for a line that did not end before its batch did.
    """

    data: bytes
    is_error: bool
    is_unrun: bool = False


async def render_lines(
    broker: Broker,
    registry: Registry,
    batch: Batch,
    source: StoredFile,
    *,
    is_over: bool,
) -> AsyncIterator[RenderedLine]:
    """Yield the rendered results of a batch, in the order of its input.

    Lines without a result are left out until the batch is over; then they have its error for them.
    `READS_AT_ONCE` results are read together. Raises `ChunkMissing` or `BrokerUnavailable`.
    """
    group: list[InputLine] = []
    async for line in iterate_lines(FileStore(broker), source):
        group.append(line)
        if len(group) == READS_AT_ONCE:
            for rendered in await _render_group(broker, registry, batch, group, is_over):
                yield rendered
            group = []
    for rendered in await _render_group(broker, registry, batch, group, is_over):
        yield rendered


async def render_line(
    broker: Broker, registry: Registry, batch: Batch, source: InputLine
) -> RenderedLine | None:
    """Return the rendered result of one line; None while it has none.

    Raises `BrokerUnavailable`.
    """
    result = await read_current_result(broker, batch.tenant, batch.id, source.index)
    if result is None and not batch.status.is_final:
        return None
    return _render(registry, batch, source, result)


async def _render_group(
    broker: Broker,
    registry: Registry,
    batch: Batch,
    group: list[InputLine],
    is_over: bool,
) -> list[RenderedLine]:
    reads = (read_result(broker, batch.tenant, batch.id, line.index) for line in group)
    results = await asyncio.gather(*reads)
    return [
        _render(registry, batch, source, result)
        for source, result in zip(group, results, strict=True)
        if result or is_over
    ]


def _render(
    registry: Registry,
    batch: Batch,
    source: InputLine,
    result: ItemResult | None,
) -> RenderedLine:
    assert source.data, "checked before the batch began"
    line = parse_line(source.data, batch.endpoint)
    if result and result.code != CANCELLED:
        data = render_result(line, result, _find_model(registry, line))
        return RenderedLine(data, is_error=bool(result.code))
    request_id = result.request_id if result else make_request_id(batch.secret, source.index, 1)
    data = render_unrun(line, request_id, _unrun_error(batch))
    return RenderedLine(data, is_error=True, is_unrun=True)


def _unrun_error(batch: Batch) -> dict[str, str]:
    """Return the error of lines that did not end before the batch did."""
    if batch.errors:
        return {name: batch.errors[0][name] for name in ("code", "message")}
    return BATCH_EXPIRED if batch.ran_late else BATCH_CANCELLED


def _find_model(registry: Registry, line: BatchLine) -> Model | None:
    try:
        return registry.resolve_target(str(line.body.get("model")))[0]
    except ModelNotFound:
        return None  # removed since
