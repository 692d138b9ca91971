"""Counters of an engine: tokens, KV use, and the seconds spent in each part of a step. Pure."""

from dataclasses import dataclass, field
from typing import Literal

StepPart = Literal["schedule", "build", "forward", "sample", "report"]


@dataclass
class EngineStats:
    """Counters of one engine since its start, gauges of its last step, and seconds by step part.

    Written by the engine's thread alone; may be read from any thread.
    """

    steps: int = 0
    prefilled: int = 0  # prompt tokens computed; those recomputed after a preemption count again
    generated: int = 0
    preemptions: int = 0
    hit_tokens: int = 0  # prompt tokens found in the prefix cache
    query_tokens: int = 0  # prompt tokens looked up there
    adapter_loads: int = 0
    kv_used: int = 0  # tokens, of layers of all windows together
    kv_cached: int = 0  # tokens of past prompts; evicted when their memory is needed
    kv_free: int = 0  # tokens
    seconds: dict[StepPart, float] = field(default_factory=dict)

    def add_seconds(self, part: StepPart, seconds: float) -> None:
        """Add seconds to the total of one part of the steps."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
