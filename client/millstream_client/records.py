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
    """The token that was chosen, with its natural log-probability.

    `top` has the likeliest tokens at this place, likeliest first; the chosen one need not be there.
    """

    token: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of an answer: `count` tokens, of which the first is token `index`, from 0.

    The chunks of an answer follow each other without a gap. `text` may be empty, or contain text of
    earlier tokens: text that later tokens could still change is held back. `logprobs` has one entry
    per token; None if they were not asked for.
    """

    index: int
    count: int
    text: str
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The model and version that run a request, and the number of the worker's attempt, from 1."""

    model: str
    version: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request, by which it is billed."""

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
    """The normal end of a generation; `finish_reason` is `stop`, `length` or `cancelled`.

    `stop`: the model ended its answer or a stop string came; `length`: the most tokens were
    reached; `cancelled`: the caller cancelled it.
    """

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
    """The class of one input: a score for each of the model's labels, and the name of the best.

    The scores are probabilities that add up to 1, unless the model's labels are independent, or it
    is a regression.
    """

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
    """Return a `record` made of the fields of `frame` that it has; others are ignored.

    Raises `TypeError` if a field without a default is missing.
    """
    return record(**{f.name: frame[f.name] for f in fields(record) if f.name in frame})


def parse_chunk(frame: Frame) -> Chunk:
    """Return the chunk in a `chunk` frame. Raises `KeyError` or `TypeError` for a malformed one."""
    entries = frame.get("logprobs")
    logprobs = None if entries is None else tuple(map(_parse_logprob, entries))
    return Chunk(frame["index"], frame["count"], frame["text"], logprobs)


def parse_done(frame: Frame) -> Done:
    """Return the end in a `done` frame. Raises `KeyError` or `TypeError` for a malformed one."""
    return Done(
        frame["finish_reason"],
        build_record(Usage, frame["usage"]),
        build_record(Timing, frame["timing"]),
    )


def parse_result(frame: Frame) -> Result:
    """Return the raw answer in a `result` frame, which ends `embed` and `classify`.

    Raises `KeyError` or `TypeError` for a malformed frame.
    """
    return Result(
        frame["data"], build_record(Usage, frame["usage"]), build_record(Timing, frame["timing"])
    )


def parse_embeddings(result: Result) -> Embeddings:
    """Return the vectors in the raw answer to `embed`, in the order of the inputs.

    Raises `KeyError` for an item without one.
    """
    return Embeddings([item["embedding"] for item in result.data], result.usage, result.timing)


def parse_classifications(result: Result) -> Classifications:
    """Return the classes in the raw answer to `classify`, in the order of the inputs.

    Raises `TypeError` for an item that lacks a field.
    """
    items = [build_record(Classification, item) for item in result.data]
    return Classifications(items, result.usage, result.timing)


def _parse_logprob(entry: Frame) -> Logprob:
    top = tuple(Alternative(*each) for each in entry["top"])
    return Logprob(entry["token"], entry["text"], entry["logprob"], top)
