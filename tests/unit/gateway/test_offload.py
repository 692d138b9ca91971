"""What is heavy is done in the porter's thread, what is light where it is."""

import threading
from collections.abc import Iterator

import pytest

from gateway.admission.offload_thread import OFFLOAD_BYTES, OffloadThread


@pytest.fixture
def porter() -> Iterator[OffloadThread]:
    made = OffloadThread()
    yield made
    made.close()


async def test_only_what_is_heavy_leaves_the_event_loop(porter: OffloadThread) -> None:
    """A hop to a thread costs more than most frames do."""
    here = threading.current_thread()
    assert await porter.run(OFFLOAD_BYTES - 1, threading.current_thread) is here
    assert await porter.run(OFFLOAD_BYTES, threading.current_thread) is not here


@pytest.mark.parametrize("size", [0, OFFLOAD_BYTES])
async def test_what_an_act_raises_is_raised(porter: OffloadThread, size: int) -> None:
    """Wherever it was done."""
    with pytest.raises(ValueError, match="x"):
        await porter.run(size, int, "x")
