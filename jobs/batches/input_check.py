"""Checks the input file of a batch: every line by itself, and that no two have the same id."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api.batches.batch_line import InputLine, WrongLine, parse_line
from api.batches.input_lines import MAX_LINE_BYTES, iterate_lines
from api.batches.line_index import LinePlace, hash_id
from streams.records.files.file_records import StoredFile
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_records import MAX_ERRORS

_BREATH_LINES = 200  # checked before others get a turn of the event loop: some 2 ms


@dataclass
class InputReport:
    """Result of a check: the errors of a file, at most `MAX_ERRORS` (100), and what is in it.

    `places` has where each line is, by the hash of its id.
    """

    total: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    places: dict[bytes, LinePlace] = field(default_factory=dict)

    def add_error(self, code: str, message: str, line: int | None, param: str | None) -> None:
        """Note one thing that is wrong; `line` counts from 1."""
        if len(self.errors) < MAX_ERRORS:
            error = {"code": code, "message": message, "line": line, "param": param}
            self.errors.append(error)


async def check_input(
    files: FileStore, file: StoredFile, endpoint: str, max_lines: int
) -> InputReport:
    """Read a file to its end; raises `ChunkMissing` or `BrokerUnavailable`.

    Of a line that is taken only its shape is checked: a body that its endpoint would refuse becomes
    a line of the error file. A hash of each line's id is kept, and where the line is.
    """
    report = InputReport()
    async for line in iterate_lines(files, file):
        report.total += 1
        if report.total > max_lines:
            message = f"the file has more than {max_lines} lines"
            report.add_error("too_many_tasks", message, None, None)
            return report
        _check_line(line, endpoint, report)
        if not line.index % _BREATH_LINES:
            await asyncio.sleep(0)
    if not report.total:
        report.add_error("empty_file", "the file has no lines", None, None)
    return report


def _check_line(line: InputLine, endpoint: str, report: InputReport) -> None:
    number = line.index + 1
    if line.data is None:
        message = f"the line has more than {MAX_LINE_BYTES} bytes"
        report.add_error("line_too_long", message, number, None)
        return
    try:
        parsed = parse_line(line.data, endpoint)
    except WrongLine as error:
        report.add_error(error.reason, error.message, number, error.field)
        return
    if len(report.models) < 2 and isinstance(model := parsed.body.get("model"), str):
        report.models.add(model)
    key = hash_id(parsed.custom_id)
    if key in report.places:
        message = f"the custom_id {parsed.custom_id!r} is that of an earlier line"
        report.add_error("duplicate_custom_id", message, number, "custom_id")
    report.places[key] = LinePlace(line.index, line.offset, line.end)


def common_model(models: Sequence[str] | set[str]) -> str:
    """Return the one model that all lines name; empty if they name several."""
    return next(iter(models)) if len(models) == 1 else ""
