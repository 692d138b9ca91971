"""Turns facts about a request or tenant into sentences for `millstream why`. Pure.

The facts come from a dispatcher, a token log or the ledger.
"""

from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
_REASONS = {
    "behind_others": "It waits for those ahead.",
    "no_workers": "It is next; no worker serves the model.",
    "no_worker_of_version": "It is next; no worker serves this version.",
    "draining": "It is next; the workers are shutting down.",
    "no_free_sequences": "It is next; the workers run as many requests as they can.",
    "no_free_tokens": "It is next; no worker has room for so many tokens.",
    "kept_for_others": "It is next; the room that is left is kept for other tenants.",
    "being_sent": "It is next; it is on its way to a worker.",
}


def explain_request(facts: Facts) -> str:
    """Return sentences, one per line, on why a request waits, where it runs or how it ended.

    `facts` are what `why.collect_facts` returned for the request. Their `state` must be `queued`,
    `in_flight` (sent to the workers, not ended), `logged`, `finished` or `unknown`; the text says
    so if nobody knows the request.
    """
    by_state: dict[str, Callable[[Facts], list[str]]] = {
        "queued": _explain_queued,
        "in_flight": _explain_in_flight,
        "logged": _explain_logged,
        "finished": _explain_finished,
        "unknown": _explain_unknown,
    }
    return "\n".join(by_state[facts["state"]](facts))


def explain_tenant(facts: Facts) -> str:
    """Explain how a tenant fares: a paragraph for each model whose dispatcher answers."""
    if facts.get("state") == "unknown":
        return f"There is no tenant {facts['tenant']!r}, and no request of one."
    if not facts["models"]:
        return "No dispatcher answers."
    return "\n\n".join("\n".join(_explain_tenant_at_model(each)) for each in facts["models"])


def _explain_queued(facts: Facts) -> list[str]:
    own, every = facts["ahead_of_its_tenant"], facts["ahead"]
    return [
        f"Request {facts['request_id']} of tenant {facts['tenant']} has waited"
        f" {_format_seconds(facts['waited_seconds'])} for {facts['model']} ({facts['priority']}).",
        f"{_format_requests(own)} of the same tenant {_is_or_are(own)} ahead of it, {every} of all"
        f" tenants ({facts['ahead_tokens']:,} tokens).",
        _REASONS[facts["reason"]],
        f"It starts in {_format_about(facts['estimated_wait_seconds'])};"
        f" its deadline is in {_format_seconds(facts['deadline_in_seconds'])}.",
        *_explain_tenant_at_model(facts["tenant_stands"]),
    ]


def _explain_tenant_at_model(facts: Facts) -> list[str]:
    queued = sum(facts["queued"].values())
    waits = facts["estimated_wait_seconds"]
    submitted = sum(facts["submissions"].values())
    return [
        f"Tenant {facts['tenant']} at {facts['model']}: {_format_requests(queued)} queued,"
        f" {facts['in_flight']} in flight ({facts['in_flight_tokens']:,} tokens reserved).",
        *(
            [f"{_format_requests(submitted)} submitted over NATS and not accepted yet."]
            if submitted
            else []
        ),
        f"It has used {_format_share(facts['times_its_share'])} in the last minute"
        f" (weight {facts['weight']:g}, counter {facts['counter']:,.0f}).",
        "A new request would wait "
        + ", ".join(f"{_format_about(wait)} ({priority})" for priority, wait in waits.items())
        + ".",
        _explain_fleet(facts["fleet"]),
    ]


def _format_share(share: float | None) -> str:
    return "no service, like everybody else," if share is None else f"{share:.1f}x its share"


def _explain_fleet(workers: list[Facts]) -> str:
    if not workers:
        return "No worker serves the model."
    full = sum(not worker["free_sequences"] or not worker["free_tokens"] for worker in workers)
    free = sum(worker["free_tokens"] for worker in workers)
    return f"{full} of {len(workers)} workers are full; {free:,} KV tokens are free."


def _explain_in_flight(facts: Facts) -> list[str]:
    since = _format_seconds(facts["dispatched_seconds_ago"])
    deadline = f"Its deadline is in {_format_seconds(facts['deadline_in_seconds'])}."
    subject = f"Request {facts['request_id']} of tenant {facts['tenant']} "
    if not facts.get("attempts"):
        where = "a worker has it" if facts["is_pulled"] else "no worker has pulled it yet"
        return [f"{subject}was sent to {facts['model']} {since} ago; {where}.", deadline]
    return [
        f"{subject}was sent to {facts['model']} {since} ago.",
        _explain_attempt(facts),
        deadline,
    ]


def _explain_logged(facts: Facts) -> list[str]:
    """The request has a token log, and no dispatcher answers for it."""
    subject = f"Request {facts['request_id']} of tenant {facts['tenant']}"
    return [f"{subject}: no dispatcher answers for it.", _explain_attempt(facts)]


def _explain_attempt(facts: Facts) -> str:
    if not facts["attempts"]:
        return "No worker has begun it."
    return (
        f"It runs on worker {facts['worker']} (version {facts['version']}), attempt"
        f" {facts['attempts']}; {facts['tokens']} tokens so far."
    )


def _explain_finished(facts: Facts) -> list[str]:
    worker = f" on worker {facts['worker']}" if facts.get("worker") else ", on no worker"
    lines = [
        f"Request {facts['request_id']} of tenant {facts['tenant']} has ended"
        f" ({facts['outcome']}){worker}, after {facts['attempts']} attempt(s)."
    ]
    if facts["message"]:
        lines.append(f"{facts['message']}.".capitalize())
    used = facts.get("usage", facts)
    lines.append(
        f"It took {used['prompt_tokens']} prompt tokens and {used['completion_tokens']} generated."
    )
    if timing := facts.get("timing_ms"):
        times = (f"{stage} {milliseconds:,.1f} ms" for stage, milliseconds in timing.items())
        lines.append(f"Its times: {', '.join(times)}.")
    return lines


def _explain_unknown(facts: Facts) -> list[str]:
    return [
        f"Request {facts['request_id']} is not known: no dispatcher that answers has it,"
        " and neither has the ledger."
    ]


def _format_seconds(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.1f} s"


def _format_about(seconds: float | None) -> str:
    return _format_seconds(seconds) if seconds is None else f"about {_format_seconds(seconds)}"


def _format_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"
