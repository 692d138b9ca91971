"""Counters of an engine: tokens, KV use, and the seconds spent in each part of a step. Pure."""

from dataclasses import dataclass, field
from typing import Literal

StepPart = Literal["schedule", "build", "forward", "sample", "report"]


@dataclass
class EngineStats:
    """Counters since the start, and gauges of the last step."""

    steps: int = 0
    prefilled: int = 0  # prompt tokens computed, again after a preemption
    generated: int = 0
    preemptions: int = 0
    hit_tokens: int = 0  # prompt tokens that the prefix cache spared
    query_tokens: int = 0
    adapter_loads: int = 0
    kv_used: int = 0  # tokens, of layers of all windows together
    kv_cached: int = 0  # of past prompts; given up where the room is needed
    kv_free: int = 0
    seconds: dict[StepPart, float] = field(default_factory=dict)

    def add_seconds(self, part: StepPart, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
