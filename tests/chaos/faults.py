"""The table of faults: what cluster, what load, who is struck when."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.chaos.plan import ClusterShape, Fault, FaultInjection, Load

Injections = Callable[[Random], Iterable[FaultInjection]]

TWO_OF_EACH = ClusterShape(gateways=2, dispatchers=2)
PARTITIONABLE = replace(TWO_OF_EACH, can_partition=True)
THREE_BROKERS = replace(TWO_OF_EACH, nodes=3)
# Some requests always wait, in REQUESTS or in WORK, when these are lost.
FEW_SEQUENCES = replace(TWO_OF_EACH, sequences=4)
LOST = ("work_lost", "log_lost")  # how requests end whose place in a queue was lost
OWN_CLOCKS = replace(TWO_OF_EACH, own_clocks=True)
MANY_SEQUENCES = replace(TWO_OF_EACH, sequences=256, itl_ms=60)
# Half of them are another gateway's, whose tokens lie between.
LONG_STREAMS = Load(streams=200, seconds=10, tokens=(400, 500), cancelled=0, clients=8, kind="sdk")
# Requests come before, during and after what is done to a part that others wait for.
LOAD_THROUGHOUT = Load(streams=60, seconds=25, tokens=(40, 300), produced=12, lines=24)
LONG_LOAD = replace(LOAD_THROUGHOUT, streams=100, seconds=50, lines=48)
SHORT_LOAD = Load()


def once(deed: str, whom: str, between: tuple[float, float], seconds: float) -> Injections:
    """One strike at a random time."""

    def strikes(random: Random) -> Iterator[FaultInjection]:
        yield FaultInjection(random.uniform(*between), deed, whom, seconds)

    return strikes


def each(deed: str, whoms: Iterable[str], first: float, pause: float, seconds: float) -> Injections:
    """One strike after the other."""

    def strikes(random: Random) -> Iterator[FaultInjection]:
        for number, whom in enumerate(whoms):
            yield FaultInjection(first + number * pause, deed, whom, seconds)

    return strikes


def clock_steps(whom: str) -> Injections:
    """A wall clock is set an hour forward, right, an hour back, and right."""

    def strikes(random: Random) -> Iterator[FaultInjection]:
        for number, deed in enumerate(("ahead", "behind")):
            yield FaultInjection(random.uniform(3, 6) + 10 * number, deed, whom, 6)

    return strikes


FREEZES = [("freeze", "worker"), ("freeze", "dispatcher"), ("freeze", "nats")]
# Of each kind the first: the others show what a process gains that lives through everything.
KILLS = [("kill", f"{kind}-0") for kind in ("worker", "gateway", "dispatcher", "jobs")]


def a_fault_a_minute(minutes: int, choices: Sequence[tuple[str, str]]) -> Injections:
    """One strike at a random time of each."""

    def strikes(random: Random) -> Iterator[FaultInjection]:
        for minute in range(minutes):
            deed, whom = random.choice(choices)
            yield FaultInjection(60 * minute + random.uniform(5, 30), deed, whom, 8)

    return strikes


def cancel_storm(cancels: int, seconds: float) -> Load:
    """Nearly everything is cancelled at once: some before they are accepted, some in the queue."""
    return Load(cancels, seconds, (50, 200), cancelled=0.95, cancelled_after=(0, 0.5), clients=8)


def soak_load(minutes: int) -> Load:
    return Load(streams=600 * minutes, seconds=60 * minutes, tokens=(50, 200), clients=8)


THREE_WORKERS = replace(THREE_BROKERS, workers=3)
FOUR_WORKERS = replace(THREE_BROKERS, workers=4)
EIGHT_HUNDRED_STREAMS = Load(streams=800, seconds=60, tokens=(50, 150), cancelled=0, clients=8)


def one_of_each(random: Random) -> Iterator[FaultInjection]:
    for number, whom in enumerate(("worker", "gateway", "dispatcher", "nats")):
        yield FaultInjection(8 + 12 * number + random.uniform(0, 4), "kill", whom, 10)


# Each stream is about 450 KB, more than all buffers on the way hold.
LARGE_ANSWERS = Load(
    24, 2, (800, 900), cancelled=0, clients=6, evenly=True, kind="slow", logprobs=20
)


def slow_readers(random: Random) -> Iterator[FaultInjection]:
    """One reads nothing for so long that it is cut, one nearly so long, one reads slowly."""
    yield FaultInjection(random.uniform(2, 4), "deafen", "client-0", 17)
    yield FaultInjection(random.uniform(2, 4), "deafen", "client-1", 8)
    yield FaultInjection(random.uniform(2, 4), "dawdle", "client-2", 17)


# What `make test` has time for: several faults in one cluster, one after the other.
MAKE_TEST_LOAD = Load(streams=50, seconds=20, tokens=(40, 250))


def short_alone(random: Random) -> Iterator[FaultInjection]:
    """A worker freezes, another one is cut off, a gateway dies, the leading dispatcher freezes."""
    yield FaultInjection(2 + random.uniform(0, 1), "freeze", "worker-0", 8)
    yield FaultInjection(5 + random.uniform(0, 1), "kill", "gateway", 3)
    yield FaultInjection(9 + random.uniform(0, 1), "freeze", "dispatcher", 5)
    yield FaultInjection(13 + random.uniform(0, 1), "part", "worker-1", 7)


def short_cluster(random: Random) -> Iterator[FaultInjection]:
    """One of each kind is killed."""
    for number, whom in enumerate(("worker", "nats", "dispatcher jobs-0", "gateway")):
        yield FaultInjection(2 + 5 * number + random.uniform(0, 1), "kill", whom, 4)


def forgotten_beginnings(random: Random) -> Iterator[FaultInjection]:
    """The brokers drop the beginnings of what runs; then one dies who knew them, and a gateway."""
    yield FaultInjection(1, "squeeze", "TOKENS_0", 15)
    yield FaultInjection(random.uniform(4, 5), "kill", "worker", 10)
    yield FaultInjection(random.uniform(5, 6), "kill", "gateway", 5)


SERVICES = [
    f"{kind}-{number}" for kind in ("worker", "dispatcher", "jobs", "gateway") for number in (0, 1)
]
MACHINE = "nats dispatcher gateway-0 jobs-0 worker-0"  # what may well run on one, at its worst
NODES = [f"nats-{number}" for number in range(3)]

FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "worker-kill-queue",
            ClusterShape(sequences=4),
            Load(tokens=(60, 100)),
            once("kill", "worker", (0.5, 2.5), 10),
        ),
        Fault(
            "worker-kill-prefill",
            ClusterShape(ttft_ms=3000),
            Load(seconds=1, tokens=(30, 60)),
            once("kill", "worker", (1.2, 2.8), 10),
        ),
        Fault("worker-kill", ClusterShape(), SHORT_LOAD, once("kill", "worker", (2, 4), 10)),
        Fault("worker-reap", ClusterShape(), SHORT_LOAD, once("reap", "worker", (2, 4), 1)),
        Fault(
            "engine-fail",
            ClusterShape(can_fail=True),
            SHORT_LOAD,
            once("fail", "worker", (2, 4), 3),
        ),
        Fault("worker-freeze", ClusterShape(), SHORT_LOAD, once("freeze", "worker", (2, 4), 30)),
        Fault("gateway-kill", TWO_OF_EACH, SHORT_LOAD, once("kill", "gateway", (2, 4), 5)),
        Fault(
            "gateway-kill-sdk", TWO_OF_EACH, Load(kind="sdk"), once("kill", "gateway", (2, 4), 5)
        ),
        Fault(
            "gateway-kill-many", MANY_SEQUENCES, LONG_STREAMS, once("kill", "gateway", (20, 22), 5)
        ),
        Fault("gateway-freeze", TWO_OF_EACH, SHORT_LOAD, once("freeze", "gateway", (2, 4), 15)),
        Fault(
            "dispatcher-kill", TWO_OF_EACH, LOAD_THROUGHOUT, once("kill", "dispatcher", (5, 8), 10)
        ),
        Fault(
            "dispatcher-freeze",
            TWO_OF_EACH,
            LOAD_THROUGHOUT,
            once("freeze", "dispatcher", (5, 8), 12),
        ),
        Fault(
            "jobs-killed",
            TWO_OF_EACH,
            LOAD_THROUGHOUT,
            each("kill", ("jobs-0", "jobs-1", "worker"), 4, 6, 8),
        ),
        Fault("admin-kill", TWO_OF_EACH, LOAD_THROUGHOUT, once("kill", "admin", (5, 8), 10)),
        Fault("nats-kill", THREE_BROKERS, LOAD_THROUGHOUT, once("kill", "nats", (5, 8), 10)),
        Fault("nats-freeze", THREE_BROKERS, LOAD_THROUGHOUT, once("freeze", "nats", (5, 8), 12)),
        Fault(
            "nats-majority",
            THREE_BROKERS,
            LOAD_THROUGHOUT,
            once("kill", "nats-0 nats-1", (5, 8), 15),
        ),
        Fault(
            "nats-all",
            THREE_BROKERS,
            LOAD_THROUGHOUT,
            once("kill", "nats-0 nats-1 nats-2", (5, 8), 5),
            forgets=True,
        ),
        Fault(
            "nats-alone-kill",
            TWO_OF_EACH,
            LOAD_THROUGHOUT,
            once("kill", "nats-0", (5, 8), 3),
            forgets=True,
        ),
        Fault(
            "nats-alone-freeze", TWO_OF_EACH, LOAD_THROUGHOUT, once("freeze", "nats-0", (5, 8), 8)
        ),
        Fault("machine-kill", THREE_BROKERS, LOAD_THROUGHOUT, once("kill", MACHINE, (5, 8), 10)),
        Fault("part-gateway", PARTITIONABLE, LOAD_THROUGHOUT, once("part", "gateway", (5, 8), 12)),
        Fault("part-worker", PARTITIONABLE, LOAD_THROUGHOUT, once("part", "worker", (5, 8), 12)),
        Fault(
            "part-node",
            replace(THREE_BROKERS, can_partition=True),
            LOAD_THROUGHOUT,
            once("part", "nats", (5, 8), 12),
        ),
        Fault(
            "disk-full",
            replace(TWO_OF_EACH, small_disk=True),
            LOAD_THROUGHOUT,
            once("fill", "nats-0", (5, 8), 8),
            forgets=True,
        ),
        Fault("stream-full", TWO_OF_EACH, LOAD_THROUGHOUT, once("bound", "REQUESTS", (5, 8), 8)),
        Fault("tokens-full", TWO_OF_EACH, SHORT_LOAD, forgotten_beginnings, forgets=True),
        Fault(
            "streams-deleted",
            FEW_SEQUENCES,
            LOAD_THROUGHOUT,
            each("delete", ("WORK", "TOKENS_0", "REQUESTS", "ATTEMPTS", "SIGNALS"), 4, 4, 0),
            excused=LOST,
            forgets=True,
        ),
        Fault(
            "store-wiped",
            FEW_SEQUENCES,
            LOAD_THROUGHOUT,
            once("wipe", "nats-0", (5, 8), 3),
            excused=LOST,
            forgets=True,
            wipes=True,
        ),
        Fault("accounts-lost", THREE_BROKERS, LOAD_THROUGHOUT, once("forget", "nats", (5, 8), 10)),
        Fault("keys-rotated", THREE_BROKERS, LONG_LOAD, once("rotate", "keys", (4, 6), 0)),
        Fault("user-revoked", TWO_OF_EACH, LOAD_THROUGHOUT, once("revoke", "worker", (5, 8), 8)),
        Fault("rolling-services", TWO_OF_EACH, LONG_LOAD, each("restart", SERVICES, 3, 6, 0)),
        Fault("rolling-nats", THREE_BROKERS, LONG_LOAD, each("restart", NODES, 5, 15, 0)),
        Fault("clock-gateway", OWN_CLOCKS, LOAD_THROUGHOUT, clock_steps("gateway")),
        Fault("clock-dispatcher", OWN_CLOCKS, LOAD_THROUGHOUT, clock_steps("dispatcher")),
        Fault("clock-worker", OWN_CLOCKS, LOAD_THROUGHOUT, clock_steps("worker")),
        Fault("one-of-each", FOUR_WORKERS, EIGHT_HUNDRED_STREAMS, one_of_each),
        Fault("slow-readers", TWO_OF_EACH, LARGE_ANSWERS, slow_readers),
        Fault("cancel-storm", ClusterShape(), cancel_storm(1000, 10), lambda _: ()),
        Fault("short-alone", PARTITIONABLE, MAKE_TEST_LOAD, short_alone),
        Fault("short-cluster", THREE_BROKERS, MAKE_TEST_LOAD, short_cluster),
        Fault("nothing", TWO_OF_EACH, SHORT_LOAD, lambda _: ()),
        Fault("soak", THREE_WORKERS, soak_load(30), a_fault_a_minute(30, KILLS + FREEZES)),
        Fault("soak-long", THREE_WORKERS, soak_load(90), a_fault_a_minute(90, KILLS + FREEZES)),
    )
}

# Parts of others, nothing to see, or half an hour and more: only when they are named.
ON_DEMAND = {"short-alone", "short-cluster", "nothing", "soak", "soak-long"}
