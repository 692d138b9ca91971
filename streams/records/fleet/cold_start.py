"""The cold start of a model: the time from no worker to its first. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ColdStart:
    """The way from no worker to the first: a machine of `type` boots, then loads the model.

    `load_seconds` is from the start of the worker to its engine's warm-up, as it was measured last;
    None before it has been.
    """

    type: str
    boot_seconds: float
    load_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """All of it; of what was never measured at least what is known."""
        return self.boot_seconds + (self.load_seconds or 0.0)
