"""The life of a process: loop, signals, the drain clock and the exit status.

The first SIGTERM or SIGINT sets the stop event and starts the clock; a second one kills at once.
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
from streams.errors import MillstreamError
from streams.settings import ServiceSettings, Settings

log = structlog.get_logger()

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DONE, FAILED = 0, 1
ENGINE_THREADS = ("engine-", "load-")  # of a worker; they are daemons


class DrainTimeout(MillstreamError):
    """What was running did not finish in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not drained within {seconds:g} s")
        self.seconds = seconds


def run_process(run: CommandFunction, settings: Settings) -> int:
    """Run `run(settings, stop)` to its end and return the exit status.

    0 unless `run` returned another; 1 after an error, which is told to the operator, with a
    traceback where it is our own fault rather than theirs or the machine's.
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
    """End now if an engine still loads, or hangs: its native code would abort Python's own end."""
    if any(thread.name.startswith(ENGINE_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _first_error(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _report_error(error: BaseException, settings: Settings) -> None:
    """A service writes an event, a command for people a sentence."""
    if isinstance(settings, ServiceSettings):
        log.error("stopped", error=str(error), kind=type(error).__name__)
    else:
        print(f"millstream: {error}", file=sys.stderr)


def _tune_garbage_collector() -> None:
    """Modules live for ever: do not look at them again; look at the rest every 50,000 objects.

    Collections stop the event loop; with Python's defaults they took 3 % of a busy gateway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _run_with_signals(run: CommandFunction, settings: Settings) -> int | None:
    """The service with the signals and the drain clock around it; the first error ends them all."""
    stop = asyncio.Event()
    _install_signal_handlers(stop)
    async with asyncio.TaskGroup() as group:
        service = group.create_task(_run_service(run, settings, stop), name="service")
        clock = group.create_task(_enforce_drain_timeout(stop, settings), name="drain clock")
        lag = group.create_task(event_loop_lag.measure_lag(), name="loop lag")
        service.add_done_callback(lambda _: (clock.cancel(), lag.cancel()))
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
    """Set `stop`, and leave the next signal to the kernel, which needs no live event loop."""
    stop.set()
    for number in SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
