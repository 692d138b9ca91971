"""One simulated request: what was asked for, and what became of it."""

from dataclasses import dataclass

from streams.subjects import Priority

DEADLINE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a client sends at `at`; times are seconds of the virtual clock.

    The client reserves `max_tokens`, and the model ends after `output_tokens`. `goal_seconds` is
    the time to first token that it hopes for. `blocks` name its prompt's prefix blocks, in order.
    One that `repeats` is asked again as soon as it has ended.
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
        """The most tokens that it may generate."""
        return self.max_tokens or self.output_tokens

    @property
    def cost(self) -> int:
        """Tokens that it reserves."""
        return self.prompt_tokens + self.reserve


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request's life; a time is None for what has not happened.

    `first` and `ended` are when its client saw them. `code` is empty while it lives and when it
    ended well. `generated` are the tokens that the model produced for it, `computed` those that
    went through the model for it, prompt included, once for each time that they did.
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
    work_priority: Priority | None = None  # of the work, if not the priority that was asked for

    @property
    def priority(self) -> Priority:
        """How urgent it is among the work."""
        return self.work_priority or self.spec.priority

    @property
    def deadline(self) -> float:
        return self.spec.at + self.spec.deadline_seconds

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def completed(self) -> bool:
        return self.ended is not None and not self.code

    @property
    def on_time(self) -> bool:
        """Completed, and within its goal if it has one."""
        goal = self.spec.goal_seconds
        return self.completed and (goal is None or (self.ttft is not None and self.ttft <= goal))

    @property
    def refused(self) -> bool:
        """Turned away at the door, or never accepted."""
        return self.ended is not None and self.accepted is None

    @property
    def ttft(self) -> float | None:
        """Seconds from the asking to the first token."""
        return None if self.first is None else self.first - self.spec.at
