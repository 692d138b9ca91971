"""Bodies and ids of the batches API, as the OpenAI SDK reads them. Pure."""

import re
from typing import Any

from streams.errors import NotFound
from streams.records.jobs.batch_records import Batch, BatchStatus

_BATCH, _FILE = "batch_", "file-"
_ID = re.compile(r"[0-9a-f]{24}\Z")
_HOURS = {"h": 1, "d": 24}


def batch_id(batch: Batch) -> str:
    """Return the id by which clients know a batch."""
    return batch_id_of(batch.id)


def batch_id_of(bare: str) -> str:
    """Return the id by which clients know the batch whose record has the id `bare`."""
    return f"{_BATCH}{bare}"


def parse_batch_id(told: str) -> str:
    """Return the id of a batch's record; raises `NotFound` for what is no batch's id."""
    bare = told.removeprefix(_BATCH)
    if bare == told or not _ID.match(bare):
        raise batch_not_found(told)
    return bare


def batch_not_found(told: str) -> NotFound:
    """Return the error for an id that names no batch of the tenant's."""
    return NotFound(f"there is no batch {told!r}")


def window_seconds(window: str) -> int:
    """Return the seconds of a completion window such as `24h` or `3d`."""
    return int(window[:-1]) * _HOURS[window[-1]] * 3600


def batch_object(batch: Batch, now: float) -> dict[str, Any]:
    """Return the `batch` object of a batch at `now`, in epoch seconds.

    `progress`, `paused`, `not_before`, `run_between`, `time_zone` and `retry_of` are ours.
    """
    times = {
        f"{status.value}_at": batch.times.get(status.value)
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
    }
    hours = batch.run_hours
    usage, cached = batch.usage, {"cached_tokens": batch.usage.cached_tokens}
    return {
        "id": batch_id(batch),
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": f"{_FILE}{batch.input_file}",
        "completion_window": f"{batch.window_seconds // 3600}h",
        "status": batch.status.value,
        "output_file_id": f"{_FILE}{batch.output_file}" if batch.output_file else None,
        "error_file_id": f"{_FILE}{batch.error_file}" if batch.error_file else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "metadata": batch.metadata,
        "progress": _progress(batch, now),
        "paused": batch.paused,
        "not_before": batch.not_before or None,
        "run_between": hours.times if hours else None,
        "time_zone": hours.zone if hours else None,
        "retry_of": f"{_BATCH}{batch.retry_of}" if batch.retry_of else None,
    }


def _progress(batch: Batch, now: float) -> dict[str, Any] | None:
    """Return how fast lines end, and when the last one will; None unless some have while it runs.

    The rate is that since the batch began.
    """
    ended = batch.completed + batch.failed
    seconds = now - batch.times.get(BatchStatus.IN_PROGRESS.value, now)
    if batch.status is not BatchStatus.IN_PROGRESS or not ended or seconds <= 0:
        return None
    rate = ended / seconds
    expected_end = round(now + (batch.total - ended) / rate)
    return {"lines_per_second": round(rate, 3), "expected_end_at": expected_end}
