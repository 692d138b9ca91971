"""A cell whose engine says what it is told to: for texts that no mock would come up with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import dispatcher.service
import gpu_worker.service
from gpu_worker.engine import EngineError, Output, Room, Sequence
from gpu_worker.engines import factory
from registry.models import mock_model
from registry.store import Registry
from streams.connection import connect
from tests.eventually import eventually
from tests.integration.gateways import Gateway, gateways
from tests.integration.services import a_dispatcher, a_worker, running

CHARACTERS = 3  # a step says so many: whatever matters is cut somewhere
FAILS = 7  # a sequence with this seed fails at the end of its text


class ScriptedEngine:
    """Says the same text whatever it is asked."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._said: dict[str, tuple[Sequence, int]] = {}
        self._ready: list[Output] = []

    @classmethod
    def load(cls, directory: Path | None, *, text: str) -> "ScriptedEngine":
        return cls(text)

    def add(self, sequence: Sequence) -> None:
        self._said[sequence.request_id] = (sequence, 0)

    def cancel(self, request_id: str) -> None:
        if self._said.pop(request_id, None):
            self._ready.append(Output(request_id, finish="cancelled"))

    def step(self) -> list[Output]:
        outputs, self._ready = self._ready, []
        return outputs + [self._speak(*each) for each in list(self._said.values())]

    def _speak(self, sequence: Sequence, said: int) -> Output:
        name, end = sequence.request_id, said + CHARACTERS
        if end < len(self._text):
            self._said[name] = (sequence, end)
            return Output(name, [0], self._text[said:end])
        del self._said[name]
        if sequence.sampling.seed == FAILS:
            return Output(name, error=EngineError("engine_failed", "as it was told"))
        return Output(name, [0], self._text[said:], finish="stop")

    def room(self) -> Room:
        return Room(8, 100_000)

    @property
    def idle(self) -> bool:
        return not self._said and not self._ready

    def close(self) -> None:
        self._said.clear()


@asynccontextmanager
async def scripted(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, text: str, template: str | None = None
) -> AsyncIterator[Gateway]:
    """A gateway with everything behind it; its one model `mock` says `text`."""
    here = (ScriptedEngine.__module__, "ScriptedEngine.load")
    monkeypatch.setitem(factory.ENGINES, "mock", here)
    model = mock_model().model_copy(update={"chat_template": template})
    version = model.default.model_copy(update={"options": {"text": text}})
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker)
        await registry.put(model.model_copy(update={"versions": {version.id: version}}))
        await registry.close()
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, a_dispatcher(nats_url)),
        running(gpu_worker.service, a_worker(nats_url)),
    ):
        await eventually(gateway.is_ready)
        yield gateway
