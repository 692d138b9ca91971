"""Who may import what: rooms, pure files, and where torch may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "dispatcher", "gpu_worker")
ROOMS = ("streams", "registry", *SERVICES, "millstream")
MAY_IMPORT = {
    "streams": {"streams"},
    "registry": {"registry", "streams"},
    **{service: {service, "registry", "streams"} for service in SERVICES},
}
CLIENT = ROOT / "client/millstream_client"
HEAVY = {"torch", "transformers", "accelerate", "gguf", "safetensors", "httpx2"}
# `created` in answers, a date in another server's answer, and what there is before the first look.
WALL_CLOCK = {
    "gateway/completions.py",
    "gateway/unary.py",
    "gpu_worker/engines/remote/upstream.py",
    "registry/models.py",
    "streams/clock.py",
}
IMPURE = {"asyncio", "nats", "time", "threading", "socket", "subprocess"}
PURE = (
    "streams/errors.py",
    "streams/grammar.py",
    "streams/headers.py",
    "streams/messages.py",
    "streams/subjects.py",
    "streams/windows.py",
    "client/millstream_client/backoff.py",
    "client/millstream_client/budget.py",
    "client/millstream_client/call.py",
    "client/millstream_client/errors.py",
    "client/millstream_client/records.py",
    "gateway/checks.py",
    "gateway/holds.py",
    "gateway/rate_limits.py",
    "gateway/admission.py",
    "gateway/following.py",
    "gateway/tool_calls.py",
    "gateway/waits.py",
    "dispatcher/averages.py",
    "dispatcher/backlog.py",
    "dispatcher/books.py",
    "dispatcher/compute.py",
    "dispatcher/explain.py",
    "dispatcher/fair_queue.py",
    "dispatcher/fleet.py",
    "dispatcher/lines.py",
    "dispatcher/outlook.py",
    "dispatcher/pace.py",
    "dispatcher/recent.py",
    "dispatcher/stalls.py",
    "dispatcher/usage.py",
    "gateway/result_frame.py",
    "gpu_worker/batcher.py",
    "gpu_worker/compute.py",
    "gpu_worker/credit.py",
    "gpu_worker/detokenizer.py",
    "gpu_worker/engine.py",
    "gpu_worker/fellows.py",
    "gpu_worker/limits.py",
    "gpu_worker/micro_batches.py",
    "gpu_worker/pending.py",
    "gpu_worker/seeds.py",
    "gpu_worker/residency.py",
    "gpu_worker/starts.py",
    "gpu_worker/engines/paged/blocks.py",
    "gpu_worker/engines/paged/penalties.py",
    "gpu_worker/engines/paged/plan.py",
    "gpu_worker/engines/paged/scheduler.py",
    "gpu_worker/engines/remote/backoff.py",
    "gpu_worker/engines/remote/breaker.py",
    "gpu_worker/engines/remote/faults.py",
    "gpu_worker/engines/remote/gate.py",
    "gpu_worker/engines/remote/generation.py",
    "gpu_worker/engines/remote/openai.py",
    "gpu_worker/engines/remote/single.py",
    "gpu_worker/engines/remote/vectors.py",
)


def files(room: str) -> Iterator[Path]:
    return (ROOT / room).rglob("*.py")


def imported(file: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """Services meet in `streams` alone, so that each can be changed and deployed by itself."""
    assert list(files(room))
    ours = {file: imported(file) & {*ROOMS} for file in files(room)}
    assert {file: names for file, names in ours.items() if names - MAY_IMPORT[room]} == {}


def test_the_client_needs_websockets_alone() -> None:
    """It is installed by itself, where nothing else of ours is."""
    allowed = {*sys.stdlib_module_names, "websockets", CLIENT.name}
    assert set().union(*map(imported, CLIENT.rglob("*.py"))) - allowed == set()


def test_no_room_imports_the_tests_or_the_client() -> None:
    """They are not installed, and nor is the client."""
    absent = {"tests", "bench", CLIENT.name}
    found = {file for room in ROOMS for file in files(room) if absent & imported(file)}
    assert found == set()


def test_torch_stays_in_the_engines() -> None:
    """Gateway and dispatcher install and start without it; so does a worker with the mock."""
    engines = ROOT / "gpu_worker/engines"
    heavy = {file for room in ROOMS for file in files(room) if HEAVY & imported(file)}
    assert heavy
    assert {file for file in heavy if engines not in file.parents} == set()


@pytest.mark.parametrize("name", PURE)
def test_a_file_that_thinks_does_not_talk(name: str) -> None:
    """No clock, no broker, no event loop: such a file can be tested, and simulated, as it is."""
    assert imported(ROOT / name) & IMPURE == set()


def test_only_what_people_read_is_of_the_wall_clock() -> None:
    """What machines compare is `Broker.clock`'s: a wall clock may be hours off, or be set."""
    found = {file for room in ROOMS for file in files(room) if "time.time()" in file.read_text()}
    assert {str(file.relative_to(ROOT)) for file in found} == WALL_CLOCK


@pytest.mark.parametrize("service", ["gateway", "dispatcher"])
def test_a_service_starts_without_torch(service: str) -> None:
    """The base install does not have it."""
    code = f"""
import sys
for name in {sorted(HEAVY)!r}:
    sys.modules[name] = None
import {service}.service, millstream.cli
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")
