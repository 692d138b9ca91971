"""`millstream up` as its users run it: a process with words, ports, an output and an end."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from streams.accounts.access import UserClass
from streams.connection_files import ConnectionFiles
from tests.support.ports import free_port

KEY = "sk-e2e"
READY_SECONDS = 60.0


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(child) for task in tasks for child in task.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []


def command_line(pid: int) -> str:
    """What it was started with; nothing once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def environment_without_settings() -> dict[str, str]:
    """The environment without settings of Millstream."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")}


@contextmanager
def millstream_process(*words: str, cwd: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A `millstream` command whose output is read as it comes; killed at the end if it lives."""
    command, pipe = [sys.executable, "-m", "millstream", *words], subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, text=True, env=environment_without_settings(), cwd=cwd
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def run_millstream(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a `millstream` command with `variables` set too; return its output and status."""
    command = [sys.executable, "-m", "millstream", *words]
    environment = {**environment_without_settings(), **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def run_in_terminal(columns: int, *words: str) -> list[str]:
    """The lines that a `millstream` command prints on a terminal of so many columns."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (50, columns))
    command = [sys.executable, "-m", "millstream", *words]
    environment = {**environment_without_settings(), "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(command, stdout=end, stderr=end, stdin=end, env=environment) as process:
        os.close(end)
        printed = _read_terminal(terminal)
        process.wait(60)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed).splitlines()


def _read_terminal(terminal: int) -> str:
    """All that is printed until the other end is closed."""
    with open(terminal, "rb", buffering=0) as out:
        pieces = []
        try:
            while piece := out.read(65536):
                pieces.append(piece)
        except OSError:  # Linux reports the other end's close so
            pass
    return b"".join(pieces).decode()


class MillstreamUp:
    """A `millstream up` on ports of its own; leaving the block ends it and its children."""

    def __init__(self, home: Path, *words: str, port: int | None = None) -> None:
        self.home, self.port, self.nats_port = home, port or free_port(), free_port()
        home.mkdir(exist_ok=True)
        scheme = "https" if "--tls-cert" in words else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.output = home / "up.out"
        own = ["--port", str(self.port), "--nats-port", str(self.nats_port)]
        own += ["--data-dir", str(home / "data")]
        command = [sys.executable, "-m", "millstream", "up", *own, *words]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment_without_settings()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        wait_until(lambda: all(is_gone(child) for child in children), 10)

    def wait_until_ready(self) -> Self:
        """Wait until it says so."""
        wait_until(lambda: self._ended() or self._says_ready(), READY_SECONDS)
        assert self._says_ready(), self.output.read_text()
        return self

    def files(self, user_class: UserClass) -> ConnectionFiles:
        """Credentials for its broker, of a class of users."""
        return ConnectionFiles(creds=self.home / f"data/broker/users/{user_class}.creds")

    def pids(self, word: str) -> list[int]:
        """The processes whose command line has a word, not counting what a test calls its home."""
        found = descendants(self.process.pid)
        lines = {pid: command_line(pid).replace(str(self.home), "") for pid in found}
        return [pid for pid, line in lines.items() if word in line]

    def stop(self) -> int:
        """SIGTERM, and the exit status; fails when it takes longer than anyone would wait."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def _says_ready(self) -> bool:
        return "Millstream is ready" in self.output.read_text()

    def _ended(self) -> bool:
        return self.process.poll() is not None


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
