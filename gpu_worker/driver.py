"""The one owner of an engine: a thread that reads notes between steps and hands out outputs."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from gpu_worker.engine import Engine, Output, Sequence

Note = Callable[[Engine], None]


class EngineCrashed(Exception):
    """A step raised: the engine's state can no longer be trusted."""


class Driver:
    """Runs an engine in its own thread; every method is for the event loop that made it.

    `deliver` gets the outputs of each step that had any, on the loop. `crashed` completes with
    `EngineCrashed` if a step raises; nothing is delivered after that.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Output]], None], name: str) -> None:
        self._engine, self._deliver = engine, deliver
        self._loop = asyncio.get_running_loop()
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        self._notes: deque[Note] = deque()
        self._dropped: list[asyncio.Future[None]] = []  # of the engine's thread
        self._noted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        self._note(lambda engine: engine.add(sequence))

    def cancel(self, request_id: str) -> None:
        """Its `cancelled` output follows, unless it has finished by then. Idempotent."""
        self._note(lambda engine: engine.cancel(request_id))

    async def drop(self, request_id: str) -> None:
        """`cancel`, and wait until nothing of it can be delivered any more."""
        dropped: asyncio.Future[None] = self._loop.create_future()
        self.cancel(request_id)
        self._note(lambda _: self._dropped.append(dropped))
        await dropped

    def stop(self) -> None:
        """End the thread after the current step and free the engine; returns when it has."""
        self._stopping = True
        self._noted.set()
        self._thread.join()

    def _note(self, note: Note) -> None:
        self._notes.append(note)
        self._noted.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # whatever a step raised ends this engine
            crash = EngineCrashed(f"{type(error).__name__}: {error}")
            crash.__cause__ = error
            self._loop.call_soon_threadsafe(self._crash, crash)
        finally:
            self._engine.close()

    def _turn(self) -> None:
        self._noted.clear()
        while self._notes:
            self._notes.popleft()(self._engine)
        if not self._engine.idle:
            if outputs := self._engine.step():
                self._loop.call_soon_threadsafe(self._deliver, outputs)
        elif not self._dropped and not self._stopping:  # `stop` may have been noted before clear()
            self._noted.wait()
        if self._dropped:
            self._loop.call_soon_threadsafe(_resolve, self._dropped)
            self._dropped = []

    def _crash(self, crash: EngineCrashed) -> None:
        if not self.crashed.done():
            self.crashed.set_exception(crash)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
