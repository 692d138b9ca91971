"""A measurement that is ended takes what it has started with it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from tests.support.millstream_up import (
    READY_SECONDS,
    command_line,
    descendants,
    environment_without_settings,
    is_gone,
    wait_until,
)


def test_no_cell_is_left_behind() -> None:
    """Its servers and workers would slow down all that is measured afterwards."""
    command, null = (
        [sys.executable, "-m", "bench", "jobs-killed", "--runs", "1"],
        subprocess.DEVNULL,
    )
    process = subprocess.Popen(
        command, stdout=null, stderr=null, env=environment_without_settings()
    )

    def is_up() -> bool:
        return any("nats-server" in command_line(pid) for pid in descendants(process.pid))

    children: list[int] = []
    try:
        wait_until(lambda: process.poll() is not None or is_up(), READY_SECONDS)
        children += descendants(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        process.wait(READY_SECONDS)
        wait_until(lambda: all(is_gone(pid) for pid in children), READY_SECONDS)
    finally:
        for pid in (process.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
