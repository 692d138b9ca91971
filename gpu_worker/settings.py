"""Settings of `millstream worker`."""

import json
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ByteSize, Field, field_validator, model_validator

from gpu_worker.reclaim.notice_sources import METADATA_URL, Provider
from registry.destination_policy import DestinationPolicy, DestinationSettings
from registry.price_records import CURRENCY, HourPrice
from simulation.step_model import StepModel
from streams.base_settings import ServiceSettings, Slug
from streams.subjects import ANY
from streams.usage_accounts import MICRO, WorkerPrice


def _parse_step_model(value: object) -> object:
    """Return what a text says in JSON; raises ValueError if it is none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None


StepModelText = Annotated[StepModel, BeforeValidator(_parse_step_model)]


class WorkerSettings(DestinationSettings, ServiceSettings):
    """Settings of one worker process: models, limits of batch and memory, times, what it obeys."""

    user_class = "worker"

    model: tuple[str, ...] = Field(
        (),
        description="registered model to serve, NAME or NAME@VERSION; repeatable; without one, "
        "those that `millstream models serve` says for its --type or --id",
    )
    max_sequences: int = Field(64, ge=1, description="sequences in one running batch")
    max_batch_tokens: int = Field(512, ge=1, description="tokens in one forward pass")
    kv_tokens: int = Field(0, ge=0, description="KV cache in tokens; 0: from the free memory")
    adapter_bytes: int = Field(
        0,
        ge=0,
        description="memory for LoRA adapters; 0: a tenth of what weights and a step leave, at "
        "most 1 GiB; 1 GiB where --kv-tokens is given",
    )
    memory: ByteSize | None = Field(
        None,
        description="memory for all models with their KV, as 8GiB; models that do not fit together "
        "take turns; what is free if not given",
    )
    min_residency_seconds: float = Field(
        10, ge=0, description="a loaded model stays this long before another may take its place"
    )
    engine_timeout_seconds: float = Field(
        60, gt=0, description="a step that takes this long hangs: the worker gives up and exits"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="devices that share each layer of the one model of this worker"
    )
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0: all cores")
    beat_seconds: float = Field(1, gt=0, description="time between heartbeats and in-progress acks")
    ack_wait_seconds: float = Field(
        3, gt=0, description="work whose worker is silent for this long goes to another"
    )

    reclaim_notices: Provider | None = Field(
        None,
        description="whose metadata service tells that this machine is taken back, so that the "
        "worker drains in time: aws, gcp or azure",
    )
    metadata_url: str = Field(
        METADATA_URL, description="where that service is; another one is for tests, on loopback"
    )

    step_model: StepModelText | None = Field(
        None,
        description="for the mock model, how long steps take and what fits, as JSON, such as "
        '{"step_ms": 10, "token_ms": 0.1}; its own pace if not given',
    )
    type: Slug | None = Field(
        None, description="name of this kind of machine, for the ledger and the fleet's signals"
    )
    price_per_hour: HourPrice | None = Field(
        None, description="what this worker costs an hour, by which costs are divided"
    )
    price_currency: str = Field(
        "USD", pattern=CURRENCY, description="currency of --price-per-hour, a code of ISO 4217"
    )

    @field_validator("id")
    @classmethod
    def _is_one_worker(cls, name: str) -> str:
        if name == ANY:
            raise ValueError(f"{ANY!r} stands for any worker: choose another name")
        return name

    @field_validator("metadata_url")
    @classmethod
    def _is_metadata_service(cls, url: str) -> str:
        address = urlsplit(url)
        is_local = address.scheme == "http" and address.hostname in ("127.0.0.1", "::1")
        if url != METADATA_URL and not is_local:
            raise ValueError(
                f"{url!r} is neither {METADATA_URL} nor on loopback: whoever answers there ends "
                "this worker"
            )
        return url

    @model_validator(mode="after")
    def _can_be_given_models(self) -> Self:
        if not self.model and self.type is None and "id" not in self.model_fields_set:
            raise ValueError(
                "model is missing: name one, or say by type or id which models it is given"
            )
        return self

    @model_validator(mode="after")
    def _one_model_if_parallel(self) -> Self:
        if self.tensor_parallel_size > 1 and len(self.model) > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}: such a worker serves one "
                f"model, not {len(self.model)}"
            )
        return self

    @property
    def price(self) -> str:
        """The packed `WorkerPrice`; empty if none was given."""
        if self.price_per_hour is None:
            return ""
        return WorkerPrice(self.price_currency, int(self.price_per_hour * MICRO)).pack()

    @property
    def destinations(self) -> DestinationPolicy:
        """The policy on what registry records may decide here; resolves directories of models."""
        return DestinationPolicy(
            frozenset(self.upstream_host),
            frozenset(self.upstream_key_variable),
            tuple(root.expanduser().resolve() for root in self.model_root),
        )
