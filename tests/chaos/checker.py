"""Does a history keep what DESIGN §4 promises? Pure: events in, violations out.

Each rule is a function whose name is what must hold; it yields who broke it, and how.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from streams import topology
from tests.chaos.history import BatchEnded, BatchSubmitted, Event, LedgerEntry, StoredLog
from tests.chaos.indexed_history import IndexedHistory, ObservedRequest

Violations = Iterator[tuple[str, str]]
NOT_FOUND = "request_not_found"
MIB = 2**20
MORE_MEMORY, MORE_DESCRIPTORS = 48 * MIB, 4  # what an idle process may hold more than before
CUT_SECONDS, CUT_CODE = 10, 1006  # who takes nothing for so long (docs/websocket.md)
FILL_SECONDS = 5  # until all buffers on the way are full
# Refusals that ask the client to come again (docs/websocket.md, "later").
RETRYABLE_CODES = {"broker_unavailable", "overloaded", "queue_full", "no_workers", "tenant_backlog"}


@dataclass(frozen=True)
class RuleViolation:
    rule: str
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.who}: {self.what}"


def check(events: Iterable[Event]) -> list[RuleViolation]:
    """Everything in a history that breaks a rule; nothing if all is well."""
    story = IndexedHistory(events)
    return [RuleViolation(rule.__name__, *broken) for rule in RULES for broken in rule(story)]


def one_terminal(story: IndexedHistory) -> Violations:
    """An accepted request ends in exactly one terminal, for its client and in its log (1).

    Where its place in a queue was wiped its client ends it, and nobody that of a producer.
    """
    left = {each.request_id for each in story.wiped if each.outcome in story.began.excused}
    unheard = {e.request_id for e in story.wiped if e.submitted.route and not e.ended}
    for stream in story.accepted:
        if len(stream.ended) != 1 and stream.request_id not in unheard:
            yield stream.submitted.request, f"{len(stream.ended)} terminals"
    for log in story.logs.values():
        if len(log.terminals) != 1 and (log.terminals or log.request_id not in left | unheard):
            yield log.request_id, f"{len(log.terminals)} terminals in its log"


def one_request(story: IndexedHistory) -> Violations:
    """What a client submits once is one request, whatever it repeated (1)."""
    for stream in story.accepted:
        if len(ids := {accepted.request_id for accepted in stream.accepted}) > 1:
            yield stream.submitted.request, f"became {len(ids)} requests"


def not_failed(story: IndexedHistory) -> Violations:
    """No accepted request fails, but in the ways that its fault excuses."""
    fine = {"length", "cancelled", *story.began.excused}
    for stream in story.accepted:
        if stream.outcome and stream.outcome not in fine:
            yield stream.submitted.request, f"failed with {stream.outcome}"


def gap_free(story: IndexedHistory) -> Violations:
    """A client sees each token once, in order, without a gap (2)."""
    for stream in story.accepted:
        if broken := _first_gap([(c.index, c.count, c.text) for c in stream.chunks]):
            yield stream.submitted.request, broken


def stored_gap_free(story: IndexedHistory) -> Violations:
    """So does its log (2, 3)."""
    aged = _ids(story.accepted) - _ids(story.kept)
    for log in story.complete_logs.values():
        if log.request_id not in aged and (broken := _first_gap(log.chunks)):
            yield log.request_id, f"in its log: {broken}"


def undisturbed(story: IndexedHistory) -> Violations:
    """What a client got is the beginning of the undisturbed output; all of it at `length` (4)."""
    for stream in story.accepted:
        words = stream.submitted.words
        if stream.text != "".join(words[: stream.tokens]):
            yield stream.submitted.request, f"another text: …{stream.text[-40:]!r}"
        elif stream.outcome == "length" and stream.tokens != len(words):
            yield stream.submitted.request, f"{stream.tokens} tokens of {len(words)}"
        elif stream.outcome == "cancelled" and not stream.cancelled:
            yield stream.submitted.request, "cancelled, though its client did not ask for it"


def stored_first(story: IndexedHistory) -> Violations:
    """What a client saw is in the log, and nothing else is (3); a log may have been forgotten."""
    for stream in story.kept:
        log = story.complete_logs.get(stream.request_id)
        if log is None:
            if not story.began.forgets:
                yield stream.submitted.request, "has no log"
        elif stream.ended and (broken := _differs(stream, log, story.began.forgets)):
            yield stream.submitted.request, broken


def billed_once(story: IndexedHistory) -> Violations:
    """Exactly one ledger record per accepted request, with what was stored (5).

    None where stored records were wiped.
    """
    for stream in story.accepted:
        bills = story.bills.get(stream.request_id, [])
        if not bills and story.began.wipes:
            continue
        if len(bills) != 1:
            yield stream.submitted.request, f"{len(bills)} ledger records"
        elif stream.ended and (broken := _billed_wrong(stream, bills[0])):
            yield stream.submitted.request, broken


def unheard_settled(story: IndexedHistory) -> Violations:
    """What was stored though its client was refused, or gave up, is settled once as well (5)."""
    heard = {stream.request_id for stream in story.accepted}
    for request_id in (story.logs.keys() | story.bills.keys()) - heard:
        count = len(story.bills[request_id])
        if count != 1 and not (story.began.wipes and count == 0):
            yield request_id, f"{count} ledger records of a request that nobody waits for"
        log = story.complete_logs.get(request_id)
        if log and story.bills[request_id][:1] and _stored(log) != _billed(story, request_id):
            yield request_id, "billed for other than what was stored"


def tenants_apart(story: IndexedHistory) -> Violations:
    """Logs and bills are their tenant's, and nobody can read another's request (6)."""
    for stream in story.accepted:
        tenant = stream.submitted.tenant
        records = [story.logs.get(stream.request_id), *story.bills.get(stream.request_id, [])]
        for record in records:
            if record and record.tenant != tenant:
                yield stream.submitted.request, f"{tenant}'s is kept as {record.tenant}'s"
    for probe in story.probes:
        if probe.answer != NOT_FOUND:
            yield probe.request_id, f"{probe.tenant} asked for another's and got {probe.answer}"


def within_rights(story: IndexedHistory) -> Violations:
    """No process tries what its user of the brokers may not."""
    for violation in story.violations:
        yield violation.broker, violation.what


def refused_clearly(story: IndexedHistory) -> Violations:
    """A refusal says why and when to come again (8)."""
    for stream in story.requests.values():
        for refused in stream.refused:
            if refused.code not in RETRYABLE_CODES or refused.retry_after_ms is None:
                what = f"refused with {refused.code}, to come again {refused.retry_after_ms}"
                yield refused.request, what


def accepted_in_the_end(story: IndexedHistory) -> Violations:
    """Nobody waits for ever: whoever comes again as told is let in, once the fault is over (1)."""
    for stream in story.requests.values():
        if not stream.accepted and not stream.submitted.route:
            yield stream.submitted.request, f"never accepted; refused {len(stream.refused)} times"


def produced_once(story: IndexedHistory) -> Violations:
    """A submission that a producer stored, however often, is one request (1).

    A producer that has missed all replies has none of what others have; its log has it. Not where
    records were wiped.
    """
    for stream in [] if story.began.wipes else story.produced:
        name, logs = stream.submitted.request, story.logs_on(stream.submitted.route)
        if name not in story.acknowledged:
            yield name, "was never acknowledged"
        elif len(logs) > 1:
            yield name, f"became {len(logs)} requests"
        elif not logs and not story.began.forgets and stream in story.recent:
            yield name, "was acknowledged, and has no log"
        elif logs and not stream.accepted and (broken := _unheard_wrong(stream, logs[0], story)):
            yield name, broken


def lines_answered_once(story: IndexedHistory) -> Violations:
    """A batch ends with each of its lines once, in order, answered as alone (1, 2, 4)."""
    for batch in story.batches:
        end = story.batch_ends.get(batch.batch)
        if end is None:
            yield batch.batch, "has no end"
        elif end.status != "completed" and not story.began.wipes:
            yield batch.batch, f"is {end.status}"
        elif end.status == "completed":
            yield from _lines_wrong(batch, end, story.began.excused)


def lines_billed_once(story: IndexedHistory) -> Violations:
    """A line that was answered has one ledger record with that answer's tokens (5)."""
    for batch in [] if story.began.wipes else story.batches:
        end = story.batch_ends.get(batch.batch)
        tries = dict(zip(batch.lines, story.tries.get(batch.batch, []), strict=False))
        for name in end.answered if end else []:
            bills = [bill for each in tries.get(name, []) for bill in story.bills.get(each, [])]
            tokens = [bill.completion_tokens for bill in bills if bill.outcome == "length"]
            if tokens != [len(batch.lines[name])]:
                yield name, f"billed for {tokens} tokens of {len(batch.lines[name])}"
            for bill in bills:
                if bill.tenant != batch.tenant:
                    yield name, f"{batch.tenant}'s is billed to {bill.tenant}"


