"""Simulated requests: what a client asks for, and what became of it."""

from dataclasses import dataclass

from streams.subjects import Priority

DEADLINE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as a client sends it at `at`; times are seconds of the simulation's clock.

    The client reserves `max_tokens` of output, and the model stops after `output_tokens`.
    `goal_seconds` is the time to first token that the client hopes for; None: any. `blocks` are the
    numbers of its prompt's prefix blocks, in order. With `repeats`, the request is sent again as
    soon as it has ended.
    """

    at: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0  # 0: exactly what it will generate
    priority: Priority = Priority.STANDARD
    deadline_seconds: float = DEADLINE_SECONDS
    goal_seconds: float | None = None
    gateway: int = 0
    blocks: tuple[int, ...] = ()
    repeats: bool = False

    @property
    def reserve(self) -> int:
        """The most tokens that the request may generate: `max_tokens`, else `output_tokens`."""
        return self.max_tokens or self.output_tokens

    @property
    def cost(self) -> int:
        """The tokens that the request reserves: its prompt and the most that it may generate."""
        return self.prompt_tokens + self.reserve


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request with its state and times; a time is None until its event has happened.

    Times are seconds of the simulation's clock. `first` (the first token) and `ended` are when its
    client saw them. `code` is the error code, empty while the request lives and when it ended well.
    `generated` is the number of tokens that the model produced for it, `computed` the number that
    went through the model for it, prompt included; tokens that are computed again count again.
    """

    spec: RequestSpec
    request_id: str
    accepted: float | None = None
    started: float | None = None  # on a worker
    first: float | None = None
    ended: float | None = None
    code: str = ""
    generated: int = 0
    computed: int = 0
    hit_tokens: int = 0  # of its prompt, found in a prefix cache
    worker: str = ""
    estimated_wait: float | None = None
    work_priority: Priority | None = None  # priority of its work, if not the one asked for

    @property
    def priority(self) -> Priority:
        """The priority at which workers run the request; it may differ from the one asked for."""
        return self.work_priority or self.spec.priority

    @property
    def deadline(self) -> float:
        """The time by which the request must have ended, in seconds of the simulation's clock."""
        return self.spec.at + self.spec.deadline_seconds

    @property
    def is_over(self) -> bool:
        """True once the request has ended, with or without an error."""
        return self.ended is not None

    @property
    def completed(self) -> bool:
        """True once the request has ended without an error."""
        return self.ended is not None and not self.code

    @property
    def on_time(self) -> bool:
        """True if the request ended without an error and met its first-token goal, if any."""
        goal = self.spec.goal_seconds
        return self.completed and (goal is None or (self.ttft is not None and self.ttft <= goal))

    @property
    def refused(self) -> bool:
        """True if the request has ended and no gateway had accepted it."""
        return self.ended is not None and self.accepted is None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending the request to its first token; None while there is no token."""
        return None if self.first is None else self.first - self.spec.at
