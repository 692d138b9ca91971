"""What a worker may still take, and how fast it is. Pure: time comes in as an argument."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.engines.engine import FreeCapacity
from streams.subjects import Priority

_RATE_SECONDS = 5.0  # the tokens/s of a beat are an average over about this long
_MEAN_REQUESTS = 20  # requests; what one takes as a rule is a mean over about so many


@dataclass(slots=True)
class _HeldRequest:
    """A request: the tokens that it occupies, and how many it may yet generate."""

    tokens: int
    tokens_left: int
    priority: Priority


class Credit:
    """Room for requests; reserved is the most that those which are held may come to occupy at once.

    It starts from the room of an idle engine; `capacity` is how many sequences it would run at once
    now, which is less while it is throttled. Where the engine takes the place of less urgent work
    for more urgent (`preempts`), what is held of lower priorities takes no room from a higher one.
    """

    def __init__(self, whole: FreeCapacity, preempts: bool = False) -> None:
        self.resize(whole, preempts)
        self._requests: dict[str, _HeldRequest] = {}
        self._recent_requests, self._mean_cost = 0, 0.0  # requests of late, and the tokens of each

    def resize(self, whole: FreeCapacity, preempts: bool = False) -> None:
        """Another engine: what it has room for while it is idle."""
        self.max_sequences, self.kv_tokens = whole.sequences, whole.tokens
        self.concurrency_limit, self.preempts = whole.sequences, preempts

    def reserve(self, request_id: str, prompt_tokens: int, cost: int, priority: Priority) -> None:
        self._requests[request_id] = _HeldRequest(prompt_tokens, cost - prompt_tokens, priority)
        self._recent_requests = min(_MEAN_REQUESTS, self._recent_requests + 1)
        self._mean_cost += (cost - self._mean_cost) / self._recent_requests

    def update_generated(
        self, request_id: str, prompt_tokens: int, cost: int, generated: int
    ) -> None:
        """It has generated so many tokens by now."""
        if held := self._requests.get(request_id):
            held.tokens = prompt_tokens + generated
            held.tokens_left = max(0, cost - held.tokens)

    def release(self, request_id: str) -> None:
        """Idempotent."""
        self._requests.pop(request_id, None)

    @property
    def held(self) -> int:
        return len(self._requests)

    @property
    def free_sequences(self) -> int:
        return max(0, min(self.concurrency_limit, self.max_sequences) - self.held)

    @property
    def free_tokens(self) -> int:
        return max(0, self.kv_tokens - _peak_tokens(self._requests.values()))

    def free_capacity(self, priority: Priority) -> tuple[int, int]:
        """Sequences, of which negative ones wait for a place, and tokens for one more request."""
        held = list(self._requests.values())
        if self.preempts:
            held = [each for each in held if not priority.is_above(each.priority)]
        sequences = min(self.concurrency_limit, self.max_sequences) - len(held)
        return sequences, max(0, self.kv_tokens - _peak_tokens(held))

    def pull_batch_size(self, priority: Priority) -> int:
        """How many messages to ask for at once: few, since another worker may be free for them.

        And no more than fit if they are as usual, where nothing gives way to them: what was asked
        for comes, even when its room has gone meanwhile, and is not given back.
        """
        sequences, tokens = self.free_capacity(priority)
        if sequences <= 0 or tokens <= 0:
            return 0
        few = max(1, sequences // 8)
        if not self._mean_cost or self._can_preempt_for(priority):
            return few
        return min(few, max(1, int(tokens / self._mean_cost)))

    def _can_preempt_for(self, priority: Priority) -> bool:
        """Whether some of what is held would give way."""
        held = self._requests.values()
        return self.preempts and any(priority.is_above(each.priority) for each in held)


def _peak_tokens(requests: Iterable[_HeldRequest]) -> int:
    """The most tokens that requests come to occupy, if all generate side by side to their limits.

    When one ends, those with more left still go on, and each has grown by what it had left.
    """
    tokens = peak = 0
    ordered = sorted(requests, key=lambda held: held.tokens_left, reverse=True)
    for count, held in enumerate(ordered, 1):
        tokens += held.tokens
        peak = max(peak, tokens + count * held.tokens_left)
    return peak


class TokenRate:
    """Tokens per second, as an exponentially weighted average."""

    def __init__(self, now: float) -> None:
        self.total_tokens, self.per_second = 0, 0.0
        self._counted, self._at = 0, now

    def sample(self, now: float) -> float:
        elapsed = now - self._at
        if elapsed > 0:
            share = min(1.0, elapsed / _RATE_SECONDS)
            fresh = (self.total_tokens - self._counted) / elapsed
            self.per_second += share * (fresh - self.per_second)
            self._counted, self._at = self.total_tokens, now
        return self.per_second
