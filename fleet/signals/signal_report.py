"""Signals at one time, as they are told. Pure.

None stands for what is not known: nobody has told it lately. 0 is always what somebody has told.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson


@dataclass(frozen=True)
class GoalCounts:
    """Counts of what arrived with a goal for the time to first token, by whether it was kept.

    `refused` are those that were refused for want of capacity. `left` had their clients leave
    before the goal was due; they say nothing.
    """

    attained: int = 0
    missed: int = 0
    refused: int = 0
    left: int = 0

    @property
    def attainment(self) -> float | None:
        """The share of all arrivals that kept their goal, refused ones included."""
        total = self.attained + self.missed + self.refused
        return self.attained / total if total else None


@dataclass(frozen=True)
class PrioritySignals:
    """Signals of one model and priority.

    Rates are by second. `requests_per_second` and the two rates of tokens are of what was accepted;
    `output_tokens_per_second` is what it is expected to generate. `refused_tokens_per_second` is
    what was refused for want of capacity, prompt and output, taken to be of the mean size of what
    was accepted. `queued` and `estimated_wait_seconds` are the dispatcher's. `ended` counts by
    outcome and `refused` by error code, with the tokens of what has ended, over the window.
    `attainment` is that of `goal`.
    `mean_queue_seconds` is how long what has ended in one attempt had waited for a worker.
    """

    priority: str
    requests_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    output_tokens_per_second: float | None = None
    refused_tokens_per_second: float | None = None
    queued: int | None = None
    estimated_wait_seconds: float | None = None
    mean_queue_seconds: float | None = None
    ended: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    goal: GoalCounts = GoalCounts()
    attainment: float | None = None

    @property
    def accepted_tokens_per_second(self) -> float | None:
        """Prompt tokens and expected output of what was accepted in a second."""
        if self.prompt_tokens_per_second is None or self.output_tokens_per_second is None:
            return None
        return self.prompt_tokens_per_second + self.output_tokens_per_second


@dataclass(frozen=True)
class PoolSignals:
    """Load of the workers of one model version and machine type, of those heard of lately.

    `workers` are those that take work, beside `draining` ones; the rest is of both. The fills are
    shares of what these workers have: of sequences, and of KV tokens that are held. `pace` is
    tokens a second for each worker that runs something; None if none does.
    """

    version: str
    type: str
    workers: int
    draining: int
    running: int
    waiting: int
    batch_fill: float | None
    kv_fill: float | None
    tokens_per_second: float
    pace: float | None


@dataclass(frozen=True)
class ModelSignals:
    """Signals of one model: by priority, and its pools of workers."""

    model: str
    priorities: list[PrioritySignals]
    pools: list[PoolSignals]


@dataclass(frozen=True)
class GatewaySignals:
    """Load of one gateway.

    `requests_per_second` is of what it has prepared to be queued, refused ones included, and
    `preparation_seconds` the mean time that this took.
    """

    gateway: str
    draining: bool
    connections: int
    requests_per_second: float | None
    preparation_seconds: float | None
    loop_lag_seconds: float


@dataclass(frozen=True)
class SignalReport:
    """All signals at the time `at` (epoch seconds), over the `window_seconds` before it."""

    at: float
    window_seconds: float
    models: list[ModelSignals]
    gateways: list[GatewaySignals]

    def pack(self) -> bytes:
        """Return the report as JSON: an object for each record, with its fields."""
        return orjson.dumps(self)
