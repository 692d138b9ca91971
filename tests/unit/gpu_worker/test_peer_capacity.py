"""Who could take over a request."""

from dataclasses import replace

import pytest

from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.peer_capacity import STALE_SECONDS, PeerCapacity
from streams.messages import Heartbeat

ME = WorkerIdentity("m", "1", "me", 1)
OTHER = Heartbeat("other", "m", "1", 2, 100, 0, 0, 4, 200, 0, 0.0)


def test_room_is_used_up_by_what_is_handed_over() -> None:
    """Until the next beat, which counts what has come."""
    fellows = PeerCapacity(ME)
    fellows.record_heartbeat(OTHER, now=0.0)
    assert [fellows.reserve(60, now=1.0) for _ in range(2)] == [True, False]
    assert fellows.reserve(40, now=1.0)
    assert not fellows.reserve(0, now=1.0)
    fellows.record_heartbeat(OTHER, now=2.0)
    assert fellows.reserve(60, now=2.0)


@pytest.mark.parametrize(
    "beat",
    [
        replace(OTHER, worker="me"),
        replace(OTHER, version="2"),
        replace(OTHER, draining=True),
        replace(OTHER, resident=False),
        replace(OTHER, waiting=2),
    ],
)
def test_others_than_serving_fellows_with_room_take_nothing(beat: Heartbeat) -> None:
    """What is given back while nobody can take it only waits."""
    fellows = PeerCapacity(ME)
    fellows.record_heartbeat(beat, now=0.0)
    assert not fellows.reserve(1, now=0.0)


def test_a_fellow_that_begins_to_drain_or_falls_silent_has_no_room() -> None:
    """A rolling restart may drain several at once."""
    fellows = PeerCapacity(ME)
    fellows.record_heartbeat(OTHER, now=0.0)
    assert not fellows.reserve(1, now=STALE_SECONDS)
    fellows.record_heartbeat(OTHER, now=5.0)
    fellows.record_heartbeat(replace(OTHER, draining=True), now=5.0)
    assert not fellows.reserve(1, now=5.0)


def test_a_peer_has_room_while_it_is_heard_and_has_a_free_sequence() -> None:
    """Its model is loaded: work goes there before the model is loaded a second time."""
    peers = PeerCapacity(ME)
    assert not peers.has_room(now=0.0)
    peers.record_heartbeat(OTHER, now=0.0)
    assert peers.has_room(now=1.0)
    assert not peers.has_room(now=STALE_SECONDS)
    peers.record_heartbeat(replace(OTHER, free_sequences=0), now=4.0)
    assert not peers.has_room(now=4.0)
