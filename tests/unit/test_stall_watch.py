"""A test that fails while its process stood still is told from one that fails by itself."""

import os
import subprocess
import time

from tests.support.stall_watch import STALL_SECONDS, StallWatch


def test_a_stop_of_the_process_is_seen() -> None:
    watch, began = StallWatch(), time.monotonic()
    own = os.getpid()
    with subprocess.Popen(
        ["sh", "-c", f"kill -STOP {own}; sleep {1.5 * STALL_SECONDS}; kill -CONT {own}"]
    ):
        pass
    assert watch.longest_since(began) >= STALL_SECONDS
