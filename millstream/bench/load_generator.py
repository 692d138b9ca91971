"""Runs one load from its first arrival to its report: sends on time or on answer, then drains."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import nullcontext
from random import Random
from typing import Any

from millstream.bench import arrivals, cpu_usage, plot, report_output, target
from millstream.bench.arrivals import Arrival, LengthLimits
from millstream.bench.load_client import (
    BenchClient,
    Clock,
    GatewayAddress,
    LoadRequest,
    Unreachable,
)
from millstream.bench.load_statistics import UNFINISHED, Sample, Tally, make_report
from millstream.bench.prompts import Prompts
from millstream.bench.settings import BenchSettings
from millstream.bench.sse_client import SseClient
from millstream.bench.target import TargetModel
from millstream.bench.websocket_client import WebSocketClient

ERROR_PAUSE_SECONDS = 0.1  # pause of a closed loop's slot after an error
REFRESH_SECONDS = 0.25
OnDone = Callable[[], None]


async def run(settings: BenchSettings, stop: asyncio.Event) -> int:
    """Run the load that the settings describe, print its report, and return the exit status.

    The status is 1 if no request was completed, else 0. If `stop` is set, running requests are
    cancelled and the report is still printed. Requests that fail during the load are counted in
    the report and not raised, but for a refused API key: `KeyRefused`, in an exception group, ends
    the load. Raises, before the load begins, `PlotUnavailable`, `ProcessNotFound` (`--pids`),
    `TraceError`, `ModelNotFound`, `KeyRefused`, or `Unreachable` if the gateway does not answer or
    a warm-up request fails.
    """
    if settings.plot:
        plot.require_matplotlib()
    measured = cpu_usage.parse_processes(settings.pids)
    address, clock = target.resolve_address(settings), time.perf_counter
    models = await target.fetch_models(address, settings.model, clock)
    first, schedule = _make_arrivals(settings, models)
    async with make_client(settings, address, clock) as client:
        load = LoadGenerator(client, make_request_factory(settings, models), clock)
        await load.warm_up(first, settings.warmup)
        meter = cpu_usage.CpuMeter.start([*measured, cpu_usage.OWN_PROCESS])
        await _run_load(load, settings, schedule, stop)
        summary = make_report(load.samples, load.began, load.window, settings.is_open)
        cpu = meter.us_per_token(summary.output_tokens)
    report_output.print_report(settings, models, summary, cpu)
    if settings.plot:
        plot.draw_plot(settings.plot, load.samples, load.began)
    return 0 if summary.completed else 1


def make_client(settings: BenchSettings, address: GatewayAddress, clock: Clock) -> BenchClient:
    """Return a client of the settings' protocol, to be entered."""
    if settings.protocol == "sse":
        return SseClient(address, clock)
    return WebSocketClient(address, settings.codec, settings.sockets, clock)


def _make_arrivals(
    settings: BenchSettings, models: list[TargetModel]
) -> tuple[Arrival, Iterator[Arrival]]:
    """The load's first arrival, for the warm-up, and all its arrivals in order.

    All are shortened to lengths that every model takes.
    """
    context = min((m.context for m in models if m.context), default=None)
    limits = LengthLimits(settings.max_prompt_tokens, settings.max_output_tokens, context)
    shortened = map(limits.shorten, _make_raw_arrivals(settings))
    first = next(shortened)
    whole = itertools.chain([first], shortened)
    return first, arrivals.limit_arrivals(whole, settings.open_seconds, settings.requests)


def _make_raw_arrivals(settings: BenchSettings) -> Iterator[Arrival]:
    sizes = Arrival(0.0, settings.prompt_tokens, settings.output_tokens)
    if settings.trace is None:
        if settings.rate:
            return arrivals.poisson_arrivals(settings.rate, sizes, Random(settings.seed))
        return itertools.repeat(sizes)
    with settings.trace.open(newline="") as lines:
        rows = arrivals.read_trace(lines)
    if not settings.is_open:
        return arrivals.repeat_sizes(rows)
    if settings.rate:
        return arrivals.replay_at_rate(rows, settings.rate)
    return arrivals.replay_at_speed(rows, settings.speed or 1.0)


def make_request_factory(
    settings: BenchSettings, models: list[TargetModel]
) -> Callable[[Arrival], LoadRequest]:
    """Return a function that makes the request for an arrival; the models take turns."""
    turns = itertools.cycle([(m.name, Prompts(m.vocabulary, settings.seed)) for m in models])

    def make_request(arrival: Arrival) -> LoadRequest:
        model, prompts = next(turns)
        prompt = prompts.make_prompt(arrival.prompt_tokens)
        return LoadRequest(model, prompt, arrival.output_tokens, settings.priority.value)

    return make_request


async def _run_load(
    load: "LoadGenerator", settings: BenchSettings, schedule: Iterator[Arrival], stop: asyncio.Event
) -> None:
    """Run the load, with a progress bar unless the output is JSON."""
    if settings.is_open:
        sender = load.send_open_loop(schedule)
    else:
        sender = load.send_closed_loop(schedule, settings.concurrency or 1, settings.seconds)
    shown = nullcontext() if settings.as_json else report_output.show_progress(settings, load)
    with shown as refresh:
        await load.run(sender, settings.drain, stop, refresh)


