"""Logging of every process: one JSON object per line on stderr, or colours on a terminal.

Credentials in URLs are left out of every line, wherever they come from.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import Processor

from streams.base_settings import LogLevel
from streams.server_urls import redact

_SHARED_PROCESSORS: Sequence[Processor] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(level: LogLevel, stream: TextIO = sys.stderr) -> None:
    """Set up logging of this process: write structlog events and `logging` records to `stream`.

    Both have the same format: coloured text if `stream` is a terminal, else one JSON object per
    line. `level` is the least severe level that is written; records of libraries, which use
    `logging`, must also be at least warnings.
    """
    least = getattr(logging, level.upper())
    renderers = _make_renderers(stream)
    structlog.configure(
        processors=[*_SHARED_PROCESSORS, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_make_stdlib_formatter(renderers))
    handler.addFilter(_is_worth_telling)
    logging.basicConfig(level=max(least, logging.WARNING), handlers=[handler], force=True)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """False for what asyncio and uvloop say whenever a server closes a TLS connection of nats-py.

    It means nothing: the connection ends as it should.
    """
    return "returning true from eof_received()" not in str(record.msg)


def _make_renderers(stream: TextIO) -> list[Processor]:
    """Renderers without local variables in tracebacks: these may hold a prompt or a key."""
    if stream.isatty():
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [console, _redact]
    json_lines = structlog.processors.JSONRenderer(_dump_json)
    return [structlog.processors.format_exc_info, json_lines, _redact]


def _redact(logger: object, method: str, line: Any) -> str:
    """Return a rendered line without the credentials of URLs."""
    return redact(str(line))


def _dump_json(event: object, **_: object) -> str:
    return orjson.dumps(event, default=repr).decode()


def _make_stdlib_formatter(renderers: list[Processor]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED_PROCESSORS,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
