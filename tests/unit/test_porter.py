"""What is heavy is done in the porter's thread, what is light where it is."""

import threading
from collections.abc import Iterator

import pytest

from gateway.porter import HEAVY_BYTES, Porter


@pytest.fixture
def porter() -> Iterator[Porter]:
    made = Porter()
    yield made
    made.close()


async def test_only_what_is_heavy_leaves_the_event_loop(porter: Porter) -> None:
    """A hop to a thread costs more than most frames do."""
    here = threading.current_thread()
    assert await porter.carry(HEAVY_BYTES - 1, threading.current_thread) is here
    assert await porter.carry(HEAVY_BYTES, threading.current_thread) is not here


@pytest.mark.parametrize("size", [0, HEAVY_BYTES])
async def test_what_an_act_raises_is_raised(porter: Porter, size: int) -> None:
    """Wherever it was done."""
    with pytest.raises(ValueError, match="x"):
        await porter.carry(size, int, "x")
