"""What an attempt tells the engine of the time that a request has."""

from typing import Any, cast

import pytest

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.identity import WorkerIdentity
from registry.models import LatencyGoals
from streams import subjects
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery
from streams.headers import Envelope
from streams.subjects import PoolKey, Priority

ENVELOPE = Envelope("r", "acme", "here", 1, 1, deadline=60_000, accepted=10_000)
NOBODY = cast(Any, None)  # nothing is sent or run
GOALS = {
    Priority.INTERACTIVE: LatencyGoals(time_to_first_token_ms=250),
    Priority.BATCH: LatencyGoals(),
}


def an_attempt(delivery: Delivery, who: WorkerIdentity) -> Attempt:
    broker = Broker("nats://127.0.0.1:4222", "")
    return Attempt(broker, NOBODY, NOBODY, delivery, ENVELOPE, who, NOBODY)


@pytest.mark.parametrize(
    ("priority", "goal"),
    [(Priority.INTERACTIVE, 10_250), (Priority.STANDARD, None), (Priority.BATCH, None)],
)
def test_a_goal_counts_from_acceptance(priority: Priority, goal: int | None) -> None:
    """A request that has queued for long has nothing left to wait in a batch."""
    subject = subjects.work(PoolKey("m", "1", priority))
    delivery = Delivery(NOBODY, subject, b"", {}, seq=1, num_delivered=1, reply="")
    who = WorkerIdentity("m", "1", "worker", 1, GOALS)
    assert an_attempt(delivery, who).first_output_goal == goal


@pytest.mark.parametrize("priority", Priority)
def test_the_priority_is_that_of_the_lane(priority: Priority) -> None:
    """The engine lets batch work give way to what clients wait for."""
    subject = subjects.work(PoolKey("m", "1", priority))
    delivery = Delivery(NOBODY, subject, b"", {}, seq=1, num_delivered=1, reply="")
    who = WorkerIdentity("m", "1", "worker", 1)
    assert an_attempt(delivery, who).priority is priority
