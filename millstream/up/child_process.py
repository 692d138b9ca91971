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
START_ATTEMPTS = 3  # ends in a row after which the start has failed
TAIL_LINES = 10

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class StartFailed(MillstreamError):
    """A child process ended `START_ATTEMPTS` (3) times in a row before all services were ready.

    `name` is the program's name, `status` its last exit status (negative: the signal that killed
    it), and `tail` the last lines of its log.
    """

    def __init__(self, name: str, status: int, tail: str) -> None:
        super().__init__(f"{name} does not start (exit status {status}); its last lines:\n{tail}")
        self.name, self.status, self.tail = name, status, tail


@dataclass(frozen=True)
class Program:
    """A program to run: its name in logs, its command line, and its whole environment.

    It inherits the file descriptors `inherited_fds`, under the same numbers.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # holds the API key
    inherited_fds: tuple[int, ...] = ()


OnDeath = Callable[[], Awaitable[None]]


class ChildProcess:
    """Runs one program as a child process, and starts it again each time that it ends.

    The owner runs `keep_running` in a task, which `stop` ends. The constructor starts nothing. The
    program's stdout and stderr are appended to `log_file`, which the constructor empties. The
    kernel kills the program when this process dies, even by SIGKILL. `on_death` is awaited each
    time that the program has died, before the next start: it has ended without `stop`, and with
    another exit status than 0, which is that of a program that was asked to end and has drained.
    """

    def __init__(self, program: Program, logs: Path, on_death: OnDeath | None = None) -> None:
        """Empty the program's log file in the directory `logs`; start nothing yet."""
        self.program = program
        self._on_death = on_death
        self.log_file = logs / f"{program.name}.log"
        self.log_file.write_bytes(b"")
        self.is_starting = True  # while True, `START_ATTEMPTS` ends in a row are an error
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    async def keep_running(self) -> None:
        """Start the program, and start it again each time that it ends; return after `stop`.

        The pause before a restart is 0.2 s, doubles with each end in a row up to 10 s, and is 0.2 s
        again after a run of more than 30 s. Every end counts for this, whatever its status; one
        with status 0 is logged as `child_ended`, any other as `child_died`. While `is_starting` is
        True, raises `StartFailed` after 3 ends in a row. Cancelling kills the program with SIGKILL
        at once.
        """
        ends = 0
        try:
            while not self._stopping.is_set():
                status, lived = await self._run_once()
                ends = 1 if lived > STEADY_SECONDS else ends + 1
                await self._back_off(status, ends)
        finally:
            self._send_signal(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The process id of the program that runs, or that ran last; 0 if none ran yet."""
        return self._process.pid if self._process else 0

    @property
    def status(self) -> int | None:
        """The exit status of the program that ran last; None while it runs, or before it did.

        It is negative for a program that a signal has killed.
        """
        return self._process.returncode if self._process else None

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM and return when the program has ended; `keep_running` does not restart it.

        A program that still runs after `seconds` is killed with SIGKILL. Idempotent; returns at
        once if the program does not run.
        """
        self._stopping.set()
        await self._terminate(seconds)

    async def restart(self, seconds: float) -> None:
        """Send SIGTERM to the program and return when it has ended, which is before its next start.

        A program that still runs after `seconds` is killed with SIGKILL. The owner's `keep_running`
        starts the program again, with its usual pause, as after any death.
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
        """Return the last 10 lines (`TAIL_LINES`) of the log file as one text.

        An escaped newline, as in a JSON-encoded traceback, counts as a line break and is shown so.
        The text is empty if the program has written nothing.
        """
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
                pass_fds=self.program.inherited_fds,
            )
        if self._stopping.is_set():  # `stop` was called during the start, with nothing to signal
            self._send_signal(signal.SIGTERM)
        status = await self._process.wait()
        return status, time.monotonic() - began

    async def _back_off(self, status: int, ends: int) -> None:
        if self._stopping.is_set():
            return
        if self._on_death and status != 0:
            await self._on_death()
        if self.is_starting and ends >= START_ATTEMPTS:
            raise StartFailed(self.program.name, status, self.tail())
        pause = min(FIRST_BACKOFF_SECONDS * 2 ** min(ends - 1, 10), MAX_BACKOFF_SECONDS)
        name = self.program.name
        if status == 0:
            log.info("child_ended", child=name, restart_after_seconds=pause)
        else:
            log.warning("child_died", child=name, status=status, restart_after_seconds=pause)
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
    """Have the kernel kill the calling process with SIGKILL when its parent process dies.

    `parent` is the parent's process id. Meant as the `preexec_fn` of a subprocess, which runs in
    the child before the program is loaded. If the parent is dead already, the calling process exits
    at once with status 1. Linux only.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the prctl call
        os._exit(1)