class LoadGenerator:
    """Sends the requests of one load through a client, and keeps a record of each.

    Call `run` once, with `send_open_loop` or `send_closed_loop`. `samples` has the records of all
    requests but warm-up, in the order of sending; `tally` counts those that have ended. `began` is
    the time of `clock`, in seconds, at the start of `run`. `window` is the number of seconds after
    which a closed loop stopped sending; None if no time limit stopped it.
    """

    def __init__(
        self, client: BenchClient, make_request: Callable[[Arrival], LoadRequest], clock: Clock
    ) -> None:
        self._client, self._make_request, self._clock = client, make_request, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.samples: list[Sample] = []
        self.tally = Tally()
        self.began = clock()
        self.window: float | None = None

    @property
    def running(self) -> int:
        """The number of requests that were sent and have not ended."""
        return len(self._tasks)

    @property
    def elapsed(self) -> float:
        """Seconds since the load began."""
        return self._clock() - self.began

    async def warm_up(self, arrival: Arrival, requests: int) -> None:
        """Send `requests` requests with the lengths of `arrival`, one after another, unrecorded.

        Returns when the last one has ended. Raises `Unreachable`, with the error code, as soon as
        one fails, because the requests of the load would fail, too.
        """
        for _ in range(requests):
            sample = Sample(self._clock())
            await self._client.run_request(self._make_request(arrival), sample)
            if sample.code:
                raise Unreachable(f"the first request failed: {sample.code}")

    async def run(
        self,
        sender: Coroutine[Any, Any, None],
        drain: float,
        stop: asyncio.Event,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """Run `sender` to its end, wait up to `drain` seconds for running requests, then return.

        `sender` is the coroutine of `send_open_loop` or `send_closed_loop`. Requests that still run
        after `drain` seconds are cancelled and recorded with the code `unfinished`. If `stop` is
        set, the sender and all running requests are cancelled at once. Raises `KeyRefused`, in an
        exception group, as soon as a request meets it. `refresh` is called every 0.25 s until the
        end, to show progress.
        """
        async with asyncio.TaskGroup() as group:
            self._group, self.began = group, self._clock()
            stopped = group.create_task(_wait_for_stop(stop), name="stop")
            progress = group.create_task(_refresh_progress(refresh), name="progress")
            sending = group.create_task(sender, name="sender")
            await _wait_for_first(sending, stopped)
            sending.cancel()
            drained = group.create_task(self._wait_until_drained(), name="drain")
            await _wait_for_first(drained, stopped, seconds=drain)
            for task in (drained, stopped, progress, *self._tasks):
                task.cancel()

    async def send_open_loop(self, schedule: Iterator[Arrival]) -> None:
        """Send each request of `schedule` at its time, whether or not earlier ones have ended.

        Returns when the last request was sent, without waiting for answers. A request whose time
        has passed is sent at once. Only to be passed to `run` as its `sender`.
        """
        for arrival in schedule:
            await asyncio.sleep(max(0.0, arrival.at - self.elapsed))
            self._spawn(arrival, self.began + arrival.at, lambda: None)

    async def send_closed_loop(
        self, schedule: Iterator[Arrival], concurrency: int, seconds: float | None
    ) -> None:
        """Keep `concurrency` requests running, for `seconds` or until `schedule` is at its end.

        None as `seconds` means no time limit. A request is sent as soon as an earlier one has
        ended, or 0.1 s after one that failed. Returns when no more are to be sent, without waiting
        for those that run. `window` is set to `seconds` if the time limit ended the sending. Only
        to be passed to `run` as its `sender`.
        """
        slots = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.timeout(seconds):
                for arrival in schedule:
                    await slots.acquire()
                    self._spawn(arrival, self._clock(), slots.release)
        except TimeoutError:
            self.window = seconds

    def _spawn(self, arrival: Arrival, due: float, on_done: OnDone) -> None:
        task = self._group.create_task(self._send(arrival, Sample(due), on_done), name="request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, arrival: Arrival, sample: Sample, on_done: OnDone) -> None:
        self.samples.append(sample)
        try:
            await self._client.run_request(self._make_request(arrival), sample)
        except Unreachable as error:
            sample.finish(self._clock(), error.code)
        except asyncio.CancelledError:
            sample.finish(self._clock(), UNFINISHED)
            raise
        self.tally.add(sample)
        if sample.code:
            await asyncio.sleep(ERROR_PAUSE_SECONDS)
        on_done()

    async def _wait_until_drained(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _wait_for_first(*tasks: Awaitable[None], seconds: float | None = None) -> None:
    """Wait until one of the tasks is done, for `seconds` at most."""
    await asyncio.wait(
        [asyncio.ensure_future(t) for t in tasks],
        timeout=seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )


async def _wait_for_stop(stop: asyncio.Event) -> None:
    await stop.wait()


async def _refresh_progress(refresh: Callable[[], None] | None) -> None:
    while refresh:
        refresh()
        await asyncio.sleep(REFRESH_SECONDS)
