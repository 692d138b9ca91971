"""A child process of `millstream up` is kept alive, stopped in time, and never outlives it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.up.child_process import ChildProcess, OnDeath, Program, StartFailed
from tests.support.eventually import eventually

SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
POLITE = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    "print(os.getpid(), flush=True); time.sleep(60)"
)


def child_of(code: str, logs: Path, on_death: OnDeath | None = None) -> ChildProcess:
    program = Program("child", (sys.executable, "-c", code), dict(os.environ))
    return ChildProcess(program, logs, on_death)


@asynccontextmanager
async def kept(child: ChildProcess) -> AsyncIterator[ChildProcess]:
    task = asyncio.create_task(child.keep_running())
    try:
        yield child
    finally:
        await child.stop(5)
        await task


def lives(child: ChildProcess) -> list[int]:
    """The process id of each life so far, as the child itself printed it."""
    return [int(line) for line in child.log_file.read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


async def test_a_dead_child_is_started_again(tmp_path: Path) -> None:
    """A crash of one process is a pause, not the end."""
    async with kept(child_of(SLEEP, tmp_path)) as child:
        await eventually(lambda: len(lives(child)) == 1)
        os.kill(lives(child)[0], signal.SIGKILL)
        await eventually(lambda: len(lives(child)) == 2)


async def test_a_child_that_was_asked_to_end_has_not_died(tmp_path: Path) -> None:
    """A drain wakes nobody at night, and there is nothing to take over."""
    announced: list[int] = []

    async def on_death() -> None:
        announced.append(child.pid)

    child = child_of(POLITE, tmp_path, on_death)
    with capture_logs() as logged:
        async with kept(child):
            for end in (signal.SIGTERM, signal.SIGKILL):
                await eventually(lambda: len(lives(child)) > len(logged))
                os.kill(lives(child)[-1], end)
                before = len(logged)
                await eventually(partial(_grown, logged, before))
    drained, died = logged[:2]
    assert (drained["event"], drained["log_level"], drained["child"]) == (
        "child_ended", "info", "child"
    )  # fmt: skip
    assert (died["event"], died["log_level"], died["status"]) == ("child_died", "warning", -9)
    assert announced == lives(child)[1:2]


def _grown(items: list[Any], size: int) -> bool:
    return len(items) > size


async def test_a_child_that_is_restarted_ends_in_time_and_is_started_again(
    tmp_path: Path,
) -> None:
    """Deaf as it may be: what is ill is often that, too."""
    async with kept(child_of(DEAF, tmp_path)) as child:
        await eventually(lambda: len(lives(child)) == 1)
        await child.restart(0.1)
        assert is_gone(lives(child)[0])
        await eventually(lambda: len(lives(child)) == 2)
        assert child.pid == lives(child)[1]


async def test_a_child_that_cannot_start_ends_the_start_with_its_last_lines(
    tmp_path: Path,
) -> None:
    """The reason should be on the screen, not only in a file."""
    child = child_of("print('no such model'); raise SystemExit(3)", tmp_path)
    with pytest.raises(StartFailed, match="exit status 3.*\n.*no such model"):
        await child.keep_running()


async def test_once_all_was_ready_a_child_is_restarted_for_ever(tmp_path: Path) -> None:
    """A night of bad luck must not stop the service in the morning."""
    child = child_of("import os; print(os.getpid())", tmp_path)
    child.is_starting = False
    async with kept(child):
        await eventually(lambda: len(lives(child)) > 3)


async def test_a_deaf_child_is_killed_in_time(tmp_path: Path) -> None:
    """Stopping has an end, whatever the child does."""
    async with kept(child_of(DEAF, tmp_path)) as child:
        await eventually(lambda: len(lives(child)) == 1)
        await child.stop(0.1)
        assert is_gone(lives(child)[0])


async def test_cancelling_kills_the_child(tmp_path: Path) -> None:
    """When the supervisor fails, nothing is left behind."""
    child = child_of(SLEEP, tmp_path)
    task = asyncio.create_task(child.keep_running())
    await eventually(lambda: len(lives(child)) == 1)
    task.cancel()
    await eventually(lambda: is_gone(lives(child)[0]))


SUPERVISOR = """
import asyncio, os, sys, uvloop
from pathlib import Path
from millstream.up.child_process import ChildProcess, Program
program = Program("child", (sys.executable, "-c", {code!r}), dict(os.environ))
uvloop.run(ChildProcess(program, Path({logs!r})).keep_running())
"""


async def test_a_child_dies_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL leaves no time to stop children; the kernel does it."""
    script = SUPERVISOR.format(code=DEAF, logs=str(tmp_path))
    log = tmp_path / "child.log"
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    supervisor.kill()
    await supervisor.wait()
    child = int(log.read_text())
    await eventually(lambda: is_gone(child))
