"""Who may import what: rooms, floors within a room, pure files, and where torch may be."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = ("admin", "gateway", "dispatcher", "gpu_worker", "jobs", "fleet")
VOCABULARY = {"streams", "registry", "api", "simulation"}
ROOMS = (*sorted(VOCABULARY), *SERVICES, "millstream")
MAY_IMPORT = {
    "streams": {"streams"},
    "registry": {"registry", "streams"},
    "api": {"api", "registry", "streams"},
    "simulation": {"simulation", "streams"},
    **{service: {service, *VOCABULARY} for service in SERVICES},
}
# From the bottom up: a file imports from its own floor and from those before it. A floor is made of
# folders and files; the longest name that fits a file says which floor it is on.
FLOORS = {
    "streams": (
        {"streams"},
        {"streams/broker"},
        {"streams/records"},
        {"streams/coordination"},
    ),
    "api": (
        {"api", "api/schemas"},
        {"api/submission"},
        {"api/endpoints"},
        {"api/responses"},
        {"api/batches", "api/messages"},
    ),
    "gateway": (
        {
            "gateway/settings.py",
            "gateway/tenant_labels.py",
            "gateway/error_responses.py",
            "gateway/api_key_headers.py",
        },
        {"gateway/metrics.py"},
        {"gateway/server"},
        {"gateway/replies"},
        {"gateway/admission"},
        {"gateway/context.py"},
        {"gateway/entrypoints"},
        {"gateway"},
    ),
    "dispatcher": (
        {"dispatcher/queueing", "dispatcher/workers"},
        {"dispatcher/estimate"},
        {"dispatcher/dispatching"},
        {"dispatcher/reconcile"},
        {"dispatcher"},
    ),
    "fleet": (
        {"fleet/signals"},
        {"fleet/planner"},
        {"fleet"},
    ),
    "gpu_worker": (
        {"gpu_worker/settings.py", "gpu_worker/identity.py", "gpu_worker/compute_meter.py"},
        {"gpu_worker/engines"},
        {"gpu_worker/engines/paged/batch"},
        {"gpu_worker/engines/paged/attention", "gpu_worker/engines/paged/weights"},
        {"gpu_worker/engines/paged", "gpu_worker/engines/remote", "gpu_worker/engines/unary"},
        {"gpu_worker/attempt"},
        {"gpu_worker/pool"},
        {"gpu_worker/models"},
        {"gpu_worker"},
    ),
}
MAX_FILES_IN_FOLDER = 20
CLIENT = ROOT / "client/millstream_client"
HEAVY = {"torch", "transformers", "accelerate", "gguf", "safetensors", "httpx2"}
# Dates that people read: `created` of an answer, of a record, and what there is before the first
# sample of the brokers' clock. Of claims, which are made before there is a broker to ask.
WALL_CLOCK = {
    "gateway/entrypoints/completions.py",
    "gateway/entrypoints/embed_classify_rerank.py",
    "gpu_worker/engines/remote/http_client.py",
    "registry/models.py",
    "streams/accounts/cell_directory.py",
    "streams/accounts/key_rotation.py",
    "streams/accounts/user_revocation.py",
    "streams/broker/authentication.py",
    "streams/broker/cluster_clock.py",
}
IMPURE = {"asyncio", "nats", "time", "threading", "socket", "subprocess"}
PURE_MARKER = re.compile(r"\bPure[.:;]")


def files(room: str) -> Iterator[Path]:
    return (ROOT / room).rglob("*.py")


@cache
def modules() -> dict[str, Path]:
    """Every file of ours by its dotted name."""
    found = [(file, file.relative_to(ROOT)) for room in ROOMS for file in files(room)]
    found += [(file, file.relative_to(CLIENT.parent)) for file in files("client")]
    return {".".join(at.with_suffix("").parts).removesuffix(".__init__"): f for f, at in found}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imported(file: Path) -> frozenset[str]:
    """Full names of everything that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found = {f"{module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules() else module for name in found}
    return frozenset(names)


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(file)}


def ours(file: Path) -> set[Path]:
    return {modules()[name] for name in imported(file) & modules().keys()}


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """Services meet in the vocabulary alone, so that each can be changed and deployed by itself."""
    assert list(files(room))
    wrong = {file: roots(file) & {*ROOMS} - MAY_IMPORT[room] for file in files(room)}
    assert {file: names for file, names in wrong.items() if names} == {}


