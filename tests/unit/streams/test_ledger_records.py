"""A ledger record says all that a bill and a judge need, in few bytes, to any release."""

import msgpack
import pytest

from streams import messages, subjects
from streams.headers import Envelope
from streams.ledger_records import build_ledger_record
from streams.messages import LedgerRecord
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record
from streams.usage_accounts import Price, PriceEntry

PRICE = PriceEntry(3, "USD", Price(150_000, 600_000, 75_000))
ENVELOPE = Envelope(
    "r1",
    "acme",
    "here",
    30,
    20,
    deadline=70_000,
    accepted=10_000,
    priority="interactive",
    goal_ms=250,
    key="ci",
    user="0123456789abcdef",
    price=PRICE.pack(),
)
DONE = messages.done_record("stop", messages.openai_usage(20, 7, 16), {})


def record(**facts: object) -> LedgerRecord:
    known = {"version": "1", "worker": "w", "attempts": 1}
    return build_ledger_record(ENVELOPE, "mock", DONE, 12_000, **{**known, **facts})


def test_a_record_has_what_was_promised_and_what_was_used() -> None:
    found = record(first=10_200, warm=True, worker_ms=1900)
    assert (found.priority, found.deadline, found.goal_ms) == ("interactive", 70_000, 250)
    assert (found.key, found.user, found.price_entry) == ("ci", "0123456789abcdef", PRICE)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (20, 7, 16)
    assert (found.outcome, found.first, found.finished) == ("stop", 10_200, 12_000)
    assert LedgerRecord.unpack(found.pack()) == found


def test_a_charge_is_exact_and_cached_tokens_have_a_price_of_their_own() -> None:
    assert record().charge == 4 * 150_000 + 16 * 75_000 + 7 * 600_000
    same = Price(150_000, 600_000)
    assert same.spend_for(20, 7, 16) == same.spend_for(20, 7)


def test_what_no_worker_has_attempted_costs_nothing() -> None:
    """It is told, with its prompt, but it has used nothing."""
    found = record(attempts=0, worker="")
    assert (found.charge, found.billed_tokens, found.prompt_tokens) == (0, (0, 0, 0), 20)


def test_records_of_older_releases_stay_readable() -> None:
    """They have neither a price nor a priority, and are billed by whoever knew their price."""
    old = {
        "request_id": "r0",
        "tenant": "acme",
        "model": "mock",
        "version": "1",
        "outcome": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "attempts": 1,
        "worker": "w",
        "accepted": 1,
        "finished": 2,
        "of_a_later_release": True,
    }
    found = LedgerRecord.unpack(msgpack.packb(old))
    assert (found.priority, found.price, found.charge, found.earlier_attempts) == ("", "", 0, [])


def test_a_record_leaves_out_what_it_does_not_say() -> None:
    """A hundred million of them are kept."""
    assert "earlier_attempts" not in msgpack.unpackb(record().pack())
    assert len(record().pack()) < 420


@pytest.mark.parametrize("price", [PRICE, PriceEntry(), PriceEntry(1, "EUR", Price(1, 2))])
def test_a_price_travels_in_a_header(price: PriceEntry) -> None:
    assert PriceEntry.unpack(price.pack()) == price
    headers = Envelope("r", "a", "h", 1, 1, 1, 1, price=price.pack(), goal_ms=0).to_headers()
    assert Envelope.from_headers(headers).price == price.pack()
    assert Envelope.from_headers(headers).goal_ms == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "victim"},
        {"model": "another"},
        {"tenant": "a.b"},
        {"request_id": ["r"]},
        {"version": b"1"},
        {"prompt_tokens": "many"},
        {"completion_tokens": -1},
        {"cached_tokens": 1.5},
        {"accepted": 10**17},
        {"finished": -1},
        {"price": "1 USD " + "9" * 4000 + " 0"},
        {"earlier_attempts": [b"x"]},
        {"warm": b"x"},
    ],
)
def test_a_forged_record_is_recognised(fields: dict[str, object]) -> None:
    """A record counts for the tenant and model of its subject, and only if it adds up."""
    subject = subjects.ledger("acme", "mock")
    data = record().pack()
    assert unpack_stored_record(subject, data) == record()
    assert unpack_stored_record(subjects.billed("acme", "mock"), data) == record()
    with pytest.raises(ForgedRecord):
        unpack_stored_record(subject, msgpack.packb({**msgpack.unpackb(data), **fields}))


@pytest.mark.parametrize("data", [b"\xc1", b"", msgpack.packb([1]), msgpack.packb({"tenant": "x"})])
def test_bytes_that_are_no_record_are_recognised(data: bytes) -> None:
    with pytest.raises(ForgedRecord):
        unpack_stored_record(subjects.ledger("acme", "mock"), data)
