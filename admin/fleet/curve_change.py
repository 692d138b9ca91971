"""A curve as the audit log has it: where it comes from, and its times. Pure."""

from pydantic import BaseModel, ConfigDict

from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import StepTimes


class CurveChange(BaseModel):
    """A curve without its points; `measured_at` is epoch seconds."""

    model_config = ConfigDict(frozen=True)

    name: str
    source: CurveSource
    measured_at: float
    times: StepTimes

    @classmethod
    def of(cls, curve: Curve) -> "CurveChange":
        """Return what the audit log has of a curve."""
        return cls(
            name=curve.name,
            source=curve.source,
            measured_at=curve.measured_at,
            times=curve.times,
        )
