"""Renders the results of a batch, in the order of its input."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from api.batches.batch_line import (
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
from streams.records.file_records import StoredFile
from streams.records.file_store import FileStore
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.item_results import ItemResult, make_request_id
from streams.records.jobs.result_store import read_result

READS_AT_ONCE = 64


class RenderedLine(NamedTuple):
    """A line of the output file, or of the error file."""

    data: bytes
    is_error: bool


async def render_lines(
    broker: Broker,
    registry: Registry,
    batch: Batch,
    source: StoredFile,
    unrun: dict[str, str] | None = None,
) -> AsyncIterator[RenderedLine]:
    """Yield the rendered results of a batch, in the order of its input.

    Lines without a result get the error `unrun`; without one they are left out. `READS_AT_ONCE`
    results are read together. Raises `ChunkMissing` or `BrokerUnavailable`.
    """
    group: list[InputLine] = []
    async for line in iterate_lines(FileStore(broker), source):
        group.append(line)
        if len(group) == READS_AT_ONCE:
            for rendered in await _render_group(broker, registry, batch, group, unrun):
                yield rendered
            group = []
    for rendered in await _render_group(broker, registry, batch, group, unrun):
        yield rendered


async def render_line(
    broker: Broker, registry: Registry, batch: Batch, source: InputLine
) -> RenderedLine | None:
    """Return the rendered result of one line; None while it has none.

    Raises `BrokerUnavailable`.
    """
    found = await _render_group(broker, registry, batch, [source], None)
    return found[0] if found else None


async def _render_group(
    broker: Broker,
    registry: Registry,
    batch: Batch,
    group: list[InputLine],
    unrun: dict[str, str] | None,
) -> list[RenderedLine]:
    reads = (read_result(broker, batch.tenant, batch.id, line.index) for line in group)
    results = await asyncio.gather(*reads)
    return [
        _render(registry, batch, source, result, unrun)
        for source, result in zip(group, results, strict=True)
        if result or unrun
    ]


def _render(
    registry: Registry,
    batch: Batch,
    source: InputLine,
    result: ItemResult | None,
    unrun: dict[str, str] | None,
) -> RenderedLine:
    assert source.data, "checked before the batch began"
    line = parse_line(source.data, batch.endpoint)
    if result:
        data = render_result(line, result, _find_model(registry, line))
        return RenderedLine(data, is_error=bool(result.code))
    assert unrun
    request_id = make_request_id(batch.secret, source.index, 1)
    return RenderedLine(render_unrun(line, request_id, unrun), is_error=True)


def _find_model(registry: Registry, line: BatchLine) -> Model | None:
    try:
        return registry.resolve_target(str(line.body.get("model")))[0]
    except ModelNotFound:
        return None  # removed since
