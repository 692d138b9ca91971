"""An operator's override: a number of machines of one type for one model, with an end. Pure."""

from pydantic import BaseModel, ConfigDict


class FleetOverride(BaseModel):
    """A number of machines by hand; `expires_at` is epoch seconds."""

    model_config = ConfigDict(frozen=True)

    type: str
    model: str
    count: int
    expires_at: float
