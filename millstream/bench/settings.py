"""Settings of `millstream bench`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from millstream.admin.settings import AdminClientSettings
from streams.base_settings import GatewayClientSettings, Slug
from streams.subjects import Priority

DEFAULT_SECONDS = 30.0
_LOADS = {"trace", "concurrency", "rate", "speed", "duration", "requests", "plot", "pids"}


class BenchSettings(GatewayClientSettings, AdminClientSettings):
    """Settings of `millstream bench`: the gateway, the load, and what to report.

    `rate` or `trace` make an open loop, which sends each request at its time; `concurrency` makes a
    closed loop, which sends a request when an earlier one has ended.
    """

    client_cert: Path | None = Field(
        None, description="PEM file with a client certificate and its private key to show"
    )
    model: tuple[str, ...] = Field(
        (), description="model to ask, by default the first that generates; several take turns"
    )
    protocol: Literal["ws", "sse"] = Field("ws", description="WebSocket, or HTTP with SSE")
    codec: Literal["json", "msgpack"] = Field("json", description="WebSocket frames")
    trace: Path | None = Field(
        None,
        description="CSV of t_s,prompt_tokens,output_tokens to replay; with concurrency: its sizes",
    )
    concurrency: int | None = Field(
        None, ge=1, description="closed loop: requests at once; 1 unless a rate or a trace is given"
    )
    rate: float | None = Field(
        None, gt=0, description="open loop: requests a second, Poisson or the trace's mean"
    )
    speed: float | None = Field(
        None, gt=0, description="open loop: replay the trace so many times as fast"
    )
    duration: float | None = Field(
        None,
        gt=0,
        description=f"seconds of load; {DEFAULT_SECONDS:g} unless a number of requests is given",
    )
    requests: int | None = Field(None, ge=1, description="requests to send at most")
    prompt_tokens: int = Field(64, ge=1, description="prompt length without a trace")
    output_tokens: int = Field(64, ge=1, description="output length without a trace")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="cut longer prompts; the context length cuts them anyway"
    )
    max_output_tokens: int | None = Field(None, ge=1, description="cut longer outputs")
    curve: bool = Field(
        False,
        description="measure the running workers of one machine type over sizes of the batch and "
        "lengths, and store their curve; the load follows from these",
    )
    type: Slug | None = Field(
        None, description="with --curve: machine type; by default that of the workers"
    )
    priority: Priority = Field(Priority.STANDARD, description="interactive, standard or batch")
    sockets: int = Field(4, ge=1, description="WebSockets to spread the requests over")
    warmup: int = Field(2, ge=0, description="requests sent before the load and not counted")
    drain: float = Field(
        30, ge=0, description="seconds to wait for what still runs when the load ends"
    )
    seed: int = Field(0, description="random seed of arrivals and prompts")
    pids: tuple[str, ...] = Field(
        (),
        description="report CPU per token of this PID or NAME=PID; repeatable, or with commas",
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of tables")
    plot: Path | None = Field(None, description="PNG to draw the latencies into")

    @field_validator("rate", "speed")
    @classmethod
    def _check_open_loop(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value and info.data.get("concurrency"):
            raise ValueError("is for an open loop, and concurrency for a closed one: give one")
        return value

    @field_validator("speed")
    @classmethod
    def _check_speed(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value and (info.data.get("rate") or not info.data.get("trace")):
            raise ValueError("needs a trace to replay, and no rate beside it")
        return value

    @model_validator(mode="after")
    def _check_curve(self) -> Self:
        loads = self.model_fields_set & _LOADS
        if self.curve and loads:
            raise ValueError(f"curve makes loads of its own: {min(loads)} is for another bench")
        if self.type and not self.curve:
            raise ValueError("type is for a bench with curve")
        return self

    @property
    def is_open(self) -> bool:
        """True for an open loop, which sends each request at a set time, whatever else runs.

        False for a closed loop, which sends a request when an earlier one has ended.
        """
        return not self.concurrency and bool(self.rate or self.trace)

    @property
    def open_seconds(self) -> float | None:
        """Seconds after which an open loop sends no more requests.

        None for a closed loop, and for an open one that only the number of requests ends.
        """
        return self.seconds if self.is_open else None

    @property
    def seconds(self) -> float | None:
        """Seconds after which the load sends no more: `duration`, or 30 if nothing limits it.

        None if `requests` is given and `duration` is not, so that only the number ends the load.
        """
        return self.duration if self.duration or self.requests else DEFAULT_SECONDS
