"""The table of faults: what cluster, what load, who is struck when."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.chaos.plan import Fault, Load, Shape, Strike

Strikes = Callable[[Random], Iterable[Strike]]

PAIRS = Shape(gateways=2, dispatchers=2)
LINKED = replace(PAIRS, linked=True)
CLUSTER = replace(PAIRS, nodes=3)
CLOCKED = replace(PAIRS, own_clocks=True)
MANY = replace(PAIRS, sequences=256, itl_ms=60)
# Half of them are another gateway's, whose tokens lie between.
LONG_ONES = Load(streams=400, seconds=10, tokens=(400, 500), cancelled=0, clients=8, kind="sdk")
# Requests come before, during and after what is done to a part that others wait for.
ALL_ALONG = Load(streams=60, seconds=25, tokens=(40, 300))
FOR_LONGER = replace(ALL_ALONG, streams=100, seconds=50)
AT_ONCE = Load()


def once(deed: str, whom: str, between: tuple[float, float], seconds: float) -> Strikes:
    """One strike at a random time."""

    def strikes(random: Random) -> Iterator[Strike]:
        yield Strike(random.uniform(*between), deed, whom, seconds)

    return strikes


def each(deed: str, whoms: Iterable[str], first: float, pause: float, seconds: float) -> Strikes:
    """One strike after the other."""

    def strikes(random: Random) -> Iterator[Strike]:
        for number, whom in enumerate(whoms):
            yield Strike(first + number * pause, deed, whom, seconds)

    return strikes


def clock_steps(whom: str) -> Strikes:
    """A wall clock is set an hour forward, right, an hour back, and right."""

    def strikes(random: Random) -> Iterator[Strike]:
        for number, deed in enumerate(("ahead", "behind")):
            yield Strike(random.uniform(3, 6) + 10 * number, deed, whom, 6)

    return strikes


FREEZES = [("freeze", "worker"), ("freeze", "dispatcher"), ("freeze", "nats")]
# Of each kind the first: the others show what a process gains that lives through everything.
KILLS = [("kill", "worker-0"), ("kill", "gateway-0"), ("kill", "dispatcher-0")]


def a_fault_a_minute(minutes: int, choices: Sequence[tuple[str, str]]) -> Strikes:
    """One strike at a random time of each."""

    def strikes(random: Random) -> Iterator[Strike]:
        for minute in range(minutes):
            deed, whom = random.choice(choices)
            yield Strike(60 * minute + random.uniform(5, 30), deed, whom, 8)

    return strikes


def storm(cancels: int, seconds: float) -> Load:
    """Nearly everything is cancelled at once: some before they are accepted, some in the queue."""
    return Load(cancels, seconds, (50, 200), cancelled=0.95, cancelled_after=(0, 0.5), clients=8)


def soak(minutes: int) -> Load:
    return Load(streams=600 * minutes, seconds=60 * minutes, tokens=(50, 200), clients=8)


THREE = replace(CLUSTER, workers=3)
FOUR = replace(CLUSTER, workers=4)
EIGHT_TIMES_A_HUNDRED = Load(streams=800, seconds=60, tokens=(50, 150), cancelled=0, clients=8)


def one_of_each(random: Random) -> Iterator[Strike]:
    for number, whom in enumerate(("worker", "gateway", "dispatcher", "nats")):
        yield Strike(8 + 12 * number + random.uniform(0, 4), "kill", whom, 10)


# Each stream is about 450 KB, more than all buffers on the way hold.
UNREAD = Load(24, 2, (800, 900), cancelled=0, clients=6, evenly=True, kind="slow", logprobs=20)


def slow_readers(random: Random) -> Iterator[Strike]:
    """One reads nothing for so long that it is cut, one nearly so long, one reads slowly."""
    yield Strike(random.uniform(2, 4), "deafen", "client-0", 17)
    yield Strike(random.uniform(2, 4), "deafen", "client-1", 8)
    yield Strike(random.uniform(2, 4), "dawdle", "client-2", 17)


# What `make test` has time for: several faults in one cluster, one after the other.
SHORT = Load(streams=50, seconds=20, tokens=(40, 250))


def short_alone(random: Random) -> Iterator[Strike]:
    """A worker freezes, another one is cut off, a gateway dies, the leading dispatcher freezes."""
    yield Strike(2 + random.uniform(0, 1), "freeze", "worker-0", 8)
    yield Strike(5 + random.uniform(0, 1), "kill", "gateway", 3)
    yield Strike(9 + random.uniform(0, 1), "freeze", "dispatcher", 5)
    yield Strike(13 + random.uniform(0, 1), "part", "worker-1", 7)


def short_cluster(random: Random) -> Iterator[Strike]:
    """One of each kind is killed."""
    for number, whom in enumerate(("worker", "nats", "dispatcher", "gateway")):
        yield Strike(2 + 5 * number + random.uniform(0, 1), "kill", whom, 4)


def forgotten_beginnings(random: Random) -> Iterator[Strike]:
    """The brokers drop the beginnings of what runs; then one dies who knew them, and a gateway."""
    yield Strike(1, "squeeze", "TOKENS_0", 15)
    yield Strike(random.uniform(4, 5), "kill", "worker", 10)
    yield Strike(random.uniform(5, 6), "kill", "gateway", 5)


SERVICES = [f"{kind}-{number}" for kind in ("worker", "dispatcher", "gateway") for number in (0, 1)]
MACHINE = "nats dispatcher gateway-0 worker-0"  # what may well run on one, at its worst
NODES = [f"nats-{number}" for number in range(3)]

FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "worker-kill-queue",
            Shape(sequences=4),
            Load(tokens=(60, 100)),
            once("kill", "worker", (0.5, 2.5), 10),
        ),
        Fault(
            "worker-kill-prefill",
            Shape(ttft_ms=3000),
            Load(seconds=1, tokens=(30, 60)),
            once("kill", "worker", (1.2, 2.8), 10),
        ),
        Fault("worker-kill", Shape(), AT_ONCE, once("kill", "worker", (2, 4), 10)),
        Fault("worker-reap", Shape(), AT_ONCE, once("reap", "worker", (2, 4), 1)),
        Fault("engine-fail", Shape(can_fail=True), AT_ONCE, once("fail", "worker", (2, 4), 3)),
        Fault("worker-freeze", Shape(), AT_ONCE, once("freeze", "worker", (2, 4), 30)),
        Fault("gateway-kill", PAIRS, AT_ONCE, once("kill", "gateway", (2, 4), 5)),
        Fault("gateway-kill-sdk", PAIRS, Load(kind="sdk"), once("kill", "gateway", (2, 4), 5)),
        Fault("gateway-kill-many", MANY, LONG_ONES, once("kill", "gateway", (20, 22), 5)),
        Fault("gateway-freeze", PAIRS, AT_ONCE, once("freeze", "gateway", (2, 4), 15)),
        Fault("dispatcher-kill", PAIRS, ALL_ALONG, once("kill", "dispatcher", (5, 8), 10)),
        Fault("dispatcher-freeze", PAIRS, ALL_ALONG, once("freeze", "dispatcher", (5, 8), 12)),
        Fault("nats-kill", CLUSTER, ALL_ALONG, once("kill", "nats", (5, 8), 10)),
        Fault("nats-freeze", CLUSTER, ALL_ALONG, once("freeze", "nats", (5, 8), 12)),
        Fault("nats-majority", CLUSTER, ALL_ALONG, once("kill", "nats-0 nats-1", (5, 8), 15)),
        Fault(
            "nats-all",
            CLUSTER,
            ALL_ALONG,
            once("kill", "nats-0 nats-1 nats-2", (5, 8), 5),
            forgets=True,
        ),
        Fault("nats-alone-kill", PAIRS, ALL_ALONG, once("kill", "nats-0", (5, 8), 3), forgets=True),
        Fault("nats-alone-freeze", PAIRS, ALL_ALONG, once("freeze", "nats-0", (5, 8), 8)),
        Fault("machine-kill", CLUSTER, ALL_ALONG, once("kill", MACHINE, (5, 8), 10)),
        Fault("part-gateway", LINKED, ALL_ALONG, once("part", "gateway", (5, 8), 12)),
        Fault("part-worker", LINKED, ALL_ALONG, once("part", "worker", (5, 8), 12)),
        Fault(
            "part-node", replace(CLUSTER, linked=True), ALL_ALONG, once("part", "nats", (5, 8), 12)
        ),
        Fault(
            "disk-full",
            replace(PAIRS, small_disk=True),
            ALL_ALONG,
            once("fill", "nats-0", (5, 8), 8),
            forgets=True,
        ),
        Fault("stream-full", PAIRS, ALL_ALONG, once("bound", "REQUESTS", (5, 8), 8)),
        Fault("tokens-full", PAIRS, AT_ONCE, forgotten_beginnings, forgets=True),
        Fault("rolling-services", PAIRS, FOR_LONGER, each("restart", SERVICES, 4, 8, 0)),
        Fault("rolling-nats", CLUSTER, FOR_LONGER, each("restart", NODES, 5, 15, 0)),
        Fault("clock-gateway", CLOCKED, ALL_ALONG, clock_steps("gateway")),
        Fault("clock-dispatcher", CLOCKED, ALL_ALONG, clock_steps("dispatcher")),
        Fault("clock-worker", CLOCKED, ALL_ALONG, clock_steps("worker")),
        Fault("one-of-each", FOUR, EIGHT_TIMES_A_HUNDRED, one_of_each),
        Fault("slow-readers", PAIRS, UNREAD, slow_readers),
        Fault("cancel-storm", Shape(), storm(4000, 20), lambda _: ()),
        Fault("short-alone", LINKED, SHORT, short_alone),
        Fault("short-cluster", CLUSTER, SHORT, short_cluster),
        Fault("nothing", PAIRS, AT_ONCE, lambda _: ()),
        Fault("soak", THREE, soak(30), a_fault_a_minute(30, KILLS + FREEZES)),
        Fault("soak-long", THREE, soak(90), a_fault_a_minute(90, KILLS + FREEZES)),
    )
}

# Parts of others, nothing to see, or half an hour and more: only when they are named.
ON_DEMAND = {"short-alone", "short-cluster", "nothing", "soak", "soak-long"}
