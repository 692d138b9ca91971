"""A test that fails while its process stood still is told from one that fails by itself."""

import os
import subprocess
import time

from tests.support.stall_watch import STALL_SECONDS, StallWatch, is_of_time


def test_a_stop_of_the_process_is_seen() -> None:
    watch, began = StallWatch(), time.monotonic()
    own = os.getpid()
    with subprocess.Popen(
        ["sh", "-c", f"kill -STOP {own}; sleep {1.5 * STALL_SECONDS}; kill -CONT {own}"]
    ):
        pass
    assert watch.longest_since(began) >= STALL_SECONDS


def test_a_librarys_error_for_a_timeout_is_one_of_time() -> None:
    """Clients wrap them, twice or more often; an error of another cause is never the machine's."""
    error = OSError("no answer")
    error.__cause__ = ValueError("gave up")
    assert not is_of_time(error)
    error.__cause__.__cause__ = TimeoutError()
    assert is_of_time(error)
    assert is_of_time(AssertionError())
