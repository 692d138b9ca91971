"""Who is connected nowhere for long enough has died; who is silent, or comes back, has not."""

import pytest

from dispatcher.workers.failure_detector import DEAD_AFTER_SECONDS, SETTLE_SECONDS, FailureDetector
from streams import subjects
from streams.broker.broker_client import Broker

NOW = 1000.0
SOON = NOW + DEAD_AFTER_SECONDS / 2
LATER = NOW + DEAD_AFTER_SECONDS


class Connections(Broker):
    """A broker as far as it knows who listens."""

    def __init__(self) -> None:
        super().__init__("nats://nowhere", "test")
        self.there = set[str]()
        self.silent = 0  # questions from now on that nobody answers

    async def has_listener(self, subject: str, seconds: float) -> bool | None:
        if self.silent:
            self.silent -= 1
            return None
        return subject in {subjects.alive(worker) for worker in self.there}


@pytest.fixture
def broker() -> Connections:
    return Connections()


async def test_who_is_connected_nowhere_for_long_enough_is_dead(broker: Connections) -> None:
    detector = FailureDetector(broker)
    broker.there = {"w2"}
    assert await detector.find_dead(["w1", "w2"], NOW) == []
    assert await detector.find_dead(["w1", "w2"], SOON) == []
    assert await detector.find_dead(["w1", "w2"], LATER) == ["w1"]


async def test_who_has_been_there_meanwhile_lives(broker: Connections) -> None:
    """Its broker has died, and it has found another one."""
    detector = FailureDetector(broker)
    assert await detector.find_dead(["w"], NOW) == []
    broker.there = {"w"}
    assert await detector.find_dead(["w"], SOON) == []
    broker.there = set()
    assert await detector.find_dead(["w"], LATER) == []


async def test_who_is_silent_no_more_lives(broker: Connections) -> None:
    """It is not even asked for."""
    detector = FailureDetector(broker)
    assert await detector.find_dead(["w"], NOW) == []
    assert await detector.find_dead([], SOON) == []
    assert await detector.find_dead(["w"], LATER) == []


async def test_nobody_is_missed_before_all_can_have_connected(broker: Connections) -> None:
    """The only broker was restarted, and this process was the first to find it again."""
    detector = FailureDetector(broker)
    assert await detector.find_dead(["w"], NOW) == []
    broker.connected_at = SOON
    assert await detector.find_dead(["w"], LATER) == []
    settled = SOON + SETTLE_SECONDS
    assert await detector.find_dead(["w"], settled) == []
    assert await detector.find_dead(["w"], settled + DEAD_AFTER_SECONDS) == ["w"]


async def test_a_death_that_is_told_is_confirmed(broker: Connections) -> None:
    """Whoever says so may lie, or may know it before the broker does."""
    detector = FailureDetector(broker)
    broker.there = {"lives"}
    assert not await detector.is_dead("lives")
    assert await detector.is_dead("died")
    broker.silent = 2
    assert await detector.is_dead("died")


async def test_who_does_not_answer_is_not_known_to_be_dead(broker: Connections) -> None:
    """It may be frozen, and the broker's silence is none of its own."""
    detector = FailureDetector(broker)
    broker.silent = 100
    assert not await detector.is_dead("w")
    assert await detector.find_dead(["w"], NOW) == []
    assert await detector.find_dead(["w"], LATER) == []
