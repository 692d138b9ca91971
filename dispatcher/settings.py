"""Settings of `millstream dispatcher`."""

from pydantic import Field

from streams.settings import Port, ServiceSettings


class DispatcherSettings(ServiceSettings):
    """Who is next: leadership and what it shows of itself."""

    lease_seconds: float = Field(
        2, gt=0, description="a leader silent for this long is replaced by a standby"
    )
    metrics_port: Port = Field(0, description="port for Prometheus metrics; 0: off")
