"""Clients that guess keys are slowed; those with a known key are served."""

import pytest

from api import wrong_keys
from api.wrong_keys import BURST, WrongKeyLimiter
from streams.errors import TooManyWrongKeys


def try_wrong_keys(limiter: WrongKeyLimiter, address: str, count: int, now: float) -> int:
    """Try so many wrong keys; return how many of them are looked up."""
    tried = 0
    for number in range(count):
        try:
            limiter.check(address, f"sk-{number}", now)
        except TooManyWrongKeys:
            continue
        limiter.record_wrong(address, f"sk-{number}", now)
        tried += 1
    return tried


def test_an_address_may_try_a_few_and_then_one_a_second() -> None:
    """Others are not slowed; the refusal says how long to wait."""
    limiter = WrongKeyLimiter()
    assert try_wrong_keys(limiter, "a", 1000, 0.0) == BURST + 1
    with pytest.raises(TooManyWrongKeys) as raised:
        limiter.check("a", "sk-right", 0.0)
    assert raised.value.retry_after_seconds == pytest.approx(1.0)
    assert try_wrong_keys(limiter, "b", 10, 0.0) == 10
    assert try_wrong_keys(limiter, "a", 1000, 10.0) == 10


def test_a_key_that_was_right_goes_on_from_its_address() -> None:
    """Behind a proxy one bad client must not lock the others out; until the key is removed."""
    limiter = WrongKeyLimiter()
    limiter.record_right("proxy", "sk-right")
    try_wrong_keys(limiter, "proxy", 1000, 0.0)
    limiter.check("proxy", "sk-right", 0.0)
    with pytest.raises(TooManyWrongKeys):
        limiter.check("proxy", "sk-other", 0.0)
    limiter.record_wrong("proxy", "sk-right", 0.0)
    with pytest.raises(TooManyWrongKeys):
        limiter.check("proxy", "sk-right", 0.0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses not heard of for longest are forgotten first."""
    monkeypatch.setattr(wrong_keys, "MAX_ADDRESSES", 2)
    limiter = WrongKeyLimiter()
    for address in ("a", "b", "a", "c"):
        try_wrong_keys(limiter, address, BURST + 1, 0.0)
    assert try_wrong_keys(limiter, "a", 5, 0.0) == 0
    assert try_wrong_keys(limiter, "b", 5, 0.0) == 5
