"""`millstream bench --curve`: measures what workers of one machine type do with a model."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.admin.admin_client import admin_client
from millstream.admin.console_output import ANSWER_SECONDS
from millstream.bench import target
from millstream.bench.arrivals import Arrival
from millstream.bench.curve_fit import fit_times, relative_error
from millstream.bench.load_client import BenchClient
from millstream.bench.load_generator import LoadGenerator, make_client, make_request_factory
from millstream.bench.load_statistics import Sample
from millstream.bench.settings import BenchSettings
from millstream.bench.target import TargetModel
from millstream.curves.commands import put_curve
from streams import subjects
from streams.broker.broker_client import connect
from streams.errors import MillstreamError
from streams.records.fleet.curves import Curve, CurvePoint, CurveSource

GENERATIONS = 4  # of requests in a cell; the first and the last are not measured
MIN_REQUESTS = 6  # that are measured in a cell
DRAIN_SECONDS = 600.0
_LONG_PROMPT, _SHORT_OUTPUT = 8, 4  # times as long, and as short, as what is asked for
Worker = dict[str, Any]  # a heartbeat, as `lag --json` has it


class CurveNotMeasured(MillstreamError):
    """The workers of a model cannot be measured, or too few requests came to their end."""


@dataclass(frozen=True)
class CurveCell:
    """One setting: requests at once on each worker, and tokens of each prompt and output."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    def arrivals(self, workers: int, seed: int) -> Iterator[Arrival]:
        """Yield the requests of the cell, for all workers together.

        Outputs are from half to one and a half times as long, so that requests do not begin and end
        together, as they would if all were alike.
        """
        random, half = Random(seed), self.output_tokens // 2
        at_once = self.batch * workers
        for _ in range(max(GENERATIONS * at_once, 2 * at_once + MIN_REQUESTS)):
            output = random.randint(self.output_tokens - half, self.output_tokens + half)
            yield Arrival(0.0, self.prompt_tokens, output)


