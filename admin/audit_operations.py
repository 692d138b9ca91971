"""Handler of the operation on the audit log; it returns JSON objects."""

from collections.abc import Mapping
from typing import Any

import orjson

from admin.operation_table import AuditPageArguments
from admin.operations import Handler, JsonBody
from streams.records.audit_log import AuditLog

_PAGE_BYTES = 400_000  # of the records in one answer
_MOST_READ = 20_000  # records for one answer, however few of them are wanted


class AuditOperations:
    """The operation that reads the audit log; raises `BrokerUnavailable`."""

    def __init__(self, audit_log: AuditLog) -> None:
        self._log = audit_log

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {"audit.list": self._list}

    async def _list(self, wanted: AuditPageArguments) -> JsonBody:
        """Answer with a page; `last` is the sequence up to which the log was read for it."""
        data: list[JsonBody] = []
        last, size, read = wanted.after, 0, 0
        while read < _MOST_READ:
            page = await self._log.read(last)
            for message in page.messages:
                record = orjson.loads(message.data)
                if _is_wanted(record, wanted):
                    size += len(message.data)
                    if len(data) == wanted.limit or (data and size > _PAGE_BYTES):
                        return _make_answer(data, last, has_more=True)
                    data.append(record)
                last, read = message.seq, read + 1
            if not page.remaining:
                return _make_answer(data, last, has_more=False)
        return _make_answer(data, last, has_more=True)


def _make_answer(data: list[JsonBody], last: int, *, has_more: bool) -> JsonBody:
    return {"object": "list", "data": data, "has_more": has_more, "last": last}


def _is_wanted(record: Mapping[str, Any], wanted: AuditPageArguments) -> bool:
    return (
        wanted.who in (None, record["who"])
        and (wanted.since is None or record["at"] >= wanted.since * 1000)
        and (wanted.what is None or _is_about(record, wanted.what))
    )


def _is_about(record: Mapping[str, Any], what: str) -> bool:
    """True if it is the operation or the record, or the first word of one of them."""
    operation, target = record["operation"], record["target"]
    return what in (operation, operation.partition(".")[0], target, target.partition(" ")[0])
