"""A cell whose engine says what it is told to: for texts that no mock would come up with."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import dispatcher.service
import gpu_worker.service
from gpu_worker.engines import factory
from gpu_worker.engines.engine import EngineError, FreeCapacity, Output, Sequence
from registry.models import mock_model
from registry.store import Registry
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, gateways
from tests.support.services import always, dispatcher_settings, running, worker_settings
from tests.support.versions import with_facts

CHARACTERS_PER_STEP = 3  # a step says so many: whatever matters is cut somewhere
FAILING_SEED = 7  # a sequence with this seed fails at the end of its text


class FixedTextEngine:
    """Says the same text whatever it is asked."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._said: dict[str, tuple[Sequence, int]] = {}
        self._ready: list[Output] = []

    @classmethod
    def load(cls, directory: Path | None, *, text: str) -> "FixedTextEngine":
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
        name, end = sequence.request_id, said + CHARACTERS_PER_STEP
        if end < len(self._text):
            self._said[name] = (sequence, end)
            return Output(name, [0], self._text[said:end])
        del self._said[name]
        if sequence.sampling.seed == FAILING_SEED:
            return Output(name, error=EngineError("engine_failed", "as it was told"))
        return Output(name, [0], self._text[said:], finish="stop")

    def free_capacity(self) -> FreeCapacity:
        return FreeCapacity(8, 100_000)

    @property
    def idle(self) -> bool:
        return not self._said and not self._ready

    def close(self) -> None:
        self._said.clear()


class TextBehindEngine(FixedTextEngine):
    """Says its last characters without a token, as those that a stop string had held back.

    It does so once `may_end` is set, so that the log has all else by then.
    """

    may_end = threading.Event()

    @classmethod
    def load(cls, directory: Path | None, *, text: str) -> "TextBehindEngine":
        cls.may_end.clear()
        return cls(text)

    def step(self) -> list[Output]:
        outputs, self._ready = self._ready, []
        for name, (sequence, said) in list(self._said.items()):
            if said + CHARACTERS_PER_STEP < len(self._text):
                outputs.append(self._speak(sequence, said))
            elif self.may_end.wait(0.001):
                del self._said[name]
                outputs.append(Output(name, text=self._text[said:], finish="stop"))
        return outputs


@asynccontextmanager
async def fixed_text_gateway(
    nats_url: str,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    template: str | None = None,
    engine: type[FixedTextEngine] = FixedTextEngine,
) -> AsyncIterator[RunningGateway]:
    """A gateway with everything behind it; its one model `mock` says `text`."""
    here = (engine.__module__, engine.load.__qualname__)
    monkeypatch.setitem(factory.ENGINES, "mock", here)
    model = with_facts(mock_model(), chat_template=template, options={"text": text})
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        await registry.add_model(model)
        await registry.close()
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        await eventually(gateway.is_ready)
        yield gateway
