"""What an attempt tells the engine of the time that a request has."""

from typing import Any, cast

import pytest

from gpu_worker.attempt import Attempt
from gpu_worker.outcome import Identity
from registry.models import Goals
from streams import subjects
from streams.connection import Broker
from streams.headers import Envelope
from streams.pull import Delivery
from streams.subjects import Pool, Priority

ENVELOPE = Envelope("r", "acme", "here", 1, 1, deadline=60_000, accepted=10_000)
NOBODY = cast(Any, None)  # nothing is sent or run
GOALS = {Priority.INTERACTIVE: Goals(time_to_first_token_ms=250), Priority.BATCH: Goals()}


def an_attempt(delivery: Delivery, who: Identity) -> Attempt:
    return Attempt(Broker("", ""), NOBODY, NOBODY, delivery, ENVELOPE, who, NOBODY)


@pytest.mark.parametrize(
    ("priority", "goal"),
    [(Priority.INTERACTIVE, 10_250), (Priority.STANDARD, None), (Priority.BATCH, None)],
)
def test_a_goal_counts_from_acceptance(priority: Priority, goal: int | None) -> None:
    """A request that has queued for long has nothing left to wait in a batch."""
    subject = subjects.work(Pool("m", "1", priority))
    delivery = Delivery(NOBODY, subject, b"", {}, seq=1, delivered=1, reply="")
    who = Identity("m", "1", "worker", 1, GOALS)
    assert an_attempt(delivery, who).goal == goal


@pytest.mark.parametrize("priority", Priority)
def test_the_priority_is_that_of_the_lane(priority: Priority) -> None:
    """The engine lets batch work give way to what clients wait for."""
    subject = subjects.work(Pool("m", "1", priority))
    delivery = Delivery(NOBODY, subject, b"", {}, seq=1, delivered=1, reply="")
    who = Identity("m", "1", "worker", 1)
    assert an_attempt(delivery, who).priority is priority
