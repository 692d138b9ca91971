"""One load from its first arrival to its report: send on time or on answer, drain, sum up."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

from millstream.bench import arrivals, plot, processes, table, target
from millstream.bench.arrivals import Arrival, Fit
from millstream.bench.clients import Address, Ask, Client, Clock, Unreachable
from millstream.bench.prompts import Prompts
from millstream.bench.settings import BenchSettings
from millstream.bench.sse import SseClient
from millstream.bench.statistics import UNFINISHED, Sample, report
from millstream.bench.target import Model
from millstream.bench.websocket import WebSocketClient

REFUSED_PAUSE_SECONDS = 0.1  # before a closed loop's client asks again after an error
REFRESH_SECONDS = 0.25
Done = Callable[[], None]


async def run(settings: BenchSettings, stop: asyncio.Event) -> int:
    """Put load on a gateway until it is spent or `stop` is set; 1 if no request was completed."""
    if settings.plot:
        plot.require()
    measured = processes.parse(settings.pids)
    address, clock = target.address(settings), time.perf_counter
    models = await target.models(address, settings.model, clock)
    first, due = _arrivals(settings, models)
    async with _client(settings, address, clock) as client:
        load = Load(client, _asker(settings, models), clock)
        await load.warm_up(first, settings.warmup)
        meter = processes.Meter.start([*measured, processes.OWN])
        await _put(load, settings, due, stop)
        summary = report(load.samples, load.began, load.window, settings.is_open)
        cpu = meter.us_per_token(summary.output_tokens)
    table.show(settings, models, summary, cpu)
    if settings.plot:
        plot.draw(settings.plot, load.samples, load.began)
    return 0 if summary.completed else 1


def _client(settings: BenchSettings, address: Address, clock: Clock) -> Client:
    if settings.protocol == "sse":
        return SseClient(address, clock)
    return WebSocketClient(address, settings.codec, settings.sockets, clock)


def _arrivals(settings: BenchSettings, models: list[Model]) -> tuple[Arrival, Iterator[Arrival]]:
    """One arrival to warm up with, and the load's, in order; all cut to what every model takes."""
    context = min((m.context for m in models if m.context), default=None)
    fit = Fit(settings.max_prompt_tokens, settings.max_output_tokens, context)
    cut = map(fit.cut, _uncut(settings))
    first = next(cut)
    all_of_them = itertools.chain([first], cut)
    return first, arrivals.limited(all_of_them, settings.open_seconds, settings.requests)


def _uncut(settings: BenchSettings) -> Iterator[Arrival]:
    sizes = Arrival(0.0, settings.prompt_tokens, settings.output_tokens)
    if settings.trace is None:
        if settings.rate:
            return arrivals.poisson(settings.rate, sizes, Random(settings.seed))
        return itertools.repeat(sizes)
    with settings.trace.open(newline="") as lines:
        rows = arrivals.read_trace(lines)
    if not settings.is_open:
        return arrivals.endless(rows)
    if settings.rate:
        return arrivals.at_rate(rows, settings.rate)
    return arrivals.at_speed(rows, settings.speed or 1.0)


def _asker(settings: BenchSettings, models: list[Model]) -> Callable[[Arrival], Ask]:
    """What to ask for an arrival; the models take turns."""
    turns = itertools.cycle([(m.name, Prompts(m.vocabulary, settings.seed)) for m in models])

    def ask(arrival: Arrival) -> Ask:
        model, prompts = next(turns)
        prompt = prompts.of(arrival.prompt_tokens)
        return Ask(model, prompt, arrival.output_tokens, settings.priority.value)

    return ask


async def _put(
    load: "Load", settings: BenchSettings, due: Iterator[Arrival], stop: asyncio.Event
) -> None:
    """Run the load, with a progress bar where somebody watches."""
    if settings.is_open:
        sender = load.open(due)
    else:
        sender = load.closed(due, settings.concurrency or 1, settings.seconds)
    shown = nullcontext() if settings.as_json else table.progress(settings, load)
    with shown as refresh:
        await load.run(sender, settings.drain, stop, refresh)


