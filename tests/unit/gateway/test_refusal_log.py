"""Refused credentials in the log: seen, and not a flood."""

from structlog.testing import capture_logs

from gateway.server.refusal_log import RefusalLog


def test_one_event_a_second_tells_of_all() -> None:
    """Whoever guesses 4,000 keys a second must not fill a disk."""
    refusals = RefusalLog()
    with capture_logs() as events:
        for n in range(1000):
            refusals.record("http", "10.0.0.1", "invalid_api_key", n / 500)
    assert [event["untold"] for event in events] == [0, 499]
    assert {event["event"] for event in events} == {"credential_refused"}
