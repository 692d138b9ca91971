"""Waiting for a condition, never for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(condition: Callable[[], Awaitable[T | None]], seconds: float = 10.0) -> T: ...
@overload
async def eventually(condition: Callable[[], T | None], seconds: float = 10.0) -> T: ...
async def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first truthy value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {condition}")
