"""Measures the CPU time of processes on this machine, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from streams.errors import BadRequest

TICKS = os.sysconf("SC_CLK_TCK")


class ProcessNotFound(BadRequest):
    """A value of `--pids` is not the process id of a running process on this machine."""


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
    """Return the processes that the values of `--pids` name, in order.

    A value is `123` or `gateway=123`, or several of these with commas. A process without a given
    name is named after its program and process id. Raises `ProcessNotFound` if a process id is not
    a number or no such process runs.
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
    """Measures the CPU time that some processes use per token; make it with `start`.

    `before` has the CPU seconds that each process had used at the start; None if it had ended.
    """

    before: dict[MeasuredProcess, float | None]

    @classmethod
    def start(cls, processes: list[MeasuredProcess]) -> "CpuMeter":
        """Return a meter that counts the CPU time of `processes` from now on."""
        return cls({process: process.cpu_seconds() for process in processes})

    def us_per_token(self, tokens: int) -> dict[str, float | None]:
        """Return each process's CPU time since the start in µs, divided by `tokens`, by its name.

        The value is None for a process that has ended, and for every process if `tokens` is 0.
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
