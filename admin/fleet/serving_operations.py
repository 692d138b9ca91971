"""Handlers of the operations on which workers serve which models; they return JSON objects."""

import asyncio
import json
from collections.abc import Iterable, Mapping

from admin.operation_table import PageArguments, ServedArguments
from admin.operations import Handler, JsonBody, dump_record, make_page
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import Broker

_REPORT_SECONDS = 2.0  # for a model's leader to tell of its workers


class ServingOperations:
    """The operations on served models; they raise the errors of `Registry`.

    A change is answered once it is stored; workers follow it after that.
    """

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker, self._registry = broker, registry

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {
            "served.list": self._list,
            "served.add": self._add,
            "served.remove": self._remove,
        }

    async def _list(self, page: PageArguments) -> JsonBody:
        """Answer with records, each with what its workers serve and what they could not load."""
        served, beats = self._registry.served, await self._read_heartbeats()

        def describe(name: str) -> JsonBody:
            return {**dump_record(served[name]), "workers": _describe_workers(name, beats)}

        return make_page(served, describe, after=page.after, limit=page.limit)

    async def _add(self, arguments: ServedArguments) -> JsonBody:
        return dump_record(await self._registry.serve(arguments.name, arguments.model))

    async def _remove(self, arguments: ServedArguments) -> JsonBody:
        return dump_record(await self._registry.stop_serving(arguments.name, arguments.model))

    async def _read_heartbeats(self) -> list[JsonBody]:
        """Return the last heartbeats of all workers, as their models' leaders know them.

        Those of a model whose leader gives no answer are missing.
        """
        asked = [
            self._broker.request(subjects.report(model), b"", _REPORT_SECONDS)
            for model in self._registry.models
        ]
        answers = await asyncio.gather(*asked)
        return [beat for each in answers if each for beat in json.loads(each)["workers"]]


def _describe_workers(on: str, beats: Iterable[JsonBody]) -> list[JsonBody]:
    """Return what each worker that is meant by `on` says of its models."""
    found: dict[str, JsonBody] = {}
    for beat in beats:
        if on not in (beat["worker"], beat["type"]):
            continue
        worker = found.setdefault(beat["worker"], {"worker": beat["worker"], "models": {}})
        worker["models"][f"{beat['model']}@{beat['version']}"] = _state(beat)
        worker["not_loaded"] = beat["not_loaded"]
    return list(found.values())


def _state(beat: JsonBody) -> str:
    if beat["draining"]:
        return "draining"
    return "loaded" if beat["resident"] else "not loaded"
