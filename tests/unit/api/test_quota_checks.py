"""The arithmetic of quotas, and how their refusals look on every wire."""

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import error_bodies
from api.submission.open_reservations import OpenReservations, Reservation
from api.submission.quota_checks import (
    ConcurrencyCheck,
    PeriodCheck,
    PerMinuteCheck,
    QuotaScope,
    RequestAmounts,
    build_account,
    build_checks,
    quota_scopes,
)
from api.submission.rate_limit_headers import RateLimitHeaders, format_duration
from registry.tenant_records import ApiKey, QuotaLimits, Tenant
from streams import quota_windows
from streams.errors import (
    HTTP_STATUS,
    BadRequest,
    LargerThanQuota,
    MillstreamError,
    QuotaSpent,
    RateLimited,
    Refused,
    http_status,
)
from streams.quota_windows import MINUTE_SECONDS, SLOT_SECONDS, QuotaPeriod, QuotaWindow
from streams.usage_accounts import PICO, TENANT_SCOPE, Account, Meter, Price

NOW = 1_800_000_000.0  # a full minute, and a full lease
counts = st.integers(0, 10**9)
moments = st.floats(NOW, NOW + 2 * MINUTE_SECONDS, allow_nan=False)
QUOTAS = {
    "requests_per_minute": ("rate_limit_exceeded", 429),
    "tokens_per_minute": ("rate_limit_exceeded", 429),
    "max_concurrent": ("rate_limit_exceeded", 429),
    "tokens_per_day": ("insufficient_quota", 429),
    "spend_per_day": ("insufficient_quota", 429),
    "tokens_per_month": ("insufficient_quota", 429),
    "spend_per_month": ("insufficient_quota", 429),
}


def scope(**limits: object) -> QuotaScope:
    return QuotaScope("acme", TENANT_SCOPE, QuotaLimits.model_validate(limits))


def amounts(prompt: int = 3, completion: int = 7) -> RequestAmounts:
    return RequestAmounts(prompt, completion, Price(PICO, PICO))


@given(previous=counts, current=counts, now=moments)
def test_a_window_only_empties_by_itself(previous: int, current: int, now: float) -> None:
    window = QuotaWindow(previous, current, NOW + 30)
    later = window.used_at(now + 1)
    assert 0 <= later <= window.used_at(now) <= previous + current
    assert window.used_at(NOW + 2 * MINUTE_SECONDS) == 0


@given(previous=counts, current=counts, now=moments, limit=st.integers(1, 10**9), data=st.data())
def test_after_the_wait_it_fits(
    previous: int, current: int, now: float, limit: int, data: st.DataObject
) -> None:
    """`Retry-After` keeps its word, and is not longer than it must be."""
    amount = data.draw(st.integers(1, limit))
    window = QuotaWindow(previous, current, now)
    wait = window.seconds_until_fits(amount, limit, now)
    near = 1e-3 * (previous + current + 1)  # clocks of this size are exact to a microsecond
    assert 0 <= wait <= 2 * MINUTE_SECONDS
    assert window.used_at(now + wait) <= limit - amount + near
    if wait > 1:
        assert window.used_at(now + wait - 1) >= limit - amount - near


@given(previous=counts, current=counts, now=moments)
def test_after_the_reset_all_of_it_is_there(previous: int, current: int, now: float) -> None:
    window = QuotaWindow(previous, current, now)
    assert window.used_at(now + window.seconds_until_empty(now)) <= 1e-3 * (previous + current + 1)


@given(adds=st.lists(st.integers(1, 50), max_size=60), limit=st.integers(1, 100))
def test_no_minute_of_the_clock_has_more_than_the_limit(adds: list[int], limit: int) -> None:
    """Whatever comes, and whenever it comes within two minutes."""
    used = {0: 0, 1: 0}
    for number, amount in enumerate(adds):
        now = NOW + number * 2 * MINUTE_SECONDS / (len(adds) + 1)
        slot = int((now - NOW) // MINUTE_SECONDS)
        window = QuotaWindow(used[0] if slot else 0, used[slot], now)
        if amount <= limit and not window.seconds_until_fits(amount, limit, now):
            used[slot] += amount
    assert max(used.values()) <= limit


@given(now=moments)
def test_a_lease_is_counted_before_it_begins(now: float) -> None:
    """Two gateways whose clocks differ by less than half a lease look at one in common."""
    behind = now - 0.99 * SLOT_SECONDS / 2
    assert set(quota_windows.open_slots(now)) & set(quota_windows.open_slots(behind))
    assert quota_windows.open_slots(
        now + quota_windows.seconds_until_next_half_slot(now) + 1e-3
    ) != quota_windows.open_slots(now)


def hold(name: str) -> Reservation:
    return Reservation(name, name, "", (scope(max_concurrent=1),), {}, {}, None, 0, NOW + 60)


@given(
    acts=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.booleans(), st.floats(0, SLOT_SECONDS)),
        max_size=40,
    )
)
def test_every_lease_has_what_is_open(acts: list[tuple[str, bool, float]]) -> None:
    """Increments by requests, their ends, and what is carried over always add up."""
    holds, counters, opened, now = OpenReservations(), dict[str, int](), set[str](), NOW

    def count(added: dict[str, int]) -> None:
        for subject, amount in added.items():
            counters[subject] = counters.get(subject, 0) + amount

    for name, opens, seconds in acts:
        now += seconds
        count(holds.roll_leases(now))
        if opens and name not in opened:
            holds.add(made := hold(name))
            opened.add(name)
            count(ConcurrencyCheck(made.concurrency_scopes[0], 1).increments(now))
        elif not opens and (gone := holds.pop(name)):
            opened.remove(name)
            count(holds.lease_decrements(gone))
        for lease in quota_windows.open_slots(now):
            assert counters.get(scope().rate_subject(Meter.OPEN, lease), 0) == len(opened)


