"""The loop that selects the next request and publishes it to the workers, several at a time."""

import asyncio
from collections.abc import Sequence
from math import inf

import structlog

from dispatcher.dispatching.metrics import observe_dispatch, observe_placed
from dispatcher.dispatching.model_state import ModelState
from dispatcher.dispatching.terminals import TerminalWriter
from dispatcher.queueing.tenant_queues import QueuedRequest
from registry.store import Registry
from streams import prefix_hashes, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused, StreamMissing
from streams.errors import BrokerUnavailable, MillstreamError
from streams.headers import MESSAGE_ID, PRIORITY, Envelope
from streams.subjects import PoolKey

log = structlog.get_logger()

MAX_CONCURRENT_DISPATCHES = 32  # each one waits for the broker twice
_RETRY_SECONDS = 0.25
# Longer than brokers need to elect a leader, during which a stream seems to be missing
GIVE_UP_SECONDS = 30.0


class DispatchLoop:
    """Moves a model's queued requests to its workers, in fair order, while `run` runs.

    To dispatch a request is to publish it to the stream WORK, from which workers pull, and then to
    acknowledge it in the stream REQUESTS. The leader calls `wake` when anything has changed, since
    the loop does not look on its own. `len()` counts the requests whose dispatch has begun and is
    not finished. `vanished` lists requests that REQUESTS no longer had; its reader clears it.
    """

    def __init__(
        self, broker: Broker, registry: Registry, state: ModelState, terminals: TerminalWriter
    ) -> None:
        self._broker, self._clock, self._registry = broker, broker.clock, registry
        self._state, self._terminals = state, terminals
        self._dispatching: dict[str, QueuedRequest] = {}
        self.vanished: list[QueuedRequest] = []  # were not in REQUESTS any more; its reader clears
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._dispatching)

    def wake(self) -> None:
        """Make the loop check whether a request can be dispatched now; returns at once."""
        self._changed.set()

    @property
    def oldest(self) -> QueuedRequest | None:
        """The request with the lowest sequence in REQUESTS whose dispatch is not finished.

        None if there is none.
        """
        return min(self._dispatching.values(), key=lambda item: item.seq, default=None)

    async def run(self) -> None:
        """Dispatch until cancelled, at most `MAX_CONCURRENT_DISPATCHES` (32) requests at a time.

        Each one is published to WORK, then acknowledged in REQUESTS. Requests that are too late, or
        whose model version is gone, are ended instead. While the broker does not answer, or WORK is
        full, a request is tried again; after the broker has refused it for `GIVE_UP_SECONDS` (30 s)
        it is ended. Cancelling may leave a request published and not acknowledged: the next leader
        publishes it again with the same message id, which the broker recognises.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while len(self._dispatching) < MAX_CONCURRENT_DISPATCHES and (
                    found := self._select_next()
                ):
                    item, version = found
                    work_priority = self._state.reserve(item, version, self._clock.now())
                    self._dispatching[item.request_id] = item
                    pool = PoolKey(self._state.model, version, work_priority)
                    tasks.create_task(self._dispatch(item, pool), name=f"send-{item.request_id}")

    def _select_next(self) -> tuple[QueuedRequest, str] | None:
        """The next request that has room and the version that serves it; None if there is none.

        Requests before it are ended whose version is gone or whose deadline would pass.
        """
        while found := self._state.select_next(self.resolve_version, self._clock.now()):
            item, version = found
            if version is None:
                self._reject(item)
            elif self._state.estimator.will_miss_deadline(item, self._clock.now()):
                self._expire(item)
            else:
                return item, version
        return None

    def _expire(self, item: QueuedRequest) -> None:
        self._state.queue.remove(item.request_id)
        message = "the deadline would pass before the first output"
        self._terminals.end_request(item, "deadline_exceeded", message)

    def resolve_version(self, item: QueuedRequest) -> str | None:
        """Return the id of the model version that would serve a request now.

        That is the version that the request pins, else the model's default. If no worker serves
        that now, or it takes other tokens than those of the request, it is one that takes them and
        is served: a new version may still be loading. None if the registry does not have it.
        """
        model = self._registry.models.get(self._state.model)
        if model is None:
            return None
        if item.version:
            return item.version if item.version in model.versions else None
        made_for = model.versions.get(item.tokenized_for or model.default_version)
        if made_for is None:
            return None
        count_workers = self._state.fleet.count_workers
        if made_for is model.default and count_workers(made_for.id):
            return made_for.id
        newest_first = reversed(model.versions.values())
        fitting = [
            v for v in (model.default, made_for, *newest_first) if v.takes_prompts_of(made_for)
        ]
        return next((v for v in fitting if count_workers(v.id)), fitting[0]).id

    def _reject(self, item: QueuedRequest) -> None:
        self._state.queue.remove(item.request_id)
        model = f"the model {self._state.model!r}"
        if self._state.model in self._registry.models:
            model = f"the version {item.wanted_version!r} of {model}"
        message = f"{model} is gone"
        self._terminals.end_request(item, "model_not_found", message)

    async def _dispatch(self, item: QueuedRequest, pool: PoolKey) -> None:
        """Try to publish a reserved request until that is done or not needed any more.

        A broker that for long has refused the message, or has no stream for it, ends the request.
        """
        refused_at, logged = inf, ""
        try:
            while not self._has_expired(item):
                try:
                    return await self._publish(item, pool)
                except (BrokerUnavailable, StoreRefused) as error:  # or WORK is full: it drains
                    if str(error) != logged:
                        logged = str(error)
                        log.warning("dispatch_retried", request_id=item.request_id, reason=logged)
                    refused_at = min(refused_at, self._clock.now()) if is_lasting(error) else inf
                    if self._clock.now() - refused_at > GIVE_UP_SECONDS:
                        return self._give_up(item, error)
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            del self._dispatching[item.request_id]
            self._changed.set()

    def _has_expired(self, item: QueuedRequest) -> bool:
        """End a reserved request whose deadline has passed; False for any other."""
        if self._clock.seconds_until(item.deadline) >= 0:
            return False
        self._state.release(item.request_id)
        self._terminals.end_request(item, "deadline_exceeded", "the deadline passed in the queue")
        return True

    def _give_up(self, item: QueuedRequest, error: MillstreamError) -> None:
        self._state.release(item.request_id)
        self._terminals.end_request(item, error.code, f"the broker refuses the request: {error}")

    async def _publish(self, item: QueuedRequest, pool: PoolKey) -> None:
        """Publish a request to WORK and only then acknowledge it in REQUESTS.

        A crash between the two repeats with the same message id, which the broker recognises.
        """
        message = await self._broker.get(topology.REQUESTS, item.seq)
        if message is None:  # an earlier leader has dispatched it, or the stream is another one
            self._state.release(item.request_id)
            self.vanished.append(item)
            return
        now_ms = self._clock.now_ms()
        envelope = Envelope.from_headers(message.headers)
        placement = self._state.place(
            item.request_id, _parse_prefix_hashes(envelope), envelope.adapter
        )
        subject = subjects.work(pool, placement.worker)
        headers = _work_headers(message, item, now_ms)
        stored = await self._broker.store(subject, message.data, headers, repeats=True)
        self._state.mark_published(item.request_id, stored.seq, stored.duplicate)
        await self._broker.publish(item.reply, b"+ACK")
        observe_placed(self._state.model, placement.why)
        self._record_wait(item, envelope.estimated_wait_ms, (now_ms - item.accepted) / 1000)

    def _record_wait(self, item: QueuedRequest, estimated_ms: int | None, waited: float) -> None:
        """Compare the wait that was estimated at acceptance with the real one."""
        estimated_seconds = None if estimated_ms is None else estimated_ms / 1000
        observe_dispatch(self._state.model, item.priority, waited, estimated_seconds)
        if estimated_seconds is not None:
            self._state.estimator.service_rate.record_wait(estimated_seconds, waited)


def is_lasting(error: MillstreamError) -> bool:
    """Return True if the broker refuses for good: no such stream, or the message is rejected.

    False if the stream is full or no answer came, since both may pass.
    """
    return isinstance(error, StreamMissing) or (
        isinstance(error, StoreRefused) and not error.is_full
    )


def _parse_prefix_hashes(envelope: Envelope) -> Sequence[int]:
    try:
        return prefix_hashes.from_header(envelope.prefix_hashes)
    except ValueError as error:  # the request runs without them
        log.warning("prefix_hashes_unreadable", request_id=envelope.request_id, reason=str(error))
        return ()


def _work_headers(message: StoredMessage, item: QueuedRequest, now_ms: int) -> dict[str, str]:
    """The headers of a message of WORK: the request's own, its priority and the time of dispatch.

    Its priority is the client's, whatever lane of WORK it takes. The broker's headers are left out.
    """
    kept = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    own = {PRIORITY: item.priority.value, MESSAGE_ID: item.request_id}
    return kept | own | {"Dispatched": str(now_ms)}
