"""Settings of `millstream dispatcher`."""

from pydantic import Field

from streams.base_settings import ServiceSettings


class DispatcherSettings(ServiceSettings):
    """Settings of one dispatcher: its lease."""

    lease_seconds: float = Field(
        2, gt=0, description="a leader that is silent for so many seconds is replaced by a standby"
    )