def floor(file: Path, floors: tuple[set[str], ...]) -> int:
    """Which floor a file is on, from the bottom; a folder's `__init__` is on its folder's."""
    names = [(len(name), at) for at, floor in enumerate(floors) for name in floor if on(file, name)]
    assert names, f"{shown(file)} is on no floor"
    return max(names)[1]


def on(file: Path, name: str) -> bool:
    place = ROOT / name
    return file == place or place in file.parents


@pytest.mark.parametrize("room", FLOORS)
def test_imports_lead_downstairs(room: str) -> None:
    """Whoever reads a floor needs only those below it."""
    floors = FLOORS[room]
    assert all((ROOT / name).exists() for names in floors for name in names)
    upward = {
        (shown(file), shown(other))
        for file in files(room)
        for other in ours(file)
        if ROOT / room in other.parents and floor(other, floors) > floor(file, floors)
    }
    assert upward == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    """One of them could not be understood, or tested, without all others."""
    done: set[Path] = set()

    def visit(file: Path, path: list[Path]) -> None:
        assert file not in path, " -> ".join(map(shown, [*path[path.index(file) :], file]))
        if file not in done:
            for other in sorted(ours(file)):
                visit(other, [*path, file])
            done.add(file)

    for file in modules().values():
        visit(file, [])


def test_no_folder_has_too_many_files() -> None:
    """A list of more names than this is not read but searched."""
    counts: dict[str, int] = {}
    for file in modules().values():
        counts[shown(file.parent)] = counts.get(shown(file.parent), 0) + 1
    assert {name: count for name, count in counts.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_no_class_name_stands_for_two_things() -> None:
    """But for the client's own classes, which are the product's as its users see them."""
    places: dict[str, set[str]] = {}
    for room in ROOMS:
        for file in files(room):
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name.lstrip("_"), set()).add(shown(file))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_client_needs_websockets_alone() -> None:
    """It is installed by itself, where nothing else of ours is."""
    allowed = {*sys.stdlib_module_names, "websockets", CLIENT.name}
    assert set().union(*map(roots, CLIENT.rglob("*.py"))) - allowed == set()


def test_no_room_imports_the_tests_or_the_client() -> None:
    """They are not installed, and nor is the client."""
    absent = {"tests", "bench", CLIENT.name}
    found = {file for room in ROOMS for file in files(room) if absent & roots(file)}
    assert found == set()


def test_api_needs_no_web_framework() -> None:
    """Services that are not the gateway validate and render with it, too."""
    assert {file for file in files("api") if {"starlette", "uvicorn"} & roots(file)} == set()


def test_torch_stays_in_the_engines() -> None:
    """Gateway and dispatcher install and start without it; so does a worker with the mock."""
    engines = ROOT / "gpu_worker/engines"
    heavy = {file for room in ROOMS for file in files(room) if HEAVY & roots(file)}
    assert heavy
    assert {file for file in heavy if engines not in file.parents} == set()


def pure_files() -> list[str]:
    """Files whose docstring says so: this word is the one place where it is decided."""
    docstrings = {f: ast.get_docstring(parsed(f)) for f in modules().values()}
    return sorted(shown(f) for f, text in docstrings.items() if PURE_MARKER.search(text or ""))


@pytest.mark.parametrize("name", pure_files())
def test_a_pure_file_reaches_no_clock_broker_or_event_loop(name: str) -> None:
    """Neither itself nor by what it imports: it can be tested, and simulated, as it is."""
    waiting, seen, impure = [ROOT / name], set[Path](), set[str]()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        allowed = {"time"} if shown(file) in WALL_CLOCK else set()
        impure |= {f"{shown(file)}: {found}" for found in roots(file) & IMPURE - allowed}
        waiting += ours(file) - seen
    assert impure == set()


def test_only_what_people_read_is_of_the_wall_clock() -> None:
    """What machines compare is `Broker.clock`'s: a wall clock may be hours off, or be set."""
    found = {file for room in ROOMS for file in files(room) if "time.time()" in file.read_text()}
    assert {shown(file) for file in found} == WALL_CLOCK
