"""Durable answers: the terminal of a request, with all of its output. Pure.

It is a map as replies are, with `type` `done` or `error` and the fields of such a record. It also
has `id` and `digest` (of the submission), `request_id`, `ended` (epoch milliseconds), and what of
`version`, `text`, `logprobs`, `vectors` and `labels` there is, and `attempts` and `first_output_at`
of a request that a worker had.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from streams import messages, subjects
from streams.headers import AnswerRef
from streams.messages import Record
from streams.records.jobs.item_results import build_result
from streams.records.log_contents import RequestEnd

_TERMINAL_FIELDS = (
    "type",
    "finish_reason",
    "stop_sequence",
    "usage",
    "timing",
    "code",
    "message",
)
_TEXT_PIECE = 65_536  # characters of a reply that repeats an answer
_VECTORS_PIECE = 64  # vectors of one


def build_answer(
    ref: AnswerRef,
    request_id: str,
    ended: int,
    records: list[Record],
    terminal: Mapping[str, Any],
) -> Record:
    """Return the answer to a request, of its token log's records and the terminal that ends it."""
    result = build_result(request_id, 1, ended, records, terminal)
    output = {
        "version": result.version,
        "text": result.text,
        "logprobs": result.logprobs,
        "vectors": result.vectors,
        "labels": result.labels,
        "attempts": result.attempts,
        "first_output_at": result.first_output_at,
    }
    return {
        **{name: terminal[name] for name in _TERMINAL_FIELDS if name in terminal},
        "id": subjects.unescape(ref.key),
        "digest": ref.digest,
        "request_id": request_id,
        "ended": ended,
        **{name: value for name, value in output.items() if value},
    }


def terminal_of(answer: Record) -> Record:
    """Return the terminal that an answer stands for."""
    return {name: answer[name] for name in _TERMINAL_FIELDS if name in answer}


def end_of(answer: Record) -> RequestEnd:
    """Return the end of the request that was answered so, whose token log may be gone."""
    version, attempts = answer.get("version", ""), answer.get("attempts", 0)
    return RequestEnd(terminal_of(answer), version, attempts, answer.get("first_output_at", 0))


def replies_of(answer: Record) -> Iterator[Record]:
    """Yield the replies that an answer stands for, as if they came now."""
    yield messages.accepted_record(answer["id"], answer["request_id"])
    yield from _chunks(answer)
    yield from _results(answer)
    yield terminal_of(answer)


def _chunks(answer: Record) -> Iterator[Record]:
    """Text in pieces; the first one counts all tokens, and has their log probabilities."""
    text, tokens = answer.get("text", ""), answer["usage"]["completion_tokens"]
    logprobs = answer.get("logprobs")
    for at in range(0, len(text), _TEXT_PIECE):
        piece = text[at : at + _TEXT_PIECE]
        first, count = (0, tokens) if not at else (tokens, 0)
        chunk = {"type": "chunk", "index": first, "count": count, "characters": at, "text": piece}
        yield {**chunk, **({"logprobs": logprobs} if logprobs and not at else {})}


def _results(answer: Record) -> Iterator[Record]:
    vectors, labels = answer.get("vectors", []), answer.get("labels")
    for at in range(0, len(vectors), _VECTORS_PIECE):
        rows = vectors[at : at + _VECTORS_PIECE]
        result = {"type": "result", "index": at, "count": len(rows), "vectors": rows}
        yield {**result, **({"labels": labels} if labels else {})}