def known_when_resumed(story: IndexedHistory) -> Violations:
    """Nobody is told that what was promised is not known; where logs were not forgotten (1)."""
    for unknown in [] if story.began.forgets else story.unknown:
        yield unknown.request, "was promised, and is not known"


def nothing_astray(story: IndexedHistory) -> Violations:
    """Each frame is for what its client has open: nothing follows an end, or is another's (1, 6).

    But the answer to a cancel that has crossed with the end.
    """
    for stray in story.unexpected:
        if stray.what != NOT_FOUND:
            yield stray.client, f"got {stray.what} for {stray.id!r}, which is not open"


def looked_at(story: IndexedHistory) -> Violations:
    """There is evidence: others have tried to read what was accepted, the queues were counted."""
    if story.accepted and not story.probes:
        yield "tenants", "nobody has tried to read another's request"
    for batch in story.batches if not story.began.wipes else []:
        if batch.batch not in story.tries:
            yield batch.batch, "its record was not read"
    for queue in {topology.REQUESTS, topology.WORK} - {left.stream for left in story.queue_depths}:
        yield queue, "was not counted"


def nothing_left(story: IndexedHistory) -> Violations:
    """No request is still queued or in flight when all have ended (1)."""
    for left in story.queue_depths:
        if left.messages:
            yield left.stream, f"holds {left.messages} messages"


