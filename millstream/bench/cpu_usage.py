"""Measures the CPU time of processes on this machine, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from streams.errors import BadRequest

TICKS = os.sysconf("SC_CLK_TCK")


class ProcessNotFound(BadRequest):
    """A value of `--pids` names no running process of this machine."""


@dataclass(frozen=True)
class MeasuredProcess:
    """A process whose CPU time is measured, and the name under which the report shows it."""

    name: str
    pid: int

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds (user and system) that the process has used since it began.

        All of its threads are included; the resolution is 10 ms. None if the process has ended.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS


OWN_PROCESS = MeasuredProcess("bench", os.getpid())


def parse_processes(words: tuple[str, ...]) -> list[MeasuredProcess]:
    """Return the processes that words such as `123`, `gateway=123` or `123,gateway=456` name.

    A process without a given name is called by its program and pid. Raises `ProcessNotFound` if a
    word is not a pid of a running process.
    """
    return [_parse_process(word) for group in words for word in group.split(",")]


def _parse_process(word: str) -> MeasuredProcess:
    name, _, pid = word.rpartition("=")
    try:
        program = Path(f"/proc/{int(pid)}/comm").read_text().strip()
    except (ValueError, OSError):
        raise ProcessNotFound(f"no process {word!r} on this machine") from None
    return MeasuredProcess(name or f"{program} {pid}", int(pid))


@dataclass(frozen=True)
class CpuMeter:
    """Measures the CPU time that some processes use per token, from `start` on."""

    before: dict[MeasuredProcess, float | None]

    @classmethod
    def start(cls, processes: list[MeasuredProcess]) -> "CpuMeter":
        """Return a meter that begins now with the CPU time of these processes."""
        return cls({process: process.cpu_seconds() for process in processes})

    def us_per_token(self, tokens: int) -> dict[str, float | None]:
        """Return by process name the CPU time used since the start, divided by `tokens`, in µs.

        The value is None for a process that has ended, and for all if `tokens` is 0.
        """
        return {
            process.name: _us_per_token(process, start, tokens)
            for process, start in self.before.items()
        }


def _us_per_token(process: MeasuredProcess, start: float | None, tokens: int) -> float | None:
    end = process.cpu_seconds()
    if start is None or end is None or not tokens:
        return None
    return (end - start) * 1e6 / tokens
