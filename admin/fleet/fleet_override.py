"""What operators order of the fleet, as the audit log has it. Pure."""

from pydantic import BaseModel, ConfigDict


class FleetOverride(BaseModel):
    """A number of machines by hand; `expires_at` is epoch seconds."""

    model_config = ConfigDict(frozen=True)

    type: str
    model: str
    count: int
    expires_at: float


class FleetPause(BaseModel):
    """That nothing is decided until `until` (epoch seconds), which is past at the end of a pause.

    There is one for the whole fleet, whose `name` is always the same.
    """

    model_config = ConfigDict(frozen=True)

    name: str = "pause"
    until: float
