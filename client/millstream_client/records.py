"""Frozen records of the gateway's answers.

Fields of a frame that this version does not know are ignored. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been chosen; `logprob` is a natural logarithm."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """The token that was chosen, and in `top` the likeliest tokens there, likeliest first."""

    token: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of an answer: `count` of them, the first with index `index`; chunks have no gaps.

    `text` may be empty, or contain text of earlier tokens: text that later tokens could still
    change is held back.
    """

    index: int
    count: int
    text: str
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has begun the request: its model and version, and the attempt's number, from 1."""

    model: str
    version: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that are billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Time that a request spent in each stage, in milliseconds; 0 for stages it did not pass."""

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
    """The raw answer to `embed` or `classify`: one item for each input, in their order."""

    data: list[dict[str, Any]]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The answer to `embed`: one vector for each input, in their order."""

    vectors: list[list[float]]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of one input: a probability for each of the model's labels, and the likeliest."""

    label: str
    probs: list[float]


@dataclass(frozen=True, slots=True)
class Classifications:
    """The answer to `classify`: one classification for each input, in their order."""

    items: list[Classification]
    usage: Usage
    timing: Timing


Frame = Mapping[str, Any]
R = TypeVar("R", Started, Usage, Timing, Classification)


def build_record(record: type[R], frame: Frame) -> R:
    """Build a record from the fields of `frame` that it has; other fields are ignored."""
    return record(**{f.name: frame[f.name] for f in fields(record) if f.name in frame})


def parse_chunk(frame: Frame) -> Chunk:
    """Parse a `chunk` frame."""
    entries = frame.get("logprobs")
    logprobs = None if entries is None else tuple(map(_parse_logprob, entries))
    return Chunk(frame["index"], frame["count"], frame["text"], logprobs)


def parse_done(frame: Frame) -> Done:
    """Parse a `done` frame."""
    return Done(
        frame["finish_reason"],
        build_record(Usage, frame["usage"]),
        build_record(Timing, frame["timing"]),
    )


def parse_result(frame: Frame) -> Result:
    """Parse a `result` frame, the end of `embed` and `classify`."""
    return Result(
        frame["data"], build_record(Usage, frame["usage"]), build_record(Timing, frame["timing"])
    )


def parse_embeddings(result: Result) -> Embeddings:
    """Convert the result of `embed`."""
    return Embeddings([item["embedding"] for item in result.data], result.usage, result.timing)


def parse_classifications(result: Result) -> Classifications:
    """Convert the result of `classify`."""
    items = [build_record(Classification, item) for item in result.data]
    return Classifications(items, result.usage, result.timing)


def _parse_logprob(entry: Frame) -> Logprob:
    top = tuple(Alternative(*each) for each in entry["top"])
    return Logprob(entry["token"], entry["text"], entry["logprob"], top)
