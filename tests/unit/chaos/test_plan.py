"""A seed is the whole plan: what it found once it finds again."""

import pytest

from tests.chaos.fault_actions import ACTIONS
from tests.chaos.faults import FAULTS
from tests.chaos.plan import plan, undisturbed_output


@pytest.mark.parametrize("name", FAULTS)
def test_a_plan_is_a_function_of_its_seed(name: str) -> None:
    """The same seed asks and strikes the same at the same times, another one otherwise."""
    fault = FAULTS[name]
    first = plan(fault, 7)
    assert first == plan(fault, 7)
    assert first != plan(fault, 8)


@pytest.mark.parametrize("name", FAULTS)
def test_every_strike_can_be_done(name: str) -> None:
    """The table names deeds that there are, at times that come."""
    for strike in plan(FAULTS[name], 1).injections:
        assert strike.action in ACTIONS
        assert strike.at >= 0
        assert strike.seconds >= 0


def test_the_undisturbed_output_is_a_function_of_prompt_and_seed() -> None:
    """It is what every stream is held against, so it must not depend on anything else."""
    assert undisturbed_output("a prompt", 1, 8) == undisturbed_output("a prompt", 1, 16)[:8]
    assert undisturbed_output("a prompt", 1, 8) != undisturbed_output("a prompt", 2, 8)
