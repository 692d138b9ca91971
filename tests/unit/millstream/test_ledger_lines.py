"""A ledger record as others get it: in JSON, as an event, with exact money."""

import json
from dataclasses import replace

import msgpack

from millstream.ledger import cloud_events
from millstream.ledger.lines import day_of, to_line
from streams import messages, subjects
from streams.messages import LedgerRecord, RefusalCounts
from streams.records.cost_sums import CostSums
from streams.records.worker_time import WorkerTime
from streams.usage_accounts import Price, PriceEntry, WorkerPrice, format_amount, format_cost

SUBJECT = subjects.ledger("acme", "mock")
RECORD = LedgerRecord(
    request_id="r1",
    tenant="acme",
    model="mock",
    version="1",
    outcome="stop",
    prompt_tokens=20,
    completion_tokens=7,
    attempts=1,
    worker="w",
    accepted=1_793_491_199_999,
    finished=1_793_491_201_000,
    account="acme tenant 2026-10-31 27 0 0 0",
    cached_tokens=16,
    price=PriceEntry(3, "USD", Price(150_000, 600_000, 75_000)).pack(),
    key="ci",
)


def test_a_line_has_price_and_charge_in_full() -> None:
    """Whoever reads it needs nothing else to write a bill."""
    line = to_line(9, SUBJECT, RECORD.pack())
    assert (line["type"], line["seq"], line["request_id"]) == ("request", 9, "r1")
    assert line["price"] == {"prompt": 150_000, "cached": 75_000, "completion": 600_000}
    assert (line["currency"], line["price_version"]) == ("USD", 3)
    assert line["billed_tokens"] == {"prompt": 20, "completion": 7, "cached": 16}
    assert line["charge"] == RECORD.charge == 6_000_000
    assert "account" not in line


def test_a_request_belongs_to_the_day_on_which_it_was_accepted() -> None:
    """Its price and its quotas are of that day, though it ends on the next."""
    assert day_of(to_line(1, SUBJECT, RECORD.pack())) == "2026-10-31"


def test_refusals_are_told_by_name() -> None:
    counts = RefusalCounts("g", "acme", "_other", 5, 6, [("overloaded", "1", "batch", 7)])
    line = to_line(2, subjects.outcome("acme", None), messages.pack(counts))
    assert line["type"] == "refusals"
    (count,) = line["counts"]
    assert count == {"code": "overloaded", "version": "1", "priority": "batch", "count": 7}


def test_a_worker_tells_what_of_its_time_was_no_requests() -> None:
    """Whoever reads the lines can add up all of it, in whole nanoseconds."""
    price = WorkerPrice("USD", 1_200_000).pack()
    time = WorkerTime("w", "mock", "1", 5, 65_005, 60, 30, 10, 5, "small", price)
    line = to_line(4, time.subject, time.pack())
    assert line == {"type": "worker_time", "seq": 4, **vars(time)}
    assert to_line(4, time.subject, messages.pack({**vars(time), "worker_price": "1.2"}))[
        "type"
    ] == ("unreadable")


def test_costs_are_exact() -> None:
    """A price an hour times nanoseconds is a whole number, whatever is added up."""
    assert CostSums.of_request(replace(RECORD, compute_ns=7)).requests_cost == 0
    price = WorkerPrice("USD", 3_600_000).pack()
    request = replace(RECORD, compute_ns=20, worker_price=price)
    time = WorkerTime("w", "mock", "1", 0, 1, 60, 30, 5, 4, "", price)
    sums = CostSums.of_request(request) + CostSums.of_worker(time)
    assert (sums.open, sums.open_cost) == (1, 3_600_000)
    assert sums.to_json()["amounts"]["requests"] == "0.00000000002"
    assert format_cost(3_600_000 * 3600 * 10**9) == "3.6"


def test_what_cannot_be_read_is_kept() -> None:
    """One bad message must neither stop an export nor be lost by it."""
    for data in (b"\xc1", msgpack.packb({"tenant": "acme"})):
        line = to_line(3, SUBJECT, data)
        assert (line["type"], line["subject"]) == ("unreadable", SUBJECT)
        assert line["data"]


def test_a_record_of_another_tenant_or_model_is_no_bill() -> None:
    """A stolen worker may write of its own model's requests, and of nobody else's."""
    for subject in (subjects.ledger("acme", "stolen"), subjects.ledger("mallory", "mock")):
        line = to_line(3, subject, RECORD.pack())
        assert (line["type"], line["subject"]) == ("unreadable", subject)
    time = WorkerTime("w", "mock", "1", 5, 65_005, 60, 30, 10, 5)
    assert to_line(4, subjects.worker_time("mock", "w2"), time.pack())["type"] == "unreadable"


def test_every_line_is_json() -> None:
    """An export must not stop at bytes where a text should be."""
    for fields in ({"version": b"1"}, {"earlier_attempts": [{"worker": b"w"}]}, {"warm": b""}):
        data = msgpack.packb({**msgpack.unpackb(RECORD.pack()), **fields})
        assert json.loads(json.dumps(to_line(3, SUBJECT, data)))["type"] == "unreadable"


def test_an_event_is_known_by_request_and_cell() -> None:
    """A meter counts it once, however often it comes; amounts are text, for JavaScript's sake."""
    event = cloud_events.to_event(to_line(9, SUBJECT, RECORD.pack()), "cell-1")
    assert event["specversion"] == "1.0"
    assert (event["id"], event["source"], event["subject"]) == ("r1", "cell-1", "acme")
    assert event["time"] == "2026-10-31T23:59:59.999Z"
    assert event["data"]["charge"] == "6000000"
    assert event["data"]["prompt_tokens"] == 20


def test_amounts_are_exact() -> None:
    assert format_amount(0) == "0"
    assert format_amount(1) == "0.000000000001"
    assert format_amount(12 * 10**12) == "12"
    assert format_amount(123_456_789_012_345_678_901) == "123456789.012345678901"
