"""Which dispatcher leads which model: even, the same everywhere, and steady."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.leader_assignment import assign_models

names = st.sets(st.text(min_size=1, max_size=8), max_size=30)


@given(models=names, dispatchers=names)
def test_models_are_spread_evenly(models: set[str], dispatchers: set[str]) -> None:
    """Nobody leads more than its part; every model has a leader if there is anybody."""
    found = assign_models(models, dispatchers)
    assert found.keys() == (models if dispatchers else set())
    most = -(-len(models) // max(1, len(dispatchers)))
    assert all(count <= most for count in Counter(found.values()).values())


@given(models=names, dispatchers=names)
def test_every_dispatcher_finds_the_same(models: set[str], dispatchers: set[str]) -> None:
    """Two that disagree would both stand aside, or fight for a lease."""
    assert assign_models(sorted(models), sorted(dispatchers)) == assign_models(
        sorted(models, reverse=True), sorted(dispatchers, reverse=True)
    )


def test_few_models_change_hands_when_a_dispatcher_goes() -> None:
    """A take-over rebuilds an index; those that need not move should stay."""
    models = {f"model-{number}" for number in range(100)}
    dispatchers = {f"dispatcher-{number}" for number in range(5)}
    before = assign_models(models, dispatchers)
    after = assign_models(models, dispatchers - {"dispatcher-0"})
    moved = sum(before[model] != after[model] for model in models)
    assert moved < 45  # 20 have to
