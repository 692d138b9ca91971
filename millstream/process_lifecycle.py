"""Runs a command as a process: event loop, signals, drain timeout and exit status.

The first SIGTERM or SIGINT sets the stop event and starts the drain timeout; a second one kills
the process at once.
"""

import asyncio
import gc
import os
import signal
import sys
import threading
from functools import partial

import structlog
import uvloop

from millstream import event_loop_lag, log_config
from millstream.command_table import CommandFunction
from streams.base_settings import ServiceSettings, Settings
from streams.errors import MillstreamError
from streams.server_urls import redact

log = structlog.get_logger()

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DONE, FAILED = 0, 1
ENGINE_THREADS = ("engine-", "load-")  # name prefixes of a worker's daemon threads


class DrainTimeout(MillstreamError):
    """The process still ran `seconds` after the first SIGTERM or SIGINT, which is too long.

    Raised inside the process, which then ends with exit status 1.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not drained within {seconds:g} s")
        self.seconds = seconds


def run_process(run: CommandFunction, settings: Settings) -> int:
    """Run the coroutine `run(settings, stop)` in a new event loop; return the exit status.

    Blocks until the coroutine has ended. The status is what the coroutine returned, 0 if that was
    None, and 1 after an error. The first SIGTERM or SIGINT sets `stop`; a second one kills the
    process. If the coroutine has not ended `settings.shutdown_timeout_seconds` after the first
    signal, it is cancelled and the status is 1.

    Errors of the coroutine are not raised. A `MillstreamError` or `OSError` is reported without a
    traceback: a service logs it as an event, any other command prints one sentence to stderr. Any
    other exception is a fault of Millstream's own and is logged with its traceback. If an engine
    thread of a worker still runs at the end, this function does not return: it ends the whole
    process with the status.
    """
    status = FAILED
    log_config.configure(settings.log_level)
    _tune_garbage_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            status = runner.run(_run_with_signals(run, settings)) or DONE
        except* (MillstreamError, OSError) as errors:
            _report_error(_first_error(errors), settings)
        except* Exception as errors:
            log.exception("stopped", exc_info=_first_error(errors))
    _exit_past_engine_threads(status)
    return status


def _exit_past_engine_threads(status: int) -> None:
    """Exit without Python's finalisation while an engine thread still loads a model or hangs.

    Its native code would abort the interpreter's shutdown.
    """
    if any(thread.name.startswith(ENGINE_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _first_error(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _report_error(error: BaseException, settings: Settings) -> None:
    """Report an error: a service logs an event, any other command prints a sentence to stderr."""
    text = _describe_error(error)
    if isinstance(settings, ServiceSettings):
        log.error("stopped", error=text, kind=type(error).__name__)
    else:
        print(f"millstream: {redact(text)}", file=sys.stderr)


def _describe_error(error: BaseException) -> str:
    """The error's text; of one of the operating system its file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _tune_garbage_collector() -> None:
    """Exclude the loaded modules from garbage collection, and collect every 50,000 objects.

    Collections stop the event loop; with Python's defaults they took 3 % of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _run_with_signals(run: CommandFunction, settings: Settings) -> int | None:
    """Run the service beside the drain timeout and the lag gauge; the first error ends them all."""
    stop = asyncio.Event()
    _install_signal_handlers(stop)
    async with asyncio.TaskGroup() as group:
        service = group.create_task(_run_service(run, settings, stop), name="service")
        timeout = group.create_task(_enforce_drain_timeout(stop, settings), name="drain timeout")
        lag = group.create_task(event_loop_lag.measure_lag(), name="loop lag")
        service.add_done_callback(lambda _: (timeout.cancel(), lag.cancel()))
    return service.result()


async def _run_service(run: CommandFunction, settings: Settings, stop: asyncio.Event) -> int | None:
    return await run(settings, stop)


async def _enforce_drain_timeout(stop: asyncio.Event, settings: Settings) -> None:
    await stop.wait()
    seconds = settings.shutdown_timeout_seconds
    log.info("draining", at_most_seconds=seconds)
    await asyncio.sleep(seconds)
    raise DrainTimeout(seconds)


def _install_signal_handlers(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, partial(_begin_drain, loop, stop))


def _begin_drain(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` and restore the default handlers: the next signal kills even a hung process."""
    stop.set()
    for number in SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
