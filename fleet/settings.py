"""Settings of `millstream fleet`."""

from pydantic import Field

from fleet.signals.signal_window import MAX_WINDOW_SECONDS, MIN_WINDOW_SECONDS
from streams.base_settings import ServiceSettings


class FleetSettings(ServiceSettings):
    """Settings of one fleet process."""

    user_class = "fleet"

    signal_window_seconds: int = Field(
        60,
        ge=MIN_WINDOW_SECONDS,
        le=MAX_WINDOW_SECONDS,
        description="time over which the fleet's signals count and average",
    )
