"""Bodies of the batches API: what is told of a batch that runs."""

from dataclasses import replace

import pytest

from api.batch_bodies import batch_id, batch_object, parse_batch_id, window_seconds
from streams.errors import NotFound
from streams.records.jobs.batch_records import Batch, BatchStatus

BATCH = Batch("acme", "0" * 24, "/v1/embeddings", "f" * 24, 86400, 100, 86500, b"secret", total=300)


def test_a_batch_that_runs_tells_when_it_will_end() -> None:
    """By the rate since it began; nothing is told before the first line and after the last."""
    running = BATCH.at_status(BatchStatus.IN_PROGRESS, 200)
    assert batch_object(running, 210)["progress"] is None
    some = replace(running, completed=90, failed=10)
    assert batch_object(some, 210)["progress"] == {"lines_per_second": 10, "expected_end_at": 230}
    assert batch_object(some.at_status(BatchStatus.COMPLETED, 220), 230)["progress"] is None


def test_times_are_those_of_the_states() -> None:
    """OpenAI's names for them."""
    shown = batch_object(BATCH.at_status(BatchStatus.IN_PROGRESS, 200), 201)
    assert (shown["in_progress_at"], shown["completed_at"]) == (200, None)
    assert shown["input_file_id"] == f"file-{'f' * 24}"


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("3d", 259200), ("1h", 3600)])
def test_a_window_is_in_hours_or_days(window: str, seconds: int) -> None:
    """OpenAI has one alone."""
    assert window_seconds(window) == seconds


@pytest.mark.parametrize("told", ["", "batch_", "batch_0.>", "file-" + "0" * 24, "0" * 24])
def test_what_is_no_id_names_no_batch(told: str) -> None:
    """It must not become a part of a subject."""
    with pytest.raises(NotFound):
        parse_batch_id(told)
    assert parse_batch_id(batch_id(BATCH)) == BATCH.id


def test_a_batch_that_has_ended_is_promised_no_room() -> None:
    """Though services have yet to tell of its end."""
    running = replace(BATCH, reserved_bytes=1000, stored_bytes=100)
    assert running.promised_bytes == 900
    assert running.at_status(BatchStatus.CANCELLED, 200).promised_bytes == 0
