"""What the engine did, and where its time went."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

Stage = Literal["schedule", "build", "forward", "sample", "report"]


@dataclass
class Stats:
    """Counters since the start, and gauges of the last step."""

    steps: int = 0
    prefilled: int = 0  # prompt tokens computed, again after a preemption
    generated: int = 0
    sequences: int = 0  # in the last step
    preemptions: int = 0
    hit_tokens: int = 0  # prompt tokens that the prefix cache spared
    query_tokens: int = 0
    adapter_loads: int = 0
    kv_used: int = 0  # tokens, of layers of all windows together
    kv_cached: int = 0  # of past prompts; given up where the room is needed
    kv_free: int = 0
    seconds: dict[Stage, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - started