@dataclass
class Tally:
    """What has ended so far, counted as it ends: a progress bar must not walk all samples."""

    done: int = 0
    failed: int = 0
    tokens: int = 0

    def add(self, sample: Sample) -> None:
        self.done += sample.ok
        self.failed += not sample.ok
        self.tokens += sample.tokens


class Load:
    """Sends arrivals through a client and keeps a sample of each.

    `began` is the client's clock at the start; `window` how long the load was kept up, None if it
    ended by itself.
    """

    def __init__(self, client: Client, ask: Callable[[Arrival], Ask], clock: Clock) -> None:
        self._client, self._ask, self._clock = client, ask, clock
        self._running: set[asyncio.Task[None]] = set()
        self.samples: list[Sample] = []
        self.tally = Tally()
        self.began = clock()
        self.window: float | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def elapsed(self) -> float:
        return self._clock() - self.began

    async def warm_up(self, arrival: Arrival, requests: int) -> None:
        """Send `requests` one after another. Raises `Unreachable` if one fails: all would."""
        for _ in range(requests):
            sample = Sample(self._clock())
            await self._client.ask(self._ask(arrival), sample)
            if sample.code:
                raise Unreachable(f"the first request failed: {sample.code}")

    async def run(
        self,
        sender: Coroutine[Any, Any, None],
        drain: float,
        stop: asyncio.Event,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """Send everything, then wait up to `drain` seconds for the rest and cancel what is left.

        `stop` cancels at once. Cancelled requests have ended as `unfinished`.
        """
        async with asyncio.TaskGroup() as group:
            self._group, self.began = group, self._clock()
            stopped = group.create_task(_until(stop), name="stop")
            watching = group.create_task(_watch(refresh), name="progress")
            sending = group.create_task(sender, name="sender")
            await _first(sending, stopped)
            sending.cancel()
            drained = group.create_task(self._drained(), name="drain")
            await _first(drained, stopped, seconds=drain)
            for task in (drained, stopped, watching, *self._running):
                task.cancel()

    async def open(self, due: Iterator[Arrival]) -> None:
        """Send each arrival at its time, whatever came of the ones before."""
        for arrival in due:
            await asyncio.sleep(max(0.0, arrival.at - self.elapsed))
            self._spawn(arrival, self.began + arrival.at, lambda: None)

    async def closed(self, due: Iterator[Arrival], concurrency: int, seconds: float | None) -> None:
        """Keep `concurrency` requests running for `seconds`, or until there are no more."""
        slots = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.timeout(seconds):
                for arrival in due:
                    await slots.acquire()
                    self._spawn(arrival, self._clock(), slots.release)
        except TimeoutError:
            self.window = seconds

    def _spawn(self, arrival: Arrival, due: float, done: Done) -> None:
        task = self._group.create_task(self._send(arrival, Sample(due), done), name="request")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _send(self, arrival: Arrival, sample: Sample, done: Done) -> None:
        self.samples.append(sample)
        try:
            await self._client.ask(self._ask(arrival), sample)
        except Unreachable as error:
            sample.end(self._clock(), error.code)
        except asyncio.CancelledError:
            sample.end(self._clock(), UNFINISHED)
            raise
        self.tally.add(sample)
        if sample.code:
            await asyncio.sleep(REFUSED_PAUSE_SECONDS)
        done()

    async def _drained(self) -> None:
        while self._running:
            await asyncio.wait(self._running)


async def _first(*tasks: Awaitable[None], seconds: float | None = None) -> None:
    """Wait until one of the tasks is done, or for `seconds`."""
    await asyncio.wait(
        [asyncio.ensure_future(t) for t in tasks],
        timeout=seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def _watch(refresh: Callable[[], None] | None) -> None:
    while refresh:
        refresh()
        await asyncio.sleep(REFRESH_SECONDS)
