"""What a run will do: a pure function of fault and seed.

The cluster's shape, the load and the strikes. A target that only the running cluster knows (who
leads) is named by its part and resolved when it is struck.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.mock import MockEngine
from streams.messages import Sampling

TENANTS = ("acme", "other")
BESIDE_TOKENS = (40, 100)  # of what producers ask for, and lines of a batch


@dataclass(frozen=True)
class ClusterShape:
    """The cluster that a fault is for; the mock's pace decides in which phase it hits."""

    nodes: int = 1
    gateways: int = 1
    dispatchers: int = 1
    workers: int = 2
    ttft_ms: float = 20
    itl_ms: float = 20
    sequences: int = 64
    can_partition: bool = False  # brokers are reached over wires that can be cut
    small_disk: bool = False  # the brokers' store is a file system of a few MiB
    own_clocks: bool = False  # each service has a wall clock that can be set
    can_fail: bool = False  # workers' engines can be made to fail


@dataclass(frozen=True)
class Load:
    """`streams` requests, begun evenly at random over `seconds`."""

    streams: int = 20
    seconds: float = 2.0
    tokens: tuple[int, int] = (150, 250)
    cancelled: float = 0.1  # share whose client asks for the end
    cancelled_after: tuple[float, float] = (0.0, 2.0)
    clients: int = 4
    evenly: bool = False  # each client asks as often as the others
    kind: Literal["plain", "sdk", "slow"] = "plain"  # through which clients
    logprobs: int = 0  # alternatives with each token: they make frames large
    produced: int = 6  # requests that producers publish to NATS beside these
    lines: int = 10  # of a batch that runs beside


@dataclass(frozen=True)
class FaultInjection:
    """Do `deed` to `whom` at `at` seconds into the load, and undo it after `seconds`."""

    at: float
    action: str
    target: str
    seconds: float


@dataclass(frozen=True)
class PlannedRequest:
    """One request of the load."""

    name: str
    at: float
    client: int
    prompt: str
    seed: int
    max_tokens: int
    cancel_after: float | None
    logprobs: int = 0

    @property
    def words(self) -> list[str]:
        return undisturbed_output(self.prompt, self.seed, self.max_tokens)


@dataclass(frozen=True)
class Fault:
    """One row of the table (`tests/chaos/faults.py`)."""

    name: str
    shape: ClusterShape
    load: Load
    injections: Callable[[Random], Iterable[FaultInjection]]
    excused: tuple[str, ...] = field(default=())
    forgets: bool = False  # logs of what has ended, or beginnings of logs, may be lost
    wipes: bool = False  # what was stored before, bills included, may be lost


@dataclass(frozen=True)
class Plan:
    """Requests of clients, of producers (whose `client` is the number of a tenant), of a batch."""

    requests: list[PlannedRequest]
    injections: list[FaultInjection]
    produced: list[PlannedRequest]
    lines: list[PlannedRequest]


def plan(fault: Fault, seed: int) -> Plan:
    """The same for the same fault and seed, whatever happens."""
    random = Random(f"{fault.name} {seed}")
    strikes = sorted(fault.injections(random), key=lambda strike: strike.at)
    asks = [_ask(fault.load, random, number) for number in range(fault.load.streams)]
    beside = replace(fault.load, tokens=BESIDE_TOKENS, cancelled=0, logprobs=0)
    produced = [_ask(beside, random, number) for number in range(fault.load.produced)]
    lines = [_ask(beside, random, number) for number in range(fault.load.lines)]
    return Plan(
        _by_time(asks),
        strikes,
        _by_time(replace(a, name=f"p{n}", client=n % len(TENANTS)) for n, a in enumerate(produced)),
        [replace(ask, name=f"line-{number}") for number, ask in enumerate(lines)],
    )


def _by_time(asks: Iterable[PlannedRequest]) -> list[PlannedRequest]:
    return sorted(asks, key=lambda ask: ask.at)


def _ask(load: Load, random: Random, number: int) -> PlannedRequest:
    cancels = random.random() < load.cancelled
    return PlannedRequest(
        name=f"r{number}",
        at=random.uniform(0, load.seconds),
        client=number % load.clients if load.evenly else random.randrange(load.clients),
        prompt=f"{random.getrandbits(64):x} of {number}",
        seed=random.getrandbits(32),
        max_tokens=random.randint(*load.tokens),
        cancel_after=random.uniform(*load.cancelled_after) if cancels else None,
        logprobs=load.logprobs,
    )


def tenant_of(client: int) -> str:
    return TENANTS[client % len(TENANTS)]


def undisturbed_output(prompt: str, seed: int, max_tokens: int) -> list[str]:
    """What the mock says when nothing happens, token by token: its text knows no time."""
    engine = MockEngine(0, 0, clock=lambda: 0.0, sleep=lambda _: None)
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    engine.add(Sequence("alone", list(prompt.encode()), sampling))
    words = []
    while not engine.idle:
        words += [output.text for output in engine.step()]
    return words
