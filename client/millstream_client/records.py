"""Frozen records of the gateway's answers.

Fields of a frame that this version does not know are ignored. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a place of an answer, with its natural log-probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """The token that was chosen at one place of an answer, with its natural log-probability.

    `top` has the likeliest tokens at that place, likeliest first. The chosen token need not be
    among them. `top` is empty if none were asked for.
    """

    token: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of an answer; `index` is the position of the first, counted from 0.

    The chunks of an answer follow each other without a gap. `text` is empty or shorter while later
    tokens could still change its end; that text comes with a later chunk. `logprobs` has one entry
    per token, and is None if log-probabilities were not asked for.
    """

    index: int
    count: int
    text: str
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has begun to run the request: the model and version, and the attempt's number.

    Attempts are counted from 1; a second one follows if the first one's worker has failed.
    """

    model: str
    version: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Waking:
    """The request waits for the first worker of its model, which is on its way.

    `phase` is `ordered`, `booting` or `loading`; `seconds_left` is the time until the worker is
    ready, from when this came; None if nobody can say.
    """

    phase: str
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request, by which it is billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The time that a request spent in each stage at the server, in milliseconds.

    A stage through which the request did not pass has 0.
    """

    admit: float = 0.0
    queue: float = 0.0
    dispatch: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a generation that did not fail.

    `finish_reason` is `stop` if the model ended its answer or a stop string came, `length` if the
    limit of tokens was reached, and `cancelled` if the caller called `cancel`. `stop_sequence` is
    the stop string that came; None if none did.
    """

    finish_reason: str
    usage: Usage
    timing: Timing
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to `embed` or `classify` as the gateway sent it.

    `data` has one JSON object for each input, in the order of the inputs.
    """

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
    """The classification of one input: the name of the best label, and a score for each label.

    `probs` has the scores of all labels of the model. They are probabilities that add up to 1,
    unless the model's labels are independent of each other or the model is a regression.
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
R = TypeVar("R", Started, Waking, Usage, Timing, Classification)


def build_record(record: type[R], frame: Frame) -> R:
    """Return an instance of the class `record`, with its fields taken from the entries of `frame`.

    Entries that the class does not have are ignored. Raises `TypeError` if a field without a
    default is missing; the values are not checked.
    """
    return record(**{f.name: frame[f.name] for f in fields(record) if f.name in frame})


def parse_chunk(frame: Frame) -> Chunk:
    """Return the chunk in a `chunk` frame.

    Raises `KeyError` or `TypeError` if the frame lacks a field or has one of another form.
    """
    entries = frame.get("logprobs")
    logprobs = None if entries is None else tuple(map(_parse_logprob, entries))
    return Chunk(frame["index"], frame["count"], frame["text"], logprobs)


def parse_done(frame: Frame) -> Done:
    """Return what a `done` frame says, which ends a generation.

    Raises `KeyError` or `TypeError` if the frame lacks a field or has one of another form.
    """
    return Done(
        frame["finish_reason"],
        build_record(Usage, frame["usage"]),
        build_record(Timing, frame["timing"]),
        frame.get("stop_sequence"),
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
