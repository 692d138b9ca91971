"""Lines: messages of the stream LEDGER as JSON, as segments have them. Pure."""

from base64 import b64encode
from typing import Any

from streams import quota_windows, subjects
from streams.messages import LedgerRecord, RefusalCounts
from streams.records.ledger_checks import unpack_stored_record, unpack_stored_time

_REPLACED = ("account", "price")  # told in full, or of no use outside


def to_line(seq: int, subject: str, data: bytes) -> dict[str, Any]:
    """Return one message of the ledger as a map that JSON can hold.

    Its `type` is `request` for a ledger record, `refusals` for counts of refused requests,
    `worker_time` for what a worker did besides, and `unreadable` for bytes that are none of these,
    which are kept: also for a record that names another tenant or model than its subject, as a
    stolen worker may write. `seq` is its sequence in the ledger.
    Amounts of money are integers of 10⁻¹² of the currency.
    """
    try:
        if subjects.is_ledger(subject):
            return {"type": "request", "seq": seq, **_request(unpack_stored_record(subject, data))}
        if subjects.is_worker_time(subject):
            return {"type": "worker_time", "seq": seq, **vars(unpack_stored_time(subject, data))}
        return {"type": "refusals", "seq": seq, **_refusals(RefusalCounts.unpack(data))}
    except (ValueError, TypeError) as error:
        kept = {"subject": subject, "data": b64encode(data).decode(), "error": str(error)}
        return {"type": "unreadable", "seq": seq, **kept}


def _request(record: LedgerRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(record).items() if name not in _REPLACED}
    entry, (prompt, completion, cached) = record.price_entry, record.billed_tokens
    return fields | {
        "billed_tokens": {"prompt": prompt, "completion": completion, "cached": cached},
        "price_version": entry.version,
        "currency": entry.currency,
        "price": {**vars(entry.price), "cached": entry.price.cached_or_prompt},
        "charge": record.charge,
    }


def _refusals(record: RefusalCounts) -> dict[str, Any]:
    names = ("code", "version", "priority", "count")
    counts = [dict(zip(names, each, strict=True)) for each in record.counts]
    return {**vars(record), "counts": counts}


def day_of(line: dict[str, Any]) -> str:
    """Return the UTC day, as `2026-11-28`, to which the request of a line belongs.

    That is the day on which it was accepted, which is also that of its price and of its quotas.
    """
    return quota_windows.utc_day(line["accepted"] / 1000)