@pytest.mark.parametrize("quota", QUOTAS)
def test_each_reason_has_its_code_and_status(quota: str) -> None:
    """What OpenAI's clients look at: 429 with `Retry-After`, and whether to wait or to pay."""
    (check,) = build_checks(scope(**{quota: 10}), amounts())
    totals = dict.fromkeys(check.increments(NOW), 10**15)
    refusal = check.find_refusal(totals, NOW)
    assert refusal
    assert (refusal.code, http_status(refusal.code)) == QUOTAS[quota]
    assert refusal.field == quota
    assert int(error_bodies.retry_headers(refusal)["Retry-After"]) >= 1
    assert error_bodies.error_fields(refusal)["retry_after_ms"] > 0
    assert check.find_refusal(dict.fromkeys(totals, 0) | {next(iter(totals)): 1}, NOW) is None


@given(
    quota=st.sampled_from(sorted(QUOTAS)),
    limit=st.integers(1, 10**6),
    used=st.integers(0, 10**6),
    now=moments,
)
def test_a_check_refuses_what_is_over_the_limit_and_nothing_else(
    quota: str, limit: int, used: int, now: float
) -> None:
    found = amounts(1, 0)
    (check,) = build_checks(scope(**{quota: limit}), found)
    first, *rest = check.increments(now)
    unit = check.unit if isinstance(check, PeriodCheck) else 1
    totals = dict.fromkeys(rest, 0) | {first: (used + 1) * unit}
    refusal = check.find_refusal(totals, now)
    assert (refusal is not None) == (used + 1 > limit)
    if refusal:
        assert 0 < (refusal.retry_after_seconds or 0) <= 31 * quota_windows.DAY_SECONDS


def errors(root: type[MillstreamError]) -> set[type[MillstreamError]]:
    return {root, *(e for child in root.__subclasses__() for e in errors(child))}


def test_the_table_has_every_code_of_the_tree() -> None:
    """Try again later is 429, 503 or, for want of room, 507; change the request is another 4xx."""
    ours = {e for e in errors(MillstreamError) if e.__module__ == "streams.errors"}
    assert {e.code for e in ours} <= HTTP_STATUS.keys()
    assert {http_status(e.code) for e in ours & errors(Refused)} == {429, 503, 507}
    assert all(400 <= http_status(e.code) < 500 for e in ours & errors(BadRequest))
    assert {QuotaSpent, RateLimited} <= errors(Refused)


@pytest.mark.parametrize("quota", sorted(QUOTAS.keys() - {"requests_per_minute", "max_concurrent"}))
def test_what_can_never_fit_is_not_told_to_come_again(quota: str) -> None:
    with pytest.raises(LargerThanQuota, match=quota) as refused:
        list(build_checks(scope(**{quota: 9}), amounts()))
    assert (http_status(refused.value.code), refused.value.retry_after_seconds) == (400, None)
    assert len(list(build_checks(scope(**{quota: 10}), amounts()))) == 1


def test_a_tenant_without_quotas_is_not_counted() -> None:
    assert quota_scopes(Tenant(name="acme")) == []
    key = ApiKey(tenant="acme", name="ci", tokens_per_day=1)
    tenant = Tenant(name="acme", max_concurrent=1, key=key)
    assert [found.name for found in quota_scopes(tenant)] == ["tenant", "key-ci"]
    assert [
        found.name for found in quota_scopes(tenant.model_copy(update={"max_concurrent": None}))
    ] == ["key-ci"]


