"""Checks ledger records where they are read: a stolen worker may write anything on its subjects.

What it writes counts for the tenant and model of the subject, or not at all. Pure.
"""

from dataclasses import fields

import orjson

from streams import subjects
from streams.messages import LedgerRecord
from streams.records.worker_time import WorkerTime

_TIMES = frozenset({"accepted", "finished", "first", "deadline", "since", "until"})
_MAX_TIME = 253_402_300_799_999  # milliseconds of the epoch, at the end of the year 9999
_MAX_NUMBER = 2**63 - 1
_MAX_CHARGE_BITS = 200


class ForgedRecord(ValueError):
    """A record of the ledger has values that no service writes there."""


def unpack_stored_record(subject: str, data: bytes) -> LedgerRecord:
    """Return the ledger record that is stored, or heard, on a subject.

    Raises `ForgedRecord` if it names another tenant or model than its subject, if a field has a
    value of another type or an absurd one, or if the bytes are none.
    """
    try:
        record = LedgerRecord.unpack(data)
        _check_values(record)
        _check_subject(subject, subjects.ledger(record.tenant, record.model))
        orjson.dumps([record.earlier_attempts, record.goal_ms, record.warm])
        if abs(record.charge).bit_length() > _MAX_CHARGE_BITS:
            raise ValueError(f"its charge is above 2^{_MAX_CHARGE_BITS}")
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ForgedRecord(str(error)) from error
    return record


def unpack_stored_time(subject: str, data: bytes) -> WorkerTime:
    """Return the record of a worker's time that is stored on a subject.

    Raises as `unpack_stored_record` does.
    """
    try:
        time = WorkerTime.unpack(data)
        _check_values(time)
        _check_subject(subject, time.subject)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ForgedRecord(str(error)) from error
    return time


def _check_values(record: LedgerRecord | WorkerTime) -> None:
    """Raise TypeError or ValueError for a text that is none, or a number out of all bounds."""
    for each in fields(record):
        value = getattr(record, each.name)
        if each.type is str and not isinstance(value, str):
            raise TypeError(f"{each.name} is {value!r}, which is no text")
        if each.type is int and not isinstance(value, int):
            raise TypeError(f"{each.name} is {value!r}, which is no whole number")
        limit = _MAX_TIME if each.name in _TIMES else _MAX_NUMBER
        if each.type is int and not 0 <= value <= limit:
            raise ValueError(f"{each.name} is {value}, and must be 0 to {limit}")


def _check_subject(subject: str, named: str) -> None:
    """Raise ValueError unless a record names what its subject does, behind the subject's kind."""
    if subject.split(".")[2:] != named.split(".")[2:]:
        raise ValueError(f"it is of {named}, and stored on {subject}")
