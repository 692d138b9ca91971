"""What requests are answered with: frozen records of the gateway's frames.

Frames may have fields that this version does not know: they are passed over. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come; `logprob` is a natural logarithm."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token that was chosen, and the likeliest that could have been, likeliest first."""

    token: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of an answer, from the one with the index `index` on; no gaps between chunks.

    `text` may be empty, or more than these tokens': what is not certain yet is held back.
    """

    index: int
    count: int
    text: str
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has the request: its model and version, and which attempt it is, from 1."""

    model: str
    version: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What is billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in milliseconds; 0 for stages that it did not pass."""

    admit: float = 0.0
    queue: float = 0.0
    dispatch: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a generation: `finish_reason` is `stop`, `length` or `cancelled`."""

    finish_reason: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to `embed` or `classify` as it came, one item for each input in their order."""

    data: list[dict[str, Any]]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in their order."""

    vectors: list[list[float]]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Classification:
    """`probs` has a number for each of the model's labels; `label` names the largest."""

    label: str
    probs: list[float]


@dataclass(frozen=True, slots=True)
class Classifications:
    """One classification for each input, in their order."""

    items: list[Classification]
    usage: Usage
    timing: Timing


Frame = Mapping[str, Any]
R = TypeVar("R", Started, Usage, Timing, Classification)


def build_record(record: type[R], frame: Frame) -> R:
    """The record that `frame` holds, among other things."""
    return record(**{f.name: frame[f.name] for f in fields(record) if f.name in frame})


def parse_chunk(frame: Frame) -> Chunk:
    logprobs = frame.get("logprobs")
    found = None if logprobs is None else tuple(map(_parse_logprob, logprobs))
    return Chunk(frame["index"], frame["count"], frame["text"], found)


def parse_done(frame: Frame) -> Done:
    return Done(
        frame["finish_reason"],
        build_record(Usage, frame["usage"]),
        build_record(Timing, frame["timing"]),
    )


def parse_result(frame: Frame) -> Result:
    return Result(
        frame["data"], build_record(Usage, frame["usage"]), build_record(Timing, frame["timing"])
    )


def parse_embeddings(found: Result) -> Embeddings:
    return Embeddings([item["embedding"] for item in found.data], found.usage, found.timing)


def parse_classifications(found: Result) -> Classifications:
    items = [build_record(Classification, item) for item in found.data]
    return Classifications(items, found.usage, found.timing)


def _parse_logprob(entry: Frame) -> Logprob:
    top = tuple(Alternative(*each) for each in entry["top"])
    return Logprob(entry["token"], entry["text"], entry["logprob"], top)
