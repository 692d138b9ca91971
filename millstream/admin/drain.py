"""`millstream drain`: asks a worker to take no new work, finish or hand over its own, and end."""

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

from nats.aio.msg import Msg

from millstream.admin.console_output import ANSWER_SECONDS
from millstream.admin.settings import DrainSettings
from streams import signals, subjects
from streams.broker.broker_client import connect
from streams.errors import MillstreamError
from streams.signals import DrainAccepted, DrainReport, InvalidSignal

T = TypeVar("T")

CLOSING_SECONDS = 5.0  # for the worker to end its pulls and give back the work that is left


class WorkerNotAnswering(MillstreamError):
    """The worker that was asked to drain does not answer, or has not reported the end in time.

    No answer can mean that no worker with this id runs. A missing report means that the worker
    agreed to drain and did not say in time that it holds no more requests.
    """


async def run(settings: DrainSettings, stop: asyncio.Event) -> None:
    """Ask a worker to drain, wait until it reports that it holds no more requests, and print both.

    A worker that drains takes no new requests, and finishes those it has or hands them over to
    other workers. `settings.within` is how many seconds it may take. Raises `WorkerNotAnswering` if
    the worker does not agree within 2 s, or has not reported 5 s after the time that it has named;
    `StoreRefused` or `BrokerUnavailable` if the broker has not stored the order within some 2 s.
    Setting `stop` after the worker has agreed ends only the wait: this returns without an error and
    the worker continues to drain.
    """
    worker = settings.worker
    order = signals.pack_drain(settings.within)
    accepted: asyncio.Future[DrainAccepted] = asyncio.Future()
    emptied: asyncio.Future[DrainReport] = asyncio.Future()

    async def on_answer(msg: Msg) -> None:
        with suppress(InvalidSignal, asyncio.InvalidStateError):  # of several, the first counts
            answer = signals.parse_drain_answer(msg.data)
            if isinstance(answer, DrainAccepted):
                accepted.set_result(answer)
            else:
                emptied.set_result(answer)

    async with connect(settings.nats, "drain", settings.nats_files) as broker:
        await broker.subscribe(subjects.draining(worker), on_answer)
        await broker.store_retrying(subjects.drain(worker), order, {}, ANSWER_SECONDS)
        answer = await _wait_for(accepted, ANSWER_SECONDS, stop)
        if answer is None:
            raise WorkerNotAnswering(f"there is no worker {worker!r}, or it does not answer")
        print(f"{worker} drains, for {answer.within:g} s at most", flush=True)
        report = await _wait_for(emptied, answer.within + CLOSING_SECONDS, stop)
        if stop.is_set():
            return
        if report is None:
            raise WorkerNotAnswering(f"{worker!r} has not said that it is empty")
        print(f"{worker} is empty: {report.finished} finished, {report.handed_over} handed over")


async def _wait_for(answer: asyncio.Future[T], seconds: float, stop: asyncio.Event) -> T | None:
    """The answer; None if it does not come within `seconds`, or once `stop` is set."""
    stopping = asyncio.ensure_future(stop.wait())
    waiting: set[asyncio.Future[Any]] = {answer, stopping}
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return answer.result() if answer.done() else None
