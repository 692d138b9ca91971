"""Shows dead letters as plain data or tables, without prompts and stop strings."""

from datetime import UTC, datetime
from typing import Any

from rich.console import Group
from rich.table import Table

from millstream.admin.console_output import make_whole_table
from millstream.admin.fitted_table import Column, FittedTable
from millstream.dead.replays import Replay
from streams.messages import Request, Sampling
from streams.records.attempt_history import PastAttempt
from streams.records.dead_letters import DeadLetter

Facts = dict[str, Any]
_COLUMNS = {  # by fact
    "when": Column("when (UTC)", "text", least=10),
    "request_id": Column("request"),  # can be copied in one piece
    "tenant": Column("tenant", "name"),
    "model": Column("model", "name"),
    "priority": Column("priority", rank=3),
    "reason": Column("reason", "name", least=9),
    "attempts": Column("attempts", is_number=True, rank=2),
    "worker": Column("worker", "name", rank=4),
    "first_error": Column("first error", "text", least=20, rank=5),
    "last_error": Column("last error", "text", least=20, rank=1),
    "replayed_as": Column("replayed as", rank=6),
}
_HIDDEN_HEADERS = ("Tries", "Reason", "Ended", "Nats-")  # shown decoded, or the broker's own
_SHOWN_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs")


def summarize(letter: DeadLetter, replay: Replay | None) -> Facts:
    """Return, as JSON data, the facts of a dead letter that `dead list` shows in one row.

    `replay` is the new request as which the letter was queued again; None if it was not. A fact
    that is not known, such as the worker of a request without attempts, is None.
    """
    errors = [each.error for each in letter.history.failures]
    tries = letter.history.attempts
    return {
        "request_id": letter.name,
        "when": format_time(letter.ended),
        "tenant": letter.tenant,
        "model": letter.model,
        "priority": str(letter.priority),
        "reason": letter.reason,
        "attempts": len(tries),
        "worker": tries[-1].worker if tries else None,
        "first_error": errors[0] if errors else None,
        "last_error": errors[-1] if errors else None,
        "replayed_as": replay.request_id if replay else None,
        "replay_of": letter.replay_of or None,
    }


def describe(letter: DeadLetter, replay: Replay | None) -> Facts:
    """Return, as JSON data, all facts of a dead letter, but no text that the client wrote.

    The result has the entries of `summarize`, and `headers`, `payload` (sizes and sampling
    parameters of the request) and `tries` (one entry per attempt of a worker). If the payload
    cannot be decoded, nothing is raised: `payload` then has its size in bytes and the name of the
    exception. `replay` is as in `summarize`.
    """
    return {
        **summarize(letter, replay),
        "headers": {
            k: v for k, v in sorted(letter.headers.items()) if not k.startswith(_HIDDEN_HEADERS)
        },
        "payload": _describe_payload(letter),
        "tries": [_describe_attempt(each) for each in letter.history.attempts],
    }


def format_time(epoch_ms: int) -> str | None:
    """Return a time in epoch milliseconds as ISO 8601 text in UTC, to the second.

    Returns None for 0, which stands for an unknown time.
    """
    if not epoch_ms:
        return None
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="seconds")


def _describe_attempt(each: PastAttempt) -> Facts:
    return {
        "attempt": each.attempt,
        "worker": each.worker,
        "when": format_time(each.at),
        "fault": str(each.fault),
        "error": each.error,
    }


def _describe_payload(letter: DeadLetter) -> Facts:
    """The request's kind, sizes and sampling parameters."""
    facts: Facts = {"bytes": len(letter.payload)}
    try:
        request = Request.unpack(letter.payload)
    except Exception as error:  # of any kind: bytes that are no request may have caused its death
        return facts | {"unreadable": type(error).__name__}
    return facts | {
        "kind": request.kind,
        "prompt_tokens": letter.envelope.prompt_tokens if letter.envelope else None,
        "inputs": len(request.inputs),
        "adapter": request.adapter.name if request.adapter else None,
        "sampling": _describe_sampling(request.sampling) if request.kind == "generate" else None,
    }


def _describe_sampling(sampling: Sampling) -> Facts:
    shown: Facts = {name: getattr(sampling, name) for name in _SHOWN_SAMPLING}
    return shown | {
        "stop_strings": len(sampling.stop),
        "logit_bias": len(sampling.logit_bias),
        "grammar": sampling.grammar.kind if sampling.grammar else None,
    }


def render_table(rows: list[Facts]) -> FittedTable:
    """Return results of `summarize` as a table for rich, a row for each, in the same order."""
    return FittedTable(
        [*_COLUMNS.values()], [[_format_fact(name, row[name]) for name in _COLUMNS] for row in rows]
    )


def _format_fact(name: str, value: object) -> str:
    if name == "when" and value:
        return str(value).replace("T", " ").removesuffix("+00:00")
    return _format_cell(value)


def render_letter(facts: Facts) -> Group:
    """Return the result of `describe` as four rich tables: letter, headers, payload, attempts."""
    nested = ("headers", "payload", "tries")
    plain = {name: value for name, value in facts.items() if name not in nested}
    tries = make_whole_table("attempt", "worker", "when", "fault", "error", title="Attempts")
    for each in facts["tries"]:
        tries.add_row(*map(_format_cell, each.values()))
    parts = [("Dead letter", plain), ("Headers", facts["headers"]), ("Payload", facts["payload"])]
    return Group(*(_facts_table(title, each) for title, each in parts), tries)


def _facts_table(title: str, facts: Facts) -> Table:
    table = make_whole_table(title=title)
    for name, value in facts.items():
        if value not in (None, ""):
            table.add_row(name, _format_cell(value))
    return table


def _format_cell(value: object) -> str:
    return "" if value is None else str(value)
