"""What a worker may still take, and how fast it is. Pure: time comes in as an argument."""

from gpu_worker.engine import Room

_RATE_SECONDS = 5.0  # the tokens/s of a beat are an average over about this long


class Credit:
    """Room for requests, reserved by the cost of what is held.

    It starts from the room of an idle engine; `capacity` is how many sequences it would run at once
    now, which is less while it is throttled.
    """

    def __init__(self, whole: Room) -> None:
        self.resize(whole)
        self._costs: dict[str, int] = {}
        self._reserved = 0

    def resize(self, whole: Room) -> None:
        """Another engine: what it has room for while it is idle."""
        self.max_sequences, self.kv_tokens = whole.sequences, whole.tokens
        self.capacity = whole.sequences

    def take(self, request_id: str, cost: int) -> None:
        self.free(request_id)
        self._costs[request_id] = cost
        self._reserved += cost

    def free(self, request_id: str) -> None:
        """Idempotent."""
        self._reserved -= self._costs.pop(request_id, 0)

    @property
    def held(self) -> int:
        return len(self._costs)

    @property
    def free_sequences(self) -> int:
        return max(0, min(self.capacity, self.max_sequences) - len(self._costs))

    @property
    def free_tokens(self) -> int:
        return max(0, self.kv_tokens - self._reserved)

    @property
    def pull_batch(self) -> int:
        """How many messages to ask for at once: few, since another worker may be free for them."""
        if not self.free_sequences or not self.free_tokens:
            return 0
        return max(1, self.free_sequences // 8)


class Rate:
    """Tokens per second, as an exponentially weighted average."""

    def __init__(self, now: float) -> None:
        self.total, self.per_second = 0, 0.0
        self._counted, self._at = 0, now

    def sample(self, now: float) -> float:
        elapsed = now - self._at
        if elapsed > 0:
            share = min(1.0, elapsed / _RATE_SECONDS)
            fresh = (self.total - self._counted) / elapsed
            self.per_second += share * (fresh - self.per_second)
            self._counted, self._at = self.total, now
        return self.per_second