def make_cells(settings: BenchSettings, worker: Worker, context: int | None) -> list[CurveCell]:
    """Return the cells to measure: sizes of the batch from 1 to what fits, times three shapes.

    The shapes are the one of the settings, one with a longer prompt, and that with short outputs:
    together they tell what a prompt costs, and what a long context does.
    """
    prompt, output = settings.prompt_tokens, settings.output_tokens
    short = max(2, output // _SHORT_OUTPUT)
    shapes = [(prompt, output), (_LONG_PROMPT * prompt, output), (_LONG_PROMPT * prompt, short)]
    cells = []
    for prompt_tokens, output_tokens in shapes:
        most = prompt_tokens + output_tokens + output_tokens // 2
        if context and most > context:
            continue
        largest = min(worker["max_sequences"], worker["kv_tokens"] // most)
        cells += [CurveCell(batch, prompt_tokens, output_tokens) for batch in _batch_sizes(largest)]
    return cells


def _batch_sizes(largest: int) -> Iterator[int]:
    """Yield 1, 4, 16 … and the largest."""
    size = 1
    while size < largest:
        yield size
        size *= 4
    if largest >= 1:
        yield largest


async def measure_curve(settings: BenchSettings, stop: asyncio.Event) -> int:
    """Measure the running workers of a type, store their curve and print it; return 0.

    All workers of the model's version must be of that type, and should have nothing else to do.
    Nothing is stored if `stop` is set before the end; the status is 1 then. Raises
    `CurveNotMeasured`, `CurveNotFitted`, as `load_generator.run`, or as `AdminClient.call`.
    """
    address, clock = target.resolve_address(settings), time.perf_counter
    (model,) = (await target.fetch_models(address, settings.model[:1], clock))[:1]
    async with admin_client(settings) as admin:
        shown = await admin.call("models.show", name=model.name)
        name, version = shown["model"]["name"], shown["version"]
        workers = await _find_workers(settings, name, version)
        async with make_client(settings, address, clock) as client:
            bench = CurveBench(settings, client, model, workers)
            points = await bench.measure(stop)
        if stop.is_set():
            return 1
        curve = _make_curve(workers[0], name, version, points)
        stored = await put_curve(admin, curve)
    print(json.dumps(stored) if settings.as_json else _describe(curve))
    return 0


async def _find_workers(settings: BenchSettings, model: str, version: str) -> list[Worker]:
    """Return the workers to measure, as the model's dispatcher knows them."""
    async with connect(settings.nats, "bench-curve", settings.nats_files) as broker:
        answer = await broker.request(subjects.report(model), b"", ANSWER_SECONDS)
    if answer is None:
        raise CurveNotMeasured(
            f"the dispatcher of {model} did not answer within {ANSWER_SECONDS:g} s"
        )
    return choose_workers(json.loads(answer)["workers"], f"{model}@{version}", settings.type)


def choose_workers(found: Sequence[Worker], model: str, type_name: str | None) -> list[Worker]:
    """Return the workers of a model version if all of them are of one type, the one asked for.

    `model` is `NAME@VERSION`. Raises `CurveNotMeasured` if there are none, or others beside them.
    """
    version = model.rpartition("@")[2]
    serving = [each for each in found if each["version"] == version and not each["draining"]]
    types = sorted({each["type"] for each in serving})
    if not serving:
        raise CurveNotMeasured(f"no worker serves {model}: start one with a --type")
    if types == [""]:
        raise CurveNotMeasured(f"the workers of {model} name no machine type: give them a --type")
    if len(types) > 1 or type_name not in (None, *types):
        wanted = type_name or "a single type"
        raise CurveNotMeasured(
            f"workers of the types {', '.join(each or 'none' for each in types)} serve {model}, "
            f"and requests go to all of them: run only workers of {wanted} meanwhile"
        )
    return serving


class CurveBench:
    """Puts the loads of all cells on the workers, one after the other."""

    def __init__(
        self,
        settings: BenchSettings,
        client: BenchClient,
        model: TargetModel,
        workers: Sequence[Worker],
    ) -> None:
        self._settings, self._client, self._model = settings, client, model
        self._workers = workers

    async def measure(self, stop: asyncio.Event) -> list[CurvePoint]:
        """Return the points of all cells; of those so far if `stop` is set."""
        cells = make_cells(self._settings, self._workers[0], self._model.context)
        if not cells:
            raise CurveNotMeasured(
                f"no request of {self._settings.prompt_tokens} and {self._settings.output_tokens} "
                f"tokens fits a worker with {self._workers[0]['kv_tokens']} KV tokens: make "
                "--prompt-tokens or --output-tokens smaller"
            )
        points: list[CurvePoint] = []
        async with self._progress(len(cells)) as advance:
            for cell in cells:
                point = await self._measure_cell(cell, stop)
                if point is None:
                    return points
                points.append(point)
                advance(cell)
        return points

    async def _measure_cell(self, cell: CurveCell, stop: asyncio.Event) -> CurvePoint | None:
        settings, count = self._settings, len(self._workers)
        make_request = make_request_factory(settings, [self._model])
        load = LoadGenerator(self._client, make_request, time.perf_counter)
        arrivals = list(cell.arrivals(count, settings.seed))
        await load.warm_up(arrivals[0], settings.warmup)
        sender = load.send_closed_loop(iter(arrivals), cell.batch * count, None)
        await load.run(sender, DRAIN_SECONDS, stop)
        return None if stop.is_set() else make_point(cell, load.samples, count)

    @asynccontextmanager
    async def _progress(self, cells: int) -> AsyncIterator[Any]:
        """Yield what is called after each cell, and shows it unless JSON is to be printed."""
        if self._settings.as_json:
            yield lambda cell: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("measuring", total=cells)

            def advance(cell: CurveCell) -> None:
                told = f"{cell.batch} at once, {cell.prompt_tokens} + {cell.output_tokens} tokens"
                progress.update(task, advance=1, description=f"measured {told}")

            yield advance


def make_point(cell: CurveCell, samples: Sequence[Sample], workers: int) -> CurvePoint:
    """Return what the requests of a cell tell, but for those at its beginning and its end.

    Raises `CurveNotMeasured` if too few of these came to their end.
    """
    at_once = cell.batch * workers
    middle = list(islice(samples, at_once, len(samples) - at_once))
    good = [each for each in middle if each.is_ok and each.tokens > each.counts[0]]
    if len(good) < max(1, len(middle) // 2):
        codes = ", ".join(sorted({each.code for each in middle if each.code})) or "too few tokens"
        raise CurveNotMeasured(
            f"{len(good)} of {len(middle)} requests of {cell.prompt_tokens} and "
            f"{cell.output_tokens} tokens could be measured, {cell.batch} at once: {codes}"
        )
    count = len(good)
    seconds = sum((each.ended or 0.0) - each.sent for each in good) / count
    return CurvePoint(
        batch=cell.batch,
        prompt_tokens=sum(each.prompt_tokens for each in good) / count,
        output_tokens=sum(each.tokens for each in good) / count,
        first_token_seconds=sum(each.times[0] - each.sent for each in good) / count,
        token_seconds=sum(each.times[-1] - each.times[0] for each in good)
        / sum(each.tokens - each.counts[0] for each in good),
        requests_per_second=cell.batch / seconds,
    )


def _make_curve(worker: Worker, model: str, version: str, points: Sequence[CurvePoint]) -> Curve:
    facts = worker["load"]
    weight, kv = facts.get("weight_bytes"), facts.get("kv_bytes_per_token")
    return Curve(
        model=model,
        version=version,
        type=worker["type"],
        source=CurveSource.BENCH,
        measured_at=0.0,  # the admin service has the cell's time
        times=fit_times(points),
        max_sequences=worker["max_sequences"],
        kv_tokens=worker["kv_tokens"],
        load_seconds=facts.get("load_seconds"),
        warm_up_seconds=facts.get("warm_up_seconds"),
        weight_bytes=None if weight is None else int(weight),
        kv_bytes_per_token=None if kv is None else int(kv),
        points=list(points),
    )


def _describe(curve: Curve) -> str:
    worst = max(relative_error(curve.times, point) for point in curve.points)
    return (
        f"{curve.name}: {len(curve.points)} points, the curve is within {worst:.0%} of their pace; "
        f"see `millstream curves show {curve.name}`"
    )
