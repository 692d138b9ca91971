"""A network of a run's own, in which wires can be cut: what is sent over one is lost.

It is a namespace (network_namespaces(7)) with a loopback device alone. Each wire has an address of
its own in 127.0.0.0/8, where its far end listens, and is cut by rules that come before all routes
and name a black hole (ip-rule(8)): TCP sends again and again, and hears of nothing.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

NEWNET = 0x40000000  # CLONE_NEWNET of linux/sched.h; os.unshare is there from Python 3.12 on
CUT, ROUTES = 1, 10  # order of rules
_libc = ctypes.CDLL(None, use_errno=True)


def missing_requirement() -> str:
    """Why this cannot be done here; empty if it can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "there is no ip (iproute2), or no unshare (util-linux)"
    tried = subprocess.run(["unshare", "--net", "ip", "rule"], capture_output=True, text=True)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def own_namespace() -> Iterator[None]:
    """This thread, and all that it starts, has a network of its own meanwhile.

    Raises `OSError` where that is not allowed.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.unshare(NEWNET))
        try:
            _ip("link set lo up", f"rule add pref {ROUTES} lookup local", "rule del pref 0")
            yield
        finally:
            _checked(_libc.setns(before, NEWNET))
    finally:
        os.close(before)


def wire_address(end: int, other: int) -> str:
    """The address by which one end of a wire finds the other."""
    return f"127.1.{end}.{other}"


def cut(wires: Iterable[str]) -> None:
    """From now on nothing passes, in neither direction."""
    _ip(*_rules("add", wires))


def mend(wires: Iterable[str]) -> None:
    """What was sent meanwhile arrives when TCP sends it again."""
    _ip(*_rules("del", wires))


def _rules(do: str, wires: Iterable[str]) -> Iterator[str]:
    for address in wires:
        for side in ("from", "to"):
            yield f"rule {do} pref {CUT} {side} {address} blackhole"


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