def back_to_baseline(story: IndexedHistory) -> Violations:
    """Processes that lived through it hold no more memory and descriptors than before (7)."""
    for held in story.footprints:
        if (more := held.rss_after - held.rss_before) > MORE_MEMORY:
            yield held.process, f"{more / MIB:.0f} MiB more than before"
        if (more := held.descriptors_after - held.descriptors_before) > MORE_DESCRIPTORS:
            yield held.process, f"{more} descriptors more than before"


def only_the_deaf_are_cut(story: IndexedHistory) -> Violations:
    """Who reads nothing is cut, soon, and nobody who reads, or does again in time (7).

    Where clients are told how to read nothing else happens to their sockets.
    """
    if not story.readers:
        return
    for dropped in story.dropped:
        if story.readers.get(dropped.client, 0) < CUT_SECONDS:
            yield dropped.client, f"cut with {dropped.code}, though it read"
        elif dropped.code != CUT_CODE:
            yield dropped.client, f"cut with {dropped.code}"
    for client in story.readers.keys() - {dropped.client for dropped in story.dropped}:
        if story.readers[client] > CUT_SECONDS + FILL_SECONDS:
            yield client, f"reads nothing for {story.readers[client]:.1f} s and is not cut"


RULES: tuple[Callable[[IndexedHistory], Violations], ...] = (
    one_terminal,
    one_request,
    not_failed,
    gap_free,
    stored_gap_free,
    undisturbed,
    stored_first,
    billed_once,
    unheard_settled,
    tenants_apart,
    within_rights,
    refused_clearly,
    accepted_in_the_end,
    produced_once,
    lines_answered_once,
    lines_billed_once,
    known_when_resumed,
    nothing_astray,
    looked_at,
    nothing_left,
    back_to_baseline,
    only_the_deaf_are_cut,
)


def _ids(streams: Iterable[ObservedRequest]) -> set[str]:
    return {stream.request_id for stream in streams}


def _unheard_wrong(stream: ObservedRequest, log: StoredLog, story: IndexedHistory) -> str:
    """Return what is wrong with the log of a request of which its producer has heard nothing."""
    text, words = "".join(text for _, _, text in log.chunks), stream.submitted.words
    if log.terminals == ["length"] and log.request_id in story.complete_logs:
        return "" if text == "".join(words) else f"another text in its log: …{text[-40:]!r}"
    fine = {"length", *story.began.excused}
    return "" if fine.issuperset(log.terminals) else f"failed with {log.terminals}"


def _lines_wrong(batch: BatchSubmitted, end: BatchEnded, excused: Iterable[str]) -> Violations:
    for names in (end.answered, end.failed):
        if names != [name for name in batch.lines if name in names]:
            yield batch.batch, f"its lines came as {names}"
    if sorted([*end.answered, *end.failed]) != sorted(batch.lines):
        yield batch.batch, f"has answers of {end.answered} and errors of {end.failed}"
    for name, text in zip(end.answered, end.texts, strict=True):
        if text != "".join(batch.lines.get(name, [])):
            yield name, f"another text: …{text[-40:]!r}"
    for name, code in zip(end.failed, end.codes, strict=True):
        if code not in excused:
            yield name, f"failed with {code}"


def _first_gap(chunks: Iterable[tuple[int, int, str]]) -> str:
    """Where the chunks do not follow each other; empty if they do."""
    expected = 0
    for index, count, _ in chunks:
        if index != expected:
            return f"token {index} came where {expected} was due"
        expected += count
    return ""


def _differs(stream: ObservedRequest, log: StoredLog, forgets: bool) -> str:
    """Where a log was forgotten its request may have run once more, for nobody (guarantees.md)."""
    text = "".join(text for _, _, text in log.chunks)
    if log.terminals[:1] != [stream.outcome] and not forgets:
        return f"its client got {stream.outcome}, its log says {log.terminals}"
    if not text.startswith(stream.text) or (text != stream.text and not forgets):
        return f"{_stored(log)} tokens stored, {stream.tokens} seen"
    return ""


def _billed_wrong(stream: ObservedRequest, bill: LedgerEntry) -> str:
    if bill.outcome != stream.outcome:
        return f"billed as {bill.outcome}, was {stream.outcome}"
    told = stream.ended[0].completion_tokens
    counts = {stream.tokens, bill.completion_tokens, stream.tokens if told is None else told}
    if len(counts) > 1:
        return f"{bill.completion_tokens} tokens billed, {told} told, {stream.tokens} seen"
    return ""


def _stored(log: StoredLog) -> int:
    return sum(count for _, count, _ in log.chunks)


def _billed(story: IndexedHistory, request_id: str) -> int:
    return story.bills[request_id][0].completion_tokens
