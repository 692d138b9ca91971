"""Whose metrics have a name."""

import pytest
from prometheus_client import REGISTRY

from gateway import metrics, tenant_labels
from gateway.tenant_labels import MAX_TENANTS, RANK_SECONDS, TenantLabels
from streams.subjects import OTHER, InvalidToken, token

EARLY = [f"early-{number}" for number in range(MAX_TENANTS)]


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def labels(forgotten: list[str]) -> TenantLabels:
    """Of tenants that have used 100 tokens each, and were looked at."""
    made = TenantLabels(forgotten.append)
    made.record_use(EARLY[0], 0, 0.0)
    for tenant in EARLY:
        made.record_use(tenant, 100, 1.0)
        assert made.label_for(tenant) == tenant
    return made


def test_a_noisy_one_gets_a_name_though_it_came_late(
    labels: TenantLabels, forgotten: list[str]
) -> None:
    """It is who an operator looks for."""
    labels.record_use("noisy", 1000, 2.0)
    assert labels.label_for("noisy") == OTHER, "until the next look"
    labels.record_use(EARLY[0], 1, RANK_SECONDS)
    assert labels.label_for("noisy") == "noisy"
    (left,) = forgotten
    assert left in EARLY[1:]
    assert labels.label_for(left) == OTHER
    assert sum(labels.label_for(tenant) == tenant for tenant in EARLY) == MAX_TENANTS - 1


def test_nobody_is_forgotten_while_there_is_room(forgotten: list[str]) -> None:
    """Series of the first tenants stay, however much later ones use."""
    made = TenantLabels(forgotten.append)
    made.record_use("first", 1, 0.0)
    made.record_use("second", 1000, RANK_SECONDS)
    assert (made.label_for("first"), made.label_for("second"), forgotten) == ("first", "second", [])


def test_who_is_no_further_ahead_waits(labels: TenantLabels, forgotten: list[str]) -> None:
    """Names that went to and fro would make no series anybody could read."""
    labels.record_use("alike", 120, RANK_SECONDS)
    assert labels.label_for("alike") == OTHER
    assert not forgotten


def test_what_was_used_long_ago_counts_less(labels: TenantLabels, forgotten: list[str]) -> None:
    """A tenant that once was the largest makes way for one that is now."""
    for look in range(1, 5):
        labels.record_use("now", 60, look * RANK_SECONDS)
        labels.record_use("now", 60, look * RANK_SECONDS + 1)
    assert labels.label_for("now") == "now"
    assert len(forgotten) == 1


def test_many_at_once_share_the_names_of_those_who_are_gone(
    labels: TenantLabels, forgotten: list[str]
) -> None:
    """There are never more names than may be."""
    late = [f"late-{number}" for number in range(3 * MAX_TENANTS)]
    for number, tenant in enumerate(late):
        labels.record_use(tenant, 1000 + number, 2.0)
    labels.record_use(EARLY[0], 0, RANK_SECONDS)
    named = {tenant for tenant in [*EARLY, *late] if labels.label_for(tenant) == tenant}
    assert named == set(late[-MAX_TENANTS:])
    assert sorted(forgotten) == sorted(EARLY)


def test_who_is_named_no_more_leaves_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scrape gets stays small, too."""
    monkeypatch.setattr(tenant_labels, "MAX_TENANTS", 1)
    monkeypatch.setattr(tenant_labels, "RANK_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "_TENANT_LABELS", TenantLabels(metrics._remove_tenant_series))
    for tenant in ("quiet", *["loud"] * 5):
        metrics.count_refused(tenant, "test_labels")
    assert refused("quiet") is None
    assert refused("loud") == 5


@pytest.mark.parametrize("tenant", ["other", "others", "rest"])
def test_no_tenant_is_counted_with_the_rest(tenant: str, forgotten: list[str]) -> None:
    """Whatever it is called: a sum over strangers would pass for one tenant's use."""
    made = TenantLabels(forgotten.append)
    assert made.label_for(token(tenant)) == tenant
    rest = {made.label_for(f"late-{number}") for number in range(2 * MAX_TENANTS)} - {
        f"late-{number}" for number in range(2 * MAX_TENANTS)
    }
    assert len(rest) == 1
    with pytest.raises(InvalidToken):
        token(rest.pop())


def refused(tenant: str) -> float | None:
    labels = {"tenant": tenant, "code": "test_labels"}
    return REGISTRY.get_sample_value("millstream_refused_total", labels)
