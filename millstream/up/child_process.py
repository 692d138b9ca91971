"""Runs one program as a child process: starts it, restarts it with growing pauses, stops it."""

import asyncio
import ctypes
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from streams.errors import MillstreamError

log = structlog.get_logger()

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 10.0
STEADY_SECONDS = 30.0  # after a life longer than this, the backoff begins anew
START_ATTEMPTS = 3  # deaths in a row after which the start has failed
TAIL_LINES = 10

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class StartFailed(MillstreamError):
    """A child process died `START_ATTEMPTS` times in a row before everything was ready.

    `status` is its last exit status, `tail` the last lines of its log.
    """

    def __init__(self, name: str, status: int, tail: str) -> None:
        super().__init__(f"{name} does not start (exit status {status}); its last lines:\n{tail}")
        self.name, self.status, self.tail = name, status, tail


@dataclass(frozen=True)
class Program:
    """A program to run: its name in logs, its command line, and its whole environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # holds the API key


OnDeath = Callable[[], Awaitable[None]]


class ChildProcess:
    """Runs one program as a child process, and starts it again whenever it dies.

    The owner runs `keep_running` in a task and ends it with `stop`. The program's output is
    appended to `log_file`, which is emptied at creation. The program dies with this process, even
    when this process is killed. `on_death` is awaited after each death, before the next start.
    """

    def __init__(self, program: Program, logs: Path, on_death: OnDeath | None = None) -> None:
        """Empty the program's log file in the directory `logs`; start nothing yet."""
        self.program = program
        self._on_death = on_death
        self.log_file = logs / f"{program.name}.log"
        self.log_file.write_bytes(b"")
        self.is_starting = True  # while True, `START_ATTEMPTS` deaths in a row are an error
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    async def keep_running(self) -> None:
        """Run the program, and again after each death, until `stop` is called.

        The pause before a restart doubles from 0.2 s to 10 s, and is short again after a run of
        more than 30 s. Cancelling kills the program at once. While `is_starting`, raises
        `StartFailed` after `START_ATTEMPTS` deaths in a row.
        """
        deaths = 0
        try:
            while not self._stopping.is_set():
                status, lived = await self._run_once()
                deaths = 1 if lived > STEADY_SECONDS else deaths + 1
                await self._back_off(status, deaths)
        finally:
            self._send_signal(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The process id of the program that runs, or that ran last; 0 if none ran yet."""
        return self._process.pid if self._process else 0

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM and wait until the program has ended; it is not started again. Idempotent.

        If it has not ended after `seconds`, it is killed with SIGKILL.
        """
        self._stopping.set()
        await self._terminate(seconds)

    async def restart(self, seconds: float) -> None:
        """End the program as `stop` does; a running `keep_running` then starts it again.

        Returns when the old program has ended, which is before the new one has started.
        """
        await self._terminate(seconds)

    async def _terminate(self, seconds: float) -> None:
        self._send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self._wait_for_exit()
        except TimeoutError:
            log.warning("child_killed", child=self.program.name, after_seconds=round(seconds, 1))
            self._send_signal(signal.SIGKILL)
            await self._wait_for_exit()

    def tail(self) -> str:
        """Return the log's last `TAIL_LINES` lines; escaped newlines of tracebacks are expanded."""
        with self.log_file.open(errors="replace") as lines:
            text = "".join(deque(lines, TAIL_LINES)).replace("\\n", "\n")
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    async def _run_once(self) -> tuple[int, float]:
        """Run the program once; return its exit status and how many seconds it lived."""
        began = time.monotonic()
        with self.log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.program.command,
                env=self.program.environment,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that a terminal's Ctrl-C reaches the supervisor alone
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        if self._stopping.is_set():  # `stop` was called during the start, with nothing to signal
            self._send_signal(signal.SIGTERM)
        status = await self._process.wait()
        return status, time.monotonic() - began

    async def _back_off(self, status: int, deaths: int) -> None:
        if self._stopping.is_set():
            return
        if self._on_death:
            await self._on_death()
        if self.is_starting and deaths >= START_ATTEMPTS:
            raise StartFailed(self.program.name, status, self.tail())
        pause = min(FIRST_BACKOFF_SECONDS * 2 ** min(deaths - 1, 10), MAX_BACKOFF_SECONDS)
        log.warning(
            "child_died", child=self.program.name, status=status, restart_after_seconds=pause
        )
        try:
            async with asyncio.timeout(pause):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _wait_for_exit(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, the process with id `parent`, dies.

    Meant as `preexec_fn`, which runs in the child before the program does. If the parent is dead
    already, the child exits with status 1. Linux only.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the prctl call
        os._exit(1)
