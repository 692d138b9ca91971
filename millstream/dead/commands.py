"""`millstream dead list`, `show`, `replay` and `drop`."""

import asyncio
import json
import sys

from rich.console import Console

from millstream.dead import replays
from millstream.dead.replays import NotReplayable
from millstream.dead.settings import ChangeSettings, ChoiceSettings, ListSettings, ShowSettings
from millstream.dead.shown import summary, table, whole, words
from streams import dead_letters, topology
from streams.connection import Broker, connect
from streams.dead_letters import DeadLetter
from streams.errors import MillstreamError
from streams.timekeeping import look

FAILED = 1
WIDE_COLUMNS = 240  # a file or a pipe has no width of its own; ids and errors are long


class NotConfirmed(MillstreamError):
    """Several are meant, and it was not said that they are."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} dead letters match; say --yes if all of them are meant")


class NoDeadLetter(MillstreamError):
    """Nothing is there that was asked for."""


def _console() -> Console:
    width = None if sys.stdout.isatty() else WIDE_COLUMNS
    return Console(width=width, markup=False, highlight=False)  # errors may look like markup


async def list_letters(settings: ListSettings, stop: asyncio.Event) -> None:
    """Print one line for each, the oldest first."""
    async with connect(settings.nats, "dead") as broker:
        replayed = await replays.read(broker)
        rows = [
            summary(letter, replayed.get(letter.name)) for letter in await _of(broker, settings)
        ]
    if settings.as_json:
        print(json.dumps(rows, indent=2))
    else:
        _console().print(table(rows))


async def show(settings: ShowSettings, stop: asyncio.Event) -> None:
    """Print one whole, but for what its client has written. Raises `NoDeadLetter`."""
    async with connect(settings.nats, "dead") as broker:
        letter = await _named(broker, settings.request_id)
        facts = whole(letter, (await replays.read(broker)).get(letter.name))
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        _console().print(words(facts))


async def replay(settings: ChangeSettings, stop: asyncio.Event) -> int:
    """Queue each once more as a new request, unless it was; 1 if one could not be."""
    async with connect(settings.nats, "dead") as broker:
        await look(broker)
        return max([await _replay(broker, each) for each in await _chosen(broker, settings)])


async def _replay(broker: Broker, letter: DeadLetter) -> int:
    try:
        became, now = await replays.replay(broker, letter)
    except NotReplayable as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"{letter.name} {'is' if now else 'was already'} replayed as {became.request_id}")
    return 0


async def drop(settings: ChangeSettings, stop: asyncio.Event) -> None:
    """Remove them for good. Raises `NoDeadLetter` or `NotConfirmed`."""
    async with connect(settings.nats, "dead") as broker:
        for letter in await _chosen(broker, settings):
            await broker.remove(topology.DEAD, letter.seq)  # unless somebody else has
            print(f"{letter.name} is dropped")


async def _chosen(broker: Broker, settings: ChangeSettings) -> list[DeadLetter]:
    """Raises `NoDeadLetter` if there is none, `NotConfirmed` if there are several."""
    if settings.request_id:
        return [await _named(broker, settings.request_id)]
    letters = await _of(broker, settings)
    if not letters:
        raise NoDeadLetter("no dead letter matches")
    if len(letters) > 1 and not settings.yes:
        raise NotConfirmed(len(letters))
    return letters


async def _named(broker: Broker, name: str) -> DeadLetter:
    for letter in await dead_letters.read(broker):
        if letter.name == name:
            return letter
    raise NoDeadLetter(f"there is no dead letter {name!r}")


async def _of(broker: Broker, settings: ChoiceSettings) -> list[DeadLetter]:
    letters = await dead_letters.read(broker, settings.tenant, settings.model)
    if settings.since is None:
        return letters
    await look(broker)
    return [each for each in letters if -broker.clock.until(each.ended) <= settings.since]
