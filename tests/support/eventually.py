"""Waiting for a condition, never for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
PATIENCE_SECONDS = 60.0  # what must happen is waited for so long: a busy machine is slow, not wrong


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], seconds: float = PATIENCE_SECONDS
) -> T: ...
@overload
async def eventually(condition: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T: ...
async def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
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
