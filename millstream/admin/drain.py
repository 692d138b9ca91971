"""`millstream drain`: a worker takes nothing new, hands over what takes too long, and ends."""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

from millstream.settings import DrainSettings
from streams import subjects
from streams.broker.connection import connect
from streams.errors import MillstreamError

ANSWER_SECONDS = 2.0
CLOSING_SECONDS = 5.0  # a worker's: to let go of its pulls, and to give back what is left
Answers = asyncio.Queue[dict[str, Any] | None]


class WorkerNotAnswering(MillstreamError):
    """No worker of this name answers."""


async def run(settings: DrainSettings, stop: asyncio.Event) -> None:
    """Tell the worker, and wait until it is empty or `stop`. Raises `WorkerNotAnswering`."""
    worker = settings.worker
    answers: Answers = asyncio.Queue()

    async def on_answer(msg: Msg) -> None:
        answers.put_nowait(json.loads(msg.data) if msg.data else None)  # None: nobody listens

    async with connect(settings.nats, "drain") as broker:
        inbox = broker.client.new_inbox()
        await broker.subscribe(inbox, on_answer)
        told = json.dumps({"within": settings.within}).encode()
        await broker.publish(subjects.drain(worker), told, reply=inbox)
        heard = await _next_answer(answers, ANSWER_SECONDS, stop)
        if heard is None:
            raise WorkerNotAnswering(f"there is no worker {worker!r}, or it does not answer")
        print(f"{worker} drains, for {heard['within']:g} s at most", flush=True)
        empty = await _next_answer(answers, heard["within"] + CLOSING_SECONDS, stop)
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
    """The next answer; None after a silence, or when it is not waited for any more."""
    getting, stopping = asyncio.ensure_future(answers.get()), asyncio.ensure_future(stop.wait())
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait({getting, stopping}, timeout=seconds, return_when=first)
    getting.cancel()
    stopping.cancel()
    return getting.result() if getting in done else None
