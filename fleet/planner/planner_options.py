"""Constants of a planner: its patience, and how full it lets machines be. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerOptions:
    """Constants of a planner, in seconds unless named otherwise.

    `utilisation` is the share of their capacity up to which machines are meant to be used. Need is
    a mean of demand over `level_seconds`, or what would have kept `kept_share` of the demand of
    `memory_seconds` within `goal_seconds`, in which what waits is to be served. Capacity goes after
    `hold_seconds` without need of it. A machine that has not joined `join_seconds` after it should
    have (and `lost_seconds` more, if nobody is heard), that was silent for `lost_seconds` while
    others were heard, or that was not to be had for `refused_seconds`, is given up, and its type is
    left alone for `retry_seconds`, twice as long each time again, at most `max_retry_seconds`. A
    machine is slow that did less than `slow_share` of what the median of its like does, for
    `slow_seconds`. The first load of a model on a type may take `first_load_seconds`.
    """

    utilisation: float = 0.95
    level_seconds: float = 60.0
    memory_seconds: float = 600.0
    kept_share: float = 0.995
    goal_seconds: float = 10.0
    hold_seconds: float = 60.0
    join_seconds: float = 60.0
    first_load_seconds: float = 900.0
    lost_seconds: float = 300.0
    refused_seconds: float = 5.0
    retry_seconds: float = 60.0
    max_retry_seconds: float = 3600.0
    slow_share: float = 0.5
    slow_seconds: float = 60.0
