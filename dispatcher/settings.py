"""Settings of `millstream dispatcher`."""

from pydantic import Field

from streams.settings import Port, ServiceSettings


class DispatcherSettings(ServiceSettings):
    """Settings of one dispatcher process, beside those that all services have."""

    lease_seconds: float = Field(
        2, gt=0, description="a leader that is silent for so many seconds is replaced by a standby"
    )
    metrics_port: Port = Field(0, description="port for Prometheus metrics; 0: off")
