"""The table `[fleet]` of the configuration file of `millstream up`: which machines there may be."""

import json
from datetime import time
from typing import Literal, Self, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from registry.price_records import CURRENCY, HourPrice
from simulation.step_model import StepModel
from streams.base_settings import Slug
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy, WarmPool
from streams.subjects import Priority
from streams.usage_accounts import MICRO

_LONGEST_SECONDS = 86400.0
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class MachineTypeTable(_Table):
    """A table `[fleet.types.NAME]`: a kind of machine, and how its worker is made.

    On one computer a machine is a worker process, which begins `boot_seconds` after it was asked
    for.
    """

    memory: ByteSize | None = Field(None, gt=0, description="memory for models with their KV")
    boot_seconds: float = Field(
        0, ge=0, le=_LONGEST_SECONDS, description="time from the order to the worker's start"
    )
    price_per_hour: HourPrice = Field(description="what an hour costs, from order to end")
    currency: str = Field("USD", pattern=CURRENCY, description="a code of ISO 4217")
    stock: int | None = Field(None, ge=0, description="machines that there are; none: any number")
    quota: int | None = Field(None, ge=0, description="most machines at once; none: any number")
    spot: bool = Field(False, description="whether a machine may be taken back")
    notice_seconds: float = Field(
        30, ge=0, le=_LONGEST_SECONDS, description="notice before a spot machine is taken back"
    )
    reclaim_after_seconds: float | None = Field(
        None, gt=0, description="age at which a spot machine is taken back; none: never"
    )
    max_sequences: int | None = Field(None, ge=1, description="sequences in one running batch")
    kv_tokens: int | None = Field(None, ge=1, description="KV cache in tokens")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine")
    step_model: StepModel | None = Field(
        None, description="how fast a mock worker of the type is, and what fits in it"
    )

    @model_validator(mode="after")
    def _is_taken_back_if_spot(self) -> Self:
        given = self.model_fields_set & {"notice_seconds", "reclaim_after_seconds"}
        if given and not self.spot:
            raise ValueError(f"{min(given)} is for types with `spot = true`")
        return self

    @property
    def worker_settings(self) -> dict[str, object]:
        """Settings of a worker on such a machine beside its type and price, by key."""
        names = ("memory", "max_sequences", "kv_tokens", "threads")
        values = {name: getattr(self, name) for name in names}
        given: dict[str, object] = {k: int(v) for k, v in values.items() if v is not None}
        if self.step_model:
            given["step_model"] = json.dumps(vars(self.step_model))
        return given

    def to_record(self, name: str) -> MachineType:
        """Return the type as the provider offers it."""
        return MachineType(
            name,
            self.memory,
            self.boot_seconds,
            int(self.price_per_hour * MICRO),
            self.currency,
            self.stock,
            self.quota,
            self.spot,
            self.notice_seconds if self.spot else 0.0,
            self.reclaim_after_seconds,
        )


class WarmPoolTable(_Table):
    """A table `[[fleet.models.NAME.warm_pools]]`: workers that are there at certain hours, UTC."""

    workers: int = Field(ge=1, description="workers that there are at the least meanwhile")
    begins: time = Field(description="when they are there, UTC, as 08:00")
    ends: time = Field(description="until when, UTC; before `begins`: on the next day")
    weekdays: tuple[Weekday, ...] = Field(
        get_args(Weekday), min_length=1, description="days on which it begins: mon, tue, …"
    )

    @field_validator("begins", "ends", mode="before")
    @classmethod
    def _is_a_time(cls, value: object) -> object:
        """TOML has times of its own, and text is taken, too; a number would be seconds."""
        if isinstance(value, time | str):
            return value
        raise ValueError("write a time of day of UTC, as 08:00")

    @property
    def record(self) -> WarmPool:
        """The pool as the planner takes it."""
        days = get_args(Weekday)
        return WarmPool(
            _second_of_day(self.begins),
            _second_of_day(self.ends),
            self.workers,
            tuple(days.index(each) for each in self.weekdays),
        )


def _second_of_day(moment: time) -> int:
    return 3600 * moment.hour + 60 * moment.minute + moment.second


class ModelTable(_Table):
    """A table `[fleet.models.NAME]`: how many workers a model may have."""

    min_workers: int = Field(0, ge=0, description="workers that there always are")
    max_workers: int = Field(4, ge=0, description="workers that there are at most")
    idle_seconds: float | None = Field(
        None, ge=0, description="time without requests after which workers go; none: the fleet's"
    )
    off_spot: tuple[Priority, ...] = Field(
        (), description="priorities for whose demand there are machines that are not spot machines"
    )
    warm_pools: tuple[WarmPoolTable, ...] = Field(
        (), description="workers that there are at the least at certain hours"
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}, more than max_workers, {self.max_workers}"
            )
        return self


class FleetTable(_Table):
    """A table `[fleet]`: workers are started as the fleet's plan wants them, and not otherwise."""

    provider: Literal["process"] = Field(
        "process", description="who has the machines: process, a worker each on this computer"
    )
    idle_seconds: float = Field(
        300, ge=0, description="time without requests after which a model's workers go"
    )
    budget_per_hour: HourPrice | None = Field(
        None, description="most that all machines may cost in an hour; none: any amount"
    )
    models: dict[str, ModelTable] = Field({}, description="how many workers each model may have")
    types: dict[Slug, MachineTypeTable] = Field(
        min_length=1, description="kinds of machines, by name"
    )

    @model_validator(mode="after")
    def _has_one_currency(self) -> Self:
        currencies = {table.currency for table in self.types.values()}
        if self.budget_per_hour is not None and len(currencies) > 1:
            found = ", ".join(sorted(currencies))
            raise ValueError(f"budget_per_hour needs types of one currency; there are: {found}")
        return self

    @property
    def policies(self) -> dict[str, ModelPolicy]:
        """The policies of the models that have a table."""
        return {
            name: ModelPolicy(
                table.min_workers,
                table.max_workers,
                self.idle_seconds if table.idle_seconds is None else table.idle_seconds,
                tuple(each.record for each in table.warm_pools),
                tuple(map(str, table.off_spot)),
            )
            for name, table in self.models.items()
        }

    @property
    def policy(self) -> ModelPolicy:
        """The policy of any other model."""
        return ModelPolicy(idle_seconds=self.idle_seconds)

    @property
    def budget(self) -> int | None:
        """The budget of an hour as types' prices are; None: any amount."""
        return None if self.budget_per_hour is None else int(self.budget_per_hour * MICRO)

    @property
    def records(self) -> dict[str, MachineType]:
        """The types as the provider offers them, by name."""
        return {name: table.to_record(name) for name, table in self.types.items()}
