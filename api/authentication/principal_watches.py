"""Tells open connections and running streams when their principal ends."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from api.authentication.authenticator import Principal
from registry.tenant_records import Scope
from streams.errors import MillstreamError

Cut = Callable[[MillstreamError], None]
_MAX_SLEEP = 3600.0  # an expiry far ahead is looked at again by then


class PrincipalWatches:
    """The open connections and running streams of one process, each with its principal.

    `check_all` is to be called after each change of tenants, keys or denials.
    """

    def __init__(self) -> None:
        self._watches = set["_Watch"]()

    def check_all(self) -> None:
        """Check every principal that is watched, and cut off those that have ended."""
        for watch in [*self._watches]:
            watch.check()

    @contextmanager
    def watching(
        self, principal: Principal, needed: Scope, now: Callable[[], float], cut: Cut
    ) -> Iterator[None]:
        """Call `cut` once with the reason if the principal ends while the block runs.

        That is when `principal.check(needed)` raises: it is asked at once, after each change and
        when the credential expires. `now` returns epoch seconds.
        """
        watch = _Watch(principal, needed, now, cut)
        self._watches.add(watch)
        try:
            watch.check()
            yield
        finally:
            self._watches.discard(watch)
            watch.stop()


class _Watch:
    def __init__(
        self, principal: Principal, needed: Scope, now: Callable[[], float], cut: Cut
    ) -> None:
        self._principal, self._needed, self._now, self._cut = principal, needed, now, cut
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def check(self) -> None:
        """Cut off a principal that has ended, else be called again when it expires."""
        self._cancel_timer()
        if self._is_over:
            return
        try:
            self._principal.check(self._needed)
        except MillstreamError as error:
            self._is_over = True
            self._cut(error)
        else:
            self._set_timer()

    def stop(self) -> None:
        """Do nothing from now on."""
        self._is_over = True
        self._cancel_timer()

    def _set_timer(self) -> None:
        if self._principal.expires_at == math.inf:
            return
        seconds = max(0.0, self._principal.expires_at - self._now())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(seconds, _MAX_SLEEP), self.check)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
