"""A set of names that expire. Pure."""

from collections import OrderedDict

MAX_MEMBERS = 100_000


class TtlSet:
    """A set of names that expire `seconds` after they were last added.

    Expired names stay members until `expire` is called. Adding a name beyond `MAX_MEMBERS` drops
    the name that was added longest ago. Times are seconds of any one monotonic clock, given by the
    caller.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._added: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._added

    def add(self, name: str, now: float) -> None:
        """Add a name; for a member, start its time anew."""
        self._added.pop(name, None)
        self._added[name] = now
        if len(self._added) > MAX_MEMBERS:
            self._added.popitem(last=False)

    def expire(self, now: float) -> None:
        """Drop the names that were last added more than `seconds` before `now`."""
        while self._added and next(iter(self._added.values())) < now - self._seconds:
            self._added.popitem(last=False)
