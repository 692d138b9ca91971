"""Runs an engine in a thread that owns it: commands between steps, outputs to the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from gpu_worker.compute_meter import ModelMeter
from gpu_worker.engines.engine import CountsStepTokens, DeviceLost, Engine, Output, Sequence

IDLE_CHECK_SECONDS = 1.0  # an idle engine that has lost a rank says so by not being idle
log = structlog.get_logger()

Command = Callable[[Engine], None]
Deliver = Callable[[list[Output]], None]


class EngineCrashed(Exception):
    """A step of an engine raised an error, so the engine's state can no longer be trusted.

    `device_lost` is True if no engine in this process can be trusted. The step's own error is not
    attached, since the frames of its traceback would keep the engine's memory; the log has it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.device_lost = isinstance(error, DeviceLost)


class Driver:
    """Runs one engine in a thread of its own; the methods are for the event loop that made it.

    `deliver` is called on that loop with the outputs of each step that had any. The future
    `crashed` fails with `EngineCrashed` if a step raises, after which nothing is delivered. The
    future `closed` completes when the engine is closed and its memory free, after a crash too.
    `meter` counts the time of each step.
    """

    def __init__(self, engine: Engine, deliver: Deliver, name: str, meter: ModelMeter) -> None:
        self._engine, self._deliver, self._meter = engine, deliver, meter
        self._count_tokens = (
            _read_step_tokens if isinstance(engine, CountsStepTokens) else _count_output_tokens
        )
        self._loop = asyncio.get_running_loop()
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._abandoned = False
        self._awaited_drops: set[asyncio.Future[None]] = set()
        self._commands: deque[Command] = deque()
        self._confirmed_drops: list[asyncio.Future[None]] = []  # of the engine's thread
        self._has_commands = threading.Event()
        self._stopping = False
        self._step_began: float | None = None  # None while it waits for commands
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Hand a sequence to the engine before its next step; returns at once."""
        self._send(lambda engine: engine.add(sequence))

    def cancel(self, request_id: str) -> None:
        """Have the engine drop a request before its next step; returns at once. Idempotent.

        A `cancelled` output of the request is delivered, unless it has finished by then. An unknown
        request is ignored.
        """
        self._send(lambda engine: engine.cancel(request_id))

    async def cancel_and_wait(self, request_id: str) -> None:
        """Have the engine drop a request, and wait until no output of it can be delivered any more.

        That is after the engine's current step, or as soon as `abandon` is called.
        """
        dropped: asyncio.Future[None] = self._loop.create_future()
        self._awaited_drops.add(dropped)
        dropped.add_done_callback(self._awaited_drops.discard)
        self.cancel(request_id)
        self._send(lambda _: self._confirmed_drops.append(dropped))
        await dropped

    def seconds_in_step(self) -> float:
        """Return the seconds that the engine has spent in its current step; 0 while it is idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def abandon(self) -> None:
        """Deliver nothing from now on, and end every wait in `cancel_and_wait`.

        Returns at once; the thread runs on. For an engine that has failed or is about to be
        stopped.
        """
        self._abandoned = True
        _resolve(list(self._awaited_drops))

    async def stop(self) -> None:
        """End the thread after the engine's current step, and return when the engine is closed.

        A step that hangs makes this wait forever. Cancelling ends the wait, not the stop.
        """
        self._stopping = True
        self._has_commands.set()
        await asyncio.shield(self.closed)

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._has_commands.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
        except Exception as error:  # any exception of a step ends this engine
            log.exception("engine_crashed", engine=self._thread.name)
            self._call_on_loop(_fail, self.crashed, EngineCrashed(error))
        finally:
            self._close()
            self._call_on_loop(_resolve, [self.closed])

    def _close(self) -> None:
        """Close and free the engine; an error of a broken engine adds nothing to its crash."""
        engine = self._engine
        del self._engine
        try:
            engine.close()
        except Exception:
            log.exception("engine_not_closed")

    def _run_once(self) -> None:
        self._has_commands.clear()
        self._step_began = time.monotonic()
        while self._commands:
            self._commands.popleft()(self._engine)
        if not self._engine.idle:
            if outputs := self._step():
                self._call_on_loop(self._deliver_outputs, outputs)
        # `stop` may have been called before `clear` above
        elif not self._confirmed_drops and not self._stopping:
            self._step_began = None
            self._has_commands.wait(IDLE_CHECK_SECONDS)
        if self._confirmed_drops:
            self._call_on_loop(_resolve, self._confirmed_drops)
            self._confirmed_drops = []

    def _step(self) -> list[Output]:
        outputs: list[Output] = []
        self._meter.begin_step()
        try:
            outputs = self._engine.step()
        finally:
            self._meter.end_step(self._count_tokens(self._engine, outputs))
        return outputs

    def _deliver_outputs(self, outputs: list[Output]) -> None:
        if not self._abandoned:
            self._deliver(outputs)

    def _call_on_loop(self, call: Callable[..., None], *args: object) -> None:
        """Call something on the event loop, unless it is closed: a hung engine may outlive it."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            self._stopping = True


def _read_step_tokens(engine: Engine, outputs: list[Output]) -> Mapping[str, int]:
    assert isinstance(engine, CountsStepTokens)
    return engine.step_tokens


def _count_output_tokens(engine: Engine, outputs: list[Output]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for each in outputs:
        count = len(each.tokens or each.vectors or ())
        counts[each.request_id] = counts.get(each.request_id, 0) + count
    return counts


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
