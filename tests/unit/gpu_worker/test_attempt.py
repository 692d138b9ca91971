"""What an attempt tells the engine of the time that a request has."""

from dataclasses import replace
from typing import Any, cast

import pytest

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.identity import WorkerIdentity
from streams import subjects
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery
from streams.headers import Envelope
from streams.subjects import PoolKey, Priority

ENVELOPE = Envelope("r", "acme", "here", 1, 1, deadline=60_000, accepted=10_000)
NOBODY = cast(Any, None)  # nothing is sent or run
WORKER = WorkerIdentity("m", "1", "worker", 1)


def an_attempt(envelope: Envelope, priority: Priority = Priority.STANDARD) -> Attempt:
    subject = subjects.work(PoolKey("m", "1", priority))
    delivery = Delivery(NOBODY, subject, b"", {}, seq=1, num_delivered=1, reply="")
    broker = Broker("nats://127.0.0.1:4222", "")
    return Attempt(broker, NOBODY, NOBODY, delivery, envelope, WORKER, NOBODY, NOBODY)


@pytest.mark.parametrize(("promised", "goal"), [(250, 10_250), (None, None)])
def test_a_goal_counts_from_acceptance(promised: int | None, goal: int | None) -> None:
    """A request that has queued for long has nothing left to wait in a batch."""
    assert an_attempt(replace(ENVELOPE, goal_ms=promised)).first_output_goal == goal


@pytest.mark.parametrize("priority", Priority)
def test_the_priority_is_that_of_the_lane(priority: Priority) -> None:
    """The engine lets batch work give way to what clients wait for."""
    assert an_attempt(ENVELOPE, priority).priority is priority
