"""A worker's credit, what it can still accept, and its rate. Pure: time comes in as an argument."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.engines.engine import FreeCapacity
from streams.subjects import Priority

_RATE_SECONDS = 5.0  # the tokens/s of a heartbeat are an average over about this long
_MEAN_REQUESTS = 20  # the mean cost of a request is over about this many recent ones


@dataclass(slots=True)
class _HeldRequest:
    """An accepted request: the KV tokens that it occupies, and how many it may yet generate."""

    tokens: int
    tokens_left: int
    priority: Priority


class Credit:
    """The sequences and KV tokens that one model server can still accept beside what it holds.

    A held request was accepted and has not ended. `capacity` is the free capacity of the idle
    engine; the most KV tokens that held requests may come to occupy at once are reserved.
    `concurrency_limit` is how many sequences the engine would run at once now, which is less than
    its maximum while it is throttled. Where the engine preempts less urgent work for more urgent
    (`preempts`), held requests of a lower priority take no credit from a higher one.
    """

    def __init__(self, capacity: FreeCapacity, preempts: bool = False) -> None:
        self.resize(capacity, preempts)
        self._requests: dict[str, _HeldRequest] = {}
        self._recent_requests, self._mean_cost = 0, 0.0  # how many, and their tokens per request

    def resize(self, capacity: FreeCapacity, preempts: bool = False) -> None:
        """Take over the capacity of another engine; `capacity` is its free capacity while idle.

        Held requests stay held, and the concurrency limit becomes the new engine's maximum.
        """
        self.max_sequences, self.kv_tokens = capacity.sequences, capacity.tokens
        self.concurrency_limit, self.preempts = capacity.sequences, preempts

    def reserve(self, request_id: str, prompt_tokens: int, cost: int, priority: Priority) -> None:
        """Hold a request until `release`: it takes a sequence and up to `cost` KV tokens.

        `cost` is its prompt tokens plus the most tokens that it may generate.
        """
        self._requests[request_id] = _HeldRequest(prompt_tokens, cost - prompt_tokens, priority)
        self._recent_requests = min(_MEAN_REQUESTS, self._recent_requests + 1)
        self._mean_cost += (cost - self._mean_cost) / self._recent_requests

    def update_generated(
        self, request_id: str, prompt_tokens: int, cost: int, generated: int
    ) -> None:
        """Record that a held request has generated `generated` tokens in all.

        Only the rest, up to `cost`, stays reserved for tokens to come. `prompt_tokens` and `cost`
        are as for `reserve`. A request that is not held is ignored.
        """
        if held := self._requests.get(request_id):
            held.tokens = prompt_tokens + generated
            held.tokens_left = max(0, cost - held.tokens)

    def release(self, request_id: str) -> None:
        """Stop holding a request, which frees what it took. Idempotent; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    @property
    def held(self) -> int:
        """Number of requests that are held."""
        return len(self._requests)

    @property
    def free_sequences(self) -> int:
        """Number of further sequences that the engine would run at once now, never below zero."""
        return max(0, min(self.concurrency_limit, self.max_sequences) - self.held)

    @property
    def free_tokens(self) -> int:
        """Number of KV tokens that held requests cannot come to occupy, never below zero."""
        return max(0, self.kv_tokens - _peak_tokens(self._requests.values()))

    def free_capacity(self, priority: Priority) -> tuple[int, int]:
        """Return the sequences and KV tokens that are free for a request of this priority.

        Negative sequences: so many held requests wait for others to end. The tokens are never
        negative.
        """
        held = list(self._requests.values())
        if self.preempts:
            held = [each for each in held if not priority.is_above(each.priority)]
        sequences = min(self.concurrency_limit, self.max_sequences) - len(held)
        return sequences, max(0, self.kv_tokens - _peak_tokens(held))

    def pull_batch_size(self, priority: Priority) -> int:
        """Return how many requests of this priority to ask the broker for; 0 without credit.

        The number is an eighth of the free sequences, at least one, since another worker may be
        free sooner. Unless held requests would be preempted for them, it is also no more than fit
        in the free tokens at the mean cost of recent requests: whatever was asked for comes, even
        if the credit has gone meanwhile, and is not given back.
        """
        sequences, tokens = self.free_capacity(priority)
        if sequences <= 0 or tokens <= 0:
            return 0
        few = max(1, sequences // 8)
        if not self._mean_cost or self._can_preempt_for(priority):
            return few
        return min(few, max(1, int(tokens / self._mean_cost)))

    def _can_preempt_for(self, priority: Priority) -> bool:
        """Whether a held request would be preempted for one of this priority."""
        held = self._requests.values()
        return self.preempts and any(priority.is_above(each.priority) for each in held)


def _peak_tokens(requests: Iterable[_HeldRequest]) -> int:
    """Return the most tokens that requests occupy at once, if all generate in step to their limits.

    When a request ends, those with more left go on, and each has grown by as much as it generated.
    """
    tokens = peak = 0
    ordered = sorted(requests, key=lambda held: held.tokens_left, reverse=True)
    for count, held in enumerate(ordered, 1):
        tokens += held.tokens
        peak = max(peak, tokens + count * held.tokens_left)
    return peak


class TokenRate:
    """Tokens per second, as an exponentially weighted average over about five seconds.

    The owner adds each generated token to `total_tokens`. `now` is in seconds of any one clock.
    """

    def __init__(self, now: float) -> None:
        self.total_tokens, self.per_second = 0, 0.0
        self._counted, self._at = 0, now

    def sample(self, now: float) -> float:
        """Bring the average up to date with the tokens added since the last call, and return it."""
        elapsed = now - self._at
        if elapsed > 0:
            weight = min(1.0, elapsed / _RATE_SECONDS)
            recent = (self.total_tokens - self._counted) / elapsed
            self.per_second += weight * (recent - self.per_second)
            self._counted, self._at = self.total_tokens, now
        return self.per_second
