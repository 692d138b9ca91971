"""`millstream drain`: asks a worker to take no new work, finish or hand over its own, and end."""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

from millstream.admin.console_output import ANSWER_SECONDS
from millstream.admin.settings import DrainSettings
from streams import subjects
from streams.broker.broker_client import connect
from streams.errors import MillstreamError

CLOSING_SECONDS = 5.0  # for the worker to end its pulls and give back the work that is left
Answers = asyncio.Queue[dict[str, Any] | None]


class WorkerNotAnswering(MillstreamError):
    """The worker that was asked to drain does not answer, or has not reported the end in time.

    No answer can mean that no worker with this id runs. A missing report means that the worker
    agreed to drain and did not say in time that it holds no more requests.
    """


async def run(settings: DrainSettings, stop: asyncio.Event) -> None:
    """Ask a worker to drain, wait until it reports that it holds no more requests, and print both.

    A worker that drains takes no new requests, and finishes those it has or hands them over to
    other workers. `settings.within` is how many seconds it may take. Raises `WorkerNotAnswering` if
    the worker does not agree within 2 s, or has not reported 5 s after the time that it has named.
    Setting `stop` after the worker has agreed ends only the wait: this returns without an error and
    the worker continues to drain.
    """
    worker = settings.worker
    answers: Answers = asyncio.Queue()

    async def on_answer(msg: Msg) -> None:
        answers.put_nowait(json.loads(msg.data) if msg.data else None)  # no data: no listener

    async with connect(settings.nats, "drain", settings.nats_files) as broker:
        inbox = broker.client.new_inbox()
        await broker.subscribe(inbox, on_answer)
        order = json.dumps({"within": settings.within}).encode()
        await broker.publish(subjects.drain(worker), order, reply=inbox)
        accepted = await _next_answer(answers, ANSWER_SECONDS, stop)
        if accepted is None:
            raise WorkerNotAnswering(f"there is no worker {worker!r}, or it does not answer")
        print(f"{worker} drains, for {accepted['within']:g} s at most", flush=True)
        empty = await _next_answer(answers, accepted["within"] + CLOSING_SECONDS, stop)
        if stop.is_set():
            return
        if empty is None:
            raise WorkerNotAnswering(f"{worker!r} has not said that it is empty")
        print(
            f"{worker} is empty: {empty['finished']} finished, {empty['handed_over']} handed over"
        )


async def _next_answer(
    answers: Answers, seconds: float, stop: asyncio.Event
) -> dict[str, Any] | None:
    """The next answer; None if none comes within `seconds`, or once `stop` is set."""
    getting, stopping = asyncio.ensure_future(answers.get()), asyncio.ensure_future(stop.wait())
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait({getting, stopping}, timeout=seconds, return_when=first)
    getting.cancel()
    stopping.cancel()
    return getting.result() if getting in done else None
