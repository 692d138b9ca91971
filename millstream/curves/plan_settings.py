"""Settings of `millstream plan`: a rate, lengths of requests, and goals."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from millstream.admin.settings import AdminClientSettings
from streams.base_settings import FLAG_ONLY, Slug
from streams.records.fleet.step_times import CapacityGoals

_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(s|min|h))?")
_SECONDS = {None: 1, "s": 1, "min": 60, "h": 3600}
_GOALS = ("ttft", "itl")


def _parse_rate(value: object) -> object:
    """Return requests a second; raises ValueError for a text that is no rate."""
    if not isinstance(value, str):
        return value
    if not (found := _RATE.fullmatch(value)):
        raise ValueError("a rate is a number of requests, as 10000/min, 5/s or 3600/h")
    return float(found[1]) / _SECONDS[found[2]]


def _parse_goal(value: object) -> object:
    """Return name and seconds of a goal; raises ValueError for a text that is none."""
    if not isinstance(value, str):
        return value
    name, _, seconds = value.partition("=")
    try:
        number = float(seconds)
    except ValueError:
        number = 0.0
    if name not in _GOALS or not 0 < number < float("inf"):
        raise ValueError("a goal is ttft=SECONDS, to the first token, or itl=SECONDS, to each next")
    return name, number


Rate = Annotated[float, BeforeValidator(_parse_rate)]
Goal = Annotated[tuple[str, float], BeforeValidator(_parse_goal)]


class PlanSettings(AdminClientSettings):
    """Settings of `millstream plan`."""

    rate: Rate = Field(
        gt=0,
        le=10**6,
        description="requests, as 10000/min, 5/s or 3600/h",
        json_schema_extra=FLAG_ONLY,
    )
    prompt: float = Field(
        gt=0, le=10**7, description="mean tokens of a prompt", json_schema_extra=FLAG_ONLY
    )
    output: float = Field(
        ge=1, le=10**7, description="mean tokens of an output", json_schema_extra=FLAG_ONLY
    )
    model: str = Field(description="model, NAME or NAME@VERSION", json_schema_extra=FLAG_ONLY)
    goal: tuple[Goal, ...] = Field(
        (),
        description="ttft=SECONDS to the first token, or itl=SECONDS to each next; repeatable",
        json_schema_extra=FLAG_ONLY,
    )
    type: Slug | None = Field(
        None, description="machine type; all that have a curve", json_schema_extra=FLAG_ONLY
    )
    utilisation: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="share of the workers' places to be used on average",
        json_schema_extra=FLAG_ONLY,
    )
    as_json: bool = Field(False, alias="json", description="print JSON instead of words")

    @property
    def goals(self) -> CapacityGoals:
        """The goals, of two for the same the tighter one."""
        tightest: dict[str, float] = {}
        for name, seconds in self.goal:
            tightest[name] = min(seconds, tightest.get(name, seconds))
        return CapacityGoals(tightest.get("ttft"), tightest.get("itl"))
