"""Whose metrics have a name."""

import pytest
from prometheus_client import REGISTRY

from gateway import metrics, tenant_labels
from gateway.tenant_labels import LOOK_SECONDS, MOST_TENANTS, OTHER, TenantLabels

EARLY = [f"early-{number}" for number in range(MOST_TENANTS)]


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def labels(forgotten: list[str]) -> TenantLabels:
    """Of tenants that have used 100 tokens each, and were looked at."""
    made = TenantLabels(forgotten.append)
    made.use(EARLY[0], 0, 0.0)
    for tenant in EARLY:
        made.use(tenant, 100, 1.0)
        assert made.of(tenant) == tenant
    return made


def test_a_noisy_one_gets_a_name_though_it_came_late(
    labels: TenantLabels, forgotten: list[str]
) -> None:
    """It is who an operator looks for."""
    labels.use("noisy", 1000, 2.0)
    assert labels.of("noisy") == OTHER, "until the next look"
    labels.use(EARLY[0], 1, LOOK_SECONDS)
    assert labels.of("noisy") == "noisy"
    (left,) = forgotten
    assert left in EARLY[1:]
    assert labels.of(left) == OTHER
    assert sum(labels.of(tenant) == tenant for tenant in EARLY) == MOST_TENANTS - 1


def test_nobody_is_forgotten_while_there_is_room(forgotten: list[str]) -> None:
    """Series of the first tenants stay, however much later ones use."""
    made = TenantLabels(forgotten.append)
    made.use("first", 1, 0.0)
    made.use("second", 1000, LOOK_SECONDS)
    assert (made.of("first"), made.of("second"), forgotten) == ("first", "second", [])


def test_who_is_no_further_ahead_waits(labels: TenantLabels, forgotten: list[str]) -> None:
    """Names that went to and fro would make no series anybody could read."""
    labels.use("alike", 120, LOOK_SECONDS)
    assert labels.of("alike") == OTHER
    assert not forgotten


def test_what_was_used_long_ago_counts_less(labels: TenantLabels, forgotten: list[str]) -> None:
    """A tenant that once was the largest makes way for one that is now."""
    for look in range(1, 5):
        labels.use("now", 60, look * LOOK_SECONDS)
        labels.use("now", 60, look * LOOK_SECONDS + 1)
    assert labels.of("now") == "now"
    assert len(forgotten) == 1


def test_many_at_once_share_the_names_of_those_who_are_gone(
    labels: TenantLabels, forgotten: list[str]
) -> None:
    """There are never more names than may be."""
    late = [f"late-{number}" for number in range(3 * MOST_TENANTS)]
    for number, tenant in enumerate(late):
        labels.use(tenant, 1000 + number, 2.0)
    labels.use(EARLY[0], 0, LOOK_SECONDS)
    named = {tenant for tenant in [*EARLY, *late] if labels.of(tenant) == tenant}
    assert named == set(late[-MOST_TENANTS:])
    assert sorted(forgotten) == sorted(EARLY)


def test_who_is_named_no_more_leaves_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scrape gets stays small, too."""
    monkeypatch.setattr(tenant_labels, "MOST_TENANTS", 1)
    monkeypatch.setattr(tenant_labels, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "_LABELS", TenantLabels(metrics._forget))
    for tenant in ("quiet", *["loud"] * 5):
        metrics.count_refused(tenant, "test_labels")
    assert refused("quiet") is None
    assert refused("loud") == 5


def refused(tenant: str) -> float | None:
    labels = {"tenant": tenant, "code": "test_labels"}
    return REGISTRY.get_sample_value("millstream_refused_total", labels)
