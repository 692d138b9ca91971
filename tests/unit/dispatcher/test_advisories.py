"""Only the broker says that work has used up its deliveries."""

import pytest

from dispatcher.reconcile.dead_letters import MAX_DELIVERIES_ADVISORIES, parse_advisory

ADVISORY = MAX_DELIVERIES_ADVISORIES.replace("*", "pool")


def test_an_advisory_names_the_work() -> None:
    assert parse_advisory(ADVISORY, {}, b'{"stream": "WORK", "stream_seq": 7}') == 7


@pytest.mark.parametrize(
    ("subject", "headers", "payload"),
    [
        (ADVISORY, {"Nats-Stream": "WORK"}, b'{"stream_seq": 7}'),
        ("infer.work.mock.v1.batch.any", {}, b'{"stream_seq": 7}'),
        (ADVISORY, {}, b'{"stream": "WORK", "seq": 7}'),
        (ADVISORY, {}, b'{"stream_seq": "7"}'),
        (ADVISORY, {}, b"[]"),
        (ADVISORY, {}, b""),
    ],
)
def test_what_was_stored_and_sent_there_is_none(
    subject: str, headers: dict[str, str], payload: bytes
) -> None:
    """Read messages have headers; those that a consumer delivers have their own subject."""
    assert parse_advisory(subject, headers, payload) is None