@given(prompt=counts, completion=counts, reserved=counts)
def test_a_settled_account_has_what_was_used(prompt: int, completion: int, reserved: int) -> None:
    """Reservation and correction add up to the usage, in tokens and in money."""
    price = Price.per_million(0.15, 0.6)
    periods = ("2026-11-21", "2026-11")
    packed = Account("acme", ("tenant", "key-ci"), periods, reserved, 7, price).pack()
    account = Account.unpack(packed)
    spend = price.spend_for(prompt, completion)
    both = [account.reserved, account.correction(prompt + completion, spend)]
    for name, period in product(account.scopes, periods):
        for meter, used in ((Meter.TOKENS, prompt + completion), (Meter.SPEND, spend)):
            subject = QuotaScope("acme", name, QuotaLimits()).usage_subject(meter, period)
            assert sum(each.get(subject, 0) for each in both) == used


def test_an_account_of_an_older_release_is_of_a_day() -> None:
    """Requests that were accepted before an update are settled after it."""
    account = Account.unpack("acme tenant 2026-11-21 13 0 0 0")
    assert account.periods == ("2026-11-21",)
    assert account.reserved == {"infer.usage.acme.tenant.tokens.2026-11-21": 13}


def test_the_headers_are_of_the_scope_with_the_least_left() -> None:
    """A key's own quota may be the one that will refuse."""
    limits = RateLimitHeaders()
    key = QuotaScope("acme", "key-ci", QuotaLimits(requests_per_minute=4))
    both = [scope(requests_per_minute=10, tokens_per_minute=1000), key]
    for each in both:
        check = PerMinuteCheck(each, Meter.REQUESTS, each.limits.requests_per_minute or 0, 1)
        current, previous = check.increments(NOW)
        limits.record(check, {current: 3, previous: 0}, NOW, refused=False)
    headers = dict(limits.build(both, NOW + 90))
    assert headers == {
        b"x-ratelimit-limit-requests": b"4",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"30s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"1000",
        b"x-ratelimit-reset-tokens": b"0s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (59.8, "59.8s"), (60, "1m0s"), (360.5, "6m0.5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(now=st.floats(NOW, NOW + 1500 * quota_windows.DAY_SECONDS))
@pytest.mark.parametrize("period", QuotaPeriod)
def test_a_period_is_one_of_utc(period: QuotaPeriod, now: float) -> None:
    """It has one name until it ends, and another one from then on."""
    at = datetime.fromtimestamp(now, UTC)
    end = period.end_after(now)
    name = period.name_at(now)
    assert at.isoformat().startswith(name)
    assert period.name_at((end - timedelta(microseconds=1)).timestamp()) == name
    assert end.isoformat().startswith(period.name_at(end.timestamp()))
    assert period.name_at(end.timestamp()) > name
    assert 0 < period.seconds_left(now) <= 31 * quota_windows.DAY_SECONDS


def test_a_soft_quota_refuses_nothing_and_is_told() -> None:
    """At a half, four fifths, and all of it; a hard one also when it refuses."""
    soft = scope(tokens_per_month=9, soft_quotas=("tokens_per_month",))
    (check,) = build_checks(soft, amounts())  # 10, more than all of it
    assert isinstance(check, PeriodCheck)
    (counter,) = check.increments(NOW)
    assert check.find_refusal({counter: 10**15}, NOW) is None
    for total, percents in ((4, []), (5, [50]), (8, [50, 80]), (9, [50, 80, 100])):
        found = check.find_thresholds({counter: total}, NOW, is_admitted=True)
        assert [each.percent for each in found] == percents
    (hard,) = build_checks(scope(tokens_per_day=100), amounts())
    assert isinstance(hard, PeriodCheck)
    (counter,) = hard.increments(NOW)
    found = hard.find_thresholds({counter: 101}, NOW, is_admitted=False)
    assert [(each.percent, each.used) for each in found] == [(50, 91), (80, 91), (100, 91)]
    assert len({each.subject for each in found}) == 3


def test_money_is_counted_exactly() -> None:
    """A tenth of a unit is no binary fraction."""
    price = Price(PICO // 10, 0)
    (check,) = build_checks(scope(spend_per_day=0.3), RequestAmounts(1, 0, price))
    (counter,) = check.increments(NOW)
    assert check.find_refusal({counter: 3 * PICO // 10}, NOW) is None
    refusal = check.find_refusal({counter: 3 * PICO // 10 + 1}, NOW)
    assert refusal
    assert f"{QuotaPeriod.DAY.end_after(NOW):%Y-%m-%dT%H:%M:%SZ}" in refusal.message


def test_all_scopes_are_counted_in_all_periods_that_any_has() -> None:
    """One line of text is settled, whichever quotas there are."""
    key = QuotaScope("acme", "key-ci", QuotaLimits(spend_per_month=1))
    account = build_account([scope(tokens_per_day=10), key], amounts(), NOW)
    assert account
    assert account.scopes == ("tenant", "key-ci")
    assert account.periods == (QuotaPeriod.DAY.name_at(NOW), QuotaPeriod.MONTH.name_at(NOW))
    assert build_account([scope(max_concurrent=1)], amounts(), NOW) is None
