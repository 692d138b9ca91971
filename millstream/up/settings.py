"""Settings of `millstream up`."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from millstream.up.fleet_table import FleetTable
from registry.destination_policy import DestinationSettings
from registry.models import GenerationConfig
from registry.price_records import HourPrice
from registry.webhook_policy import WebhookSettings
from streams.base_settings import DATA_DIR, Port, Slug, TenantSettings, TlsSettings

CLOSING_SECONDS = 4.95  # for all services to close their connections, one after the other


class UpSettings(DestinationSettings, WebhookSettings, TlsSettings):
    """Settings of `millstream up`: all services on one machine."""

    model: tuple[str, ...] = Field(
        ("gemma-3-270m",),
        description="gemma-3-270m, mock, all-minilm-l6-v2, or a Hugging Face directory "
        "(named after the folder); repeatable",
    )
    shards: int = Field(1, ge=1, le=256, description="token log streams; the same for every start")
    workers: int = Field(1, ge=1, description="worker processes, each serving every model")
    worker_type: Slug | None = Field(
        None, description="name of this machine's kind, for the ledger"
    )
    worker_price_per_hour: HourPrice | None = Field(
        None, description="what each worker costs an hour, in USD, by which costs are divided"
    )
    gateways: int = Field(1, ge=1, le=64, description="gateway processes, all on one port")
    host: str = Field("127.0.0.1", description="address of the gateways")
    port: Port = Field(8080, description="port of the gateways, for HTTP and WebSocket")
    nats_port: Port = Field(4222, description="port of the embedded nats-server; 0: any free one")
    admin_port: Port = Field(
        0, description="port of the admin API, on this machine alone; 0: any free one"
    )
    data_dir: Path = Field(
        DATA_DIR, description="directory of stored requests, logs and the API key"
    )
    api_key: SecretStr | None = Field(
        None,
        description="API key of the tenant `default`, kept in the data directory for clients and "
        "later starts; by default the one kept there, made at the first start",
    )
    threads: int = Field(
        0, ge=0, description="CPU threads of each worker's engine; 0: the cores, divided"
    )
    metrics_host: str = Field("127.0.0.1", description="address of the metrics ports")
    metrics_port: Port = Field(
        0,
        description="port for the dispatcher's metrics, the next ones for the workers', then the "
        "first gateway's, the admin service's, the jobs and the fleet service's, and those of "
        "further gateways; 0: off",
    )
    public_metrics: bool = Field(
        False, description="serve the gateway's /metrics, with tenants' names, on its own port too"
    )
    mock_ttft_ms: float = Field(20, ge=0, description="the mock model's time to first token")
    mock_itl_ms: float = Field(5, ge=0, description="the mock model's time between tokens")
    mock_sequences: int = Field(256, ge=1, description="sequences the mock model runs at once")
    generation_config: GenerationConfig = Field(
        "auto",
        description="what a request does not say of sampling: as generation_config.json has it "
        "(auto), or as OpenAI's API (none)",
    )
    drain_seconds: float = Field(
        5, ge=0, description="time to finish what runs after the first SIGTERM or SIGINT"
    )
    tenants: dict[Slug, TenantSettings] = Field(
        {}, description="tenants that may send requests, with their keys and quotas"
    )

    fleet: FleetTable | None = Field(
        None,
        description="kinds of machines, in tables [fleet.types.<name>]: starts the fleet service, "
        "and workers as the fleet's plan wants them",
    )
    ledger_dir: Path | None = Field(
        None,
        description="directory into which the ledger is exported, and then removed from NATS; "
        "unless given, records expire after 30 days",
    )

    @model_validator(mode="after")
    def _check_client_auth(self) -> Self:
        if self.tls_client_auth == "required":
            raise ValueError(
                "--tls-client-auth required is for `millstream gateway`: `up` asks its gateway for "
                "its health without a certificate"
            )
        return self

    @model_validator(mode="after")
    def _has_workers_or_a_fleet(self) -> Self:
        given = self.model_fields_set & {"workers", "worker_type", "worker_price_per_hour"}
        if given and self.fleet:
            flag = "--" + min(given).replace("_", "-")
            raise ValueError(
                f"{flag} is given beside a table [fleet], by which workers are started as they are "
                "wanted: leave one of them out"
            )
        return self

    @property
    def shutdown_timeout_seconds(self) -> float:
        """Seconds that the process may still run after the first SIGTERM or SIGINT.

        They are `drain_seconds`, in which the services finish their requests, plus 4.95 s in which
        they close their connections. A process that runs longer ends with an error.
        """
        return self.drain_seconds + CLOSING_SECONDS
