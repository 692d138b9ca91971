"""Loads a registered model version into an engine: verify, load, warm up, each stage timed."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gpu_worker.engines import factory
from gpu_worker.engines.engine import Engine
from gpu_worker.models.proof_records import ProofRecords
from gpu_worker.models.record_checks import check_directory
from gpu_worker.settings import WorkerSettings
from registry import artifact_verification
from registry.models import Model, Version
from streams.base_settings import cache_directory

log = structlog.get_logger()

LOG_INTERVAL_SECONDS = 5.0  # between two events about a model that is being loaded
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
T = TypeVar("T")
_Stamp = tuple[str, int, int, int]  # path, inode, size, time of the last change


@dataclass
class LoadStages:
    """Times the stages of one model load; all times are in seconds.

    `current` is the stage under way, empty before the first; `seconds` has those that have ended.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    _since: float = field(default_factory=time.monotonic)

    def begin(self, name: str) -> None:
        """Begin the stage `name`, and record how long the one before it took."""
        now = time.monotonic()
        if self.current:
            self.seconds[self.current] = now - self._since
        self.current, self._since = name, now

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the current stage began."""
        return time.monotonic() - self._since


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that is ready, and what its load has measured, as heartbeats tell it."""

    engine: Engine
    load: dict[str, float]


class Loader:
    """Loads engines in daemon threads, so that a slow load cannot keep the process from ending.

    Files whose hashes it has verified are not verified again until one of them changes.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._verified: dict[Path, list[_Stamp]] = {}
        self._proofs = ProofRecords(cache_directory() / "proofs")

    async def load(self, model: Model, version: Version, memory_bytes: int | None) -> LoadedEngine:
        """Verify, load and warm up a model version, and return its engine.

        The engine takes at most `memory_bytes` (None: the memory that is free). Waits for as long
        as the load takes, and logs its stage every five seconds. Raises what verifying or loading
        raises. Cancelling does not stop the load's thread; the engine it makes is discarded.
        """
        stages = LoadStages()
        building = run_in_thread(
            lambda: self._build(model, version, memory_bytes, stages), f"load-{model.name}"
        )
        while not (await asyncio.wait({building}, timeout=LOG_INTERVAL_SECONDS))[0]:
            elapsed = round(stages.elapsed_seconds, 1)
            log.info("model_loading", model=model.name, stage=stages.current, seconds=elapsed)
        engine = building.result()
        _log_ready(model, version, engine, stages)
        memory = await asyncio.to_thread(self._measure_memory, model, version)
        return LoadedEngine(engine, {**_load_times(stages), **memory})

    def _build(
        self, model: Model, version: Version, memory_bytes: int | None, stages: LoadStages
    ) -> Engine:
        directory = Path(version.directory) if version.directory else None
        stages.begin("verify")
        if directory:
            self._verify(directory, version)
        stages.begin("import")
        options = self._options(model, version, memory_bytes, stages)
        engine = factory.build(model.engine, directory, options)
        stages.begin("ready")
        return engine

    def _measure_memory(self, model: Model, version: Version) -> dict[str, float]:
        """Return the bytes of weights and of a token's KV; empty if they cannot be told."""
        settings = self._settings
        if model.engine in ("mock", "remote"):
            return {"weight_bytes": 0, "kv_bytes_per_token": 0}
        try:
            found = factory.estimate_memory(
                Path(version.directory or ""),
                model.engine,
                settings.max_sequences,
                settings.max_batch_tokens,
                None,
            )
        except Exception as error:  # best effort: the engine is loaded
            log.warning("model_memory_unknown", model=model.name, reason=repr(error))
            return {}
        return {
            "weight_bytes": found.weight_bytes,
            "kv_bytes_per_token": found.kv_bytes_per_token or 0,
        }

    def _verify(self, directory: Path, version: Version) -> None:
        """Verify the files' hashes, unless no file has changed since this loader last did so."""
        stamps = _file_stamps(directory, version)
        if self._verified.get(directory) != stamps:
            artifact_verification.verify_files(directory, version.files)
            self._verified[directory] = stamps

    def _options(
        self, model: Model, version: Version, memory_bytes: int | None, stages: LoadStages
    ) -> dict[str, Any]:
        settings, options = self._settings, dict(version.options)
        if model.engine == "transformers":
            options |= {
                "max_sequences": settings.max_sequences,
                "max_batch_tokens": settings.max_batch_tokens,
                "kv_tokens": settings.kv_tokens,
                "adapter_bytes": settings.adapter_bytes,
                "is_proven": partial(self._proofs.is_proven, version.digest),
                "keep_proof": partial(self._proofs.add, version.digest),
                "check_directory": partial(check_directory, settings.destinations),
            }
        if model.engine == "mock" and settings.step_model:
            options["step_model"] = settings.step_model
        if model.engine == "remote":
            options["policy"] = settings.destinations
        if settings.tensor_parallel_size > 1:  # engines without it refuse the option by its name
            options["tensor_parallel_size"] = settings.tensor_parallel_size
        if model.engine in ("transformers", "embed", "classify"):
            options |= {
                "threads": settings.threads,
                "memory_bytes": memory_bytes,
                "stage": stages.begin,
            }
        return options


def weight_files(version: Version) -> list[Path]:
    """Return the paths of a version's weight files that exist; an empty list if it has none."""
    return list(_existing_files(version, WEIGHT_SUFFIXES))


def run_in_thread(call: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Start `call` in a daemon thread, and return a future of what it returns or raises.

    Returns at once; must be called on the event loop. The process can end without waiting for the
    thread, and cancelling the future does not stop it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # of any kind: it is raised to the caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _file_stamps(directory: Path, version: Version) -> list[_Stamp]:
    found = [(path, directory / path) for path in sorted(version.files)]
    stats = [(path, file.stat()) for path, file in found if file.exists()]
    return [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _existing_files(version: Version, suffixes: tuple[str, ...] = ("",)) -> Iterator[Path]:
    directory = Path(version.directory or "")
    files = (directory / path for path in version.files if path.endswith(suffixes))
    return (file for file in files if file.exists())


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _load_times(stages: LoadStages) -> dict[str, float]:
    """The seconds of the whole load, and of the warm-up in it."""
    seconds = stages.seconds
    return {
        "load_seconds": sum(seconds.values()),
        "warm_up_seconds": seconds.get("warm_up", 0.0),
    }


def _log_ready(model: Model, version: Version, engine: Engine, stages: LoadStages) -> None:
    capacity, seconds = engine.free_capacity(), stages.seconds
    all_bytes, weight_bytes = _size(_existing_files(version)), _size(weight_files(version))
    log.info(
        "model_ready",
        model=model.name,
        version=version.id,
        engine=model.engine,
        max_sequences=capacity.sequences,
        kv_tokens=capacity.tokens,
        bytes=all_bytes,
        weight_bytes=weight_bytes,
        **{f"{stage}_seconds": round(spent, 3) for stage, spent in seconds.items()},
        verify_gb_per_second=_gb_per_second(all_bytes, seconds["verify"]),
        load_gb_per_second=_gb_per_second(weight_bytes, seconds.get("load", 0.0)),
    )


def _gb_per_second(size: int, seconds: float) -> float:
    return round(size / 1e9 / seconds, 3) if seconds > 0 else 0.0
