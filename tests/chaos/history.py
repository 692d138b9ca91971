"""What happened in one run: frozen events, one JSON line each.

Times are seconds since the load began, by the recorder's monotonic clock. A `request` is the
client's own name for what it asked; a `request_id` is the fleet's.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """What the run was. `excused` are codes in which requests may fail under this fault.

    `forgets`: the brokers lost their memory, and with it logs, or the beginnings of logs. `wipes`:
    they lost stored records, too, such as bills.
    """

    fault: str
    seed: int
    excused: list[str] = field(default_factory=list)
    forgets: bool = False
    wipes: bool = False


@dataclass(frozen=True)
class Submitted:
    """A client wants this answered. `words` is the undisturbed output, token by token.

    `route` is where a producer wants the replies to what it publishes; others have none.
    """

    at: float
    request: str
    tenant: str
    words: list[str]
    client: str
    route: str = ""


@dataclass(frozen=True)
class Stored:
    """The broker has acknowledged what a producer has published; each does so several times."""

    at: float
    request: str


@dataclass(frozen=True)
class Accepted:
    """The promise; it comes again when another socket goes on with the request."""

    at: float
    request: str
    request_id: str


@dataclass(frozen=True)
class Refused:
    """An error before the promise."""

    at: float
    request: str
    code: str
    retry_after_ms: int | None


@dataclass(frozen=True)
class Started:
    at: float
    request: str
    attempt: int


@dataclass(frozen=True)
class Chunk:
    at: float
    request: str
    index: int
    count: int
    text: str


@dataclass(frozen=True)
class Cancelled:
    """The client asked for the end."""

    at: float
    request: str


@dataclass(frozen=True)
class Ended:
    """The terminal that a client got: a finish reason, or an error's code."""

    at: float
    request: str
    outcome: str
    completion_tokens: int | None  # as the gateway says; errors say nothing
    timing: dict[str, float] = field(default_factory=dict)  # ms of each stage, as it says


@dataclass(frozen=True)
class UnknownOnResume:
    """A client came back to what was promised, and was told that nobody knows of it."""

    at: float
    request: str


@dataclass(frozen=True)
class UnexpectedFrame:
    """A frame for nothing that its client has open; `what` is its type, or an error's code."""

    at: float
    client: str
    id: str
    what: str


@dataclass(frozen=True)
class Disconnected:
    """A client's socket broke, or was closed with this code."""

    at: float
    client: str
    code: int


@dataclass(frozen=True)
class FaultInjected:
    """A fault was put on or, with `undone`, taken off."""

    at: float
    action: str
    target: str
    undone: bool = False


@dataclass(frozen=True)
class AccessProbed:
    """A tenant tried to read another's request; `answer` is the type or code that came back."""

    tenant: str
    request_id: str
    answer: str


@dataclass(frozen=True)
class AccessViolated:
    """A process tried what its user may not, as a broker says."""

    broker: str
    what: str


@dataclass(frozen=True)
class StoredLog:
    """A token log as it is stored at the end. `chunks` are (index, count, text)."""

    request_id: str
    tenant: str
    chunks: list[tuple[int, int, str]]
    terminals: list[str]
    attempts: int
    route: str = ""


@dataclass(frozen=True)
class LedgerEntry:
    """One record of the ledger."""

    request_id: str
    tenant: str
    completion_tokens: int
    outcome: str


@dataclass(frozen=True)
class BatchSubmitted:
    """A batch was made before the load; `lines` has the undisturbed output of each by its name."""

    at: float
    batch: str
    tenant: str
    lines: dict[str, list[str]]


@dataclass(frozen=True)
class BatchEnded:
    """Status of a batch and its lines, in the order of its output file and of its error file."""

    at: float
    batch: str
    status: str
    answered: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BatchTries:
    """Ids of the requests that a batch's lines may have become: for each line, of its tries."""

    batch: str
    request_ids: list[list[str]]


@dataclass(frozen=True)
class QueueDepth:
    """What is still in a work queue at the end."""

    stream: str
    messages: int


@dataclass(frozen=True)
class MemorySample:
    """The resident bytes of a process at some moment of the load."""

    at: float
    process: str
    pid: int
    rss: int


@dataclass(frozen=True)
class FootprintChange:
    """What a process that lived through the run holds, when it is idle before and after it."""

    process: str
    rss_before: int  # bytes
    rss_after: int
    descriptors_before: int
    descriptors_after: int


Event = (
    RunStarted
    | Submitted
    | Stored
    | Accepted
    | Refused
    | Started
    | Chunk
    | Cancelled
    | Ended
    | UnknownOnResume
    | UnexpectedFrame
    | Disconnected
    | FaultInjected
    | AccessProbed
    | AccessViolated
    | StoredLog
    | LedgerEntry
    | BatchSubmitted
    | BatchEnded
    | BatchTries
    | QueueDepth
    | MemorySample
    | FootprintChange
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}


def dump(events: Iterable[Event]) -> str:
    """JSON lines."""
    return "".join(
        json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n" for event in events
    )


def load(lines: Iterable[str]) -> Iterator[Event]:
    """The events of `dump`'s lines."""
    for line in lines:
        wire = json.loads(line)
        kind = _KINDS[wire.pop("event")]
        if kind is StoredLog:
            wire["chunks"] = [tuple(chunk) for chunk in wire["chunks"]]
        yield kind(**wire)
