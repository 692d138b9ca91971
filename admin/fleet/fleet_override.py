"""Orders of operators to the fleet, as the audit log has them. Pure."""

from pydantic import BaseModel, ConfigDict


class FleetOverride(BaseModel):
    """A number of machines by hand; `expires_at` is epoch seconds."""

    model_config = ConfigDict(frozen=True)

    type: str
    model: str
    count: int
    expires_at: float


class FleetPause(BaseModel):
    """A pause of planning until `until` (epoch seconds), which is past at its end.

    There is one for the whole fleet, whose `name` is always the same.
    """

    model_config = ConfigDict(frozen=True)

    name: str = "pause"
    until: float
