"""Notices consumers that have something to deliver, are asked for it, and deliver nothing. Pure."""

from dataclasses import dataclass

STALL_LOOKS = 3  # in a row, at which nothing has moved: a pull that got lost is renewed sooner


@dataclass(slots=True)
class _Look:
    delivered: int
    times: int = 1


class Stalls:
    """Remembers, by consumer, since how many looks nothing was delivered."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}

    def is_stalled(self, consumer: str, delivered: int, *, due: bool) -> bool:
        """`delivered` counts its deliveries so far; `due` says that there should be more by now.

        After it has said yes it begins anew.
        """
        look = self._looks.get(consumer)
        if not due:
            self._looks.pop(consumer, None)
        elif look is None or look.delivered != delivered:
            self._looks[consumer] = _Look(delivered)
        elif look.times + 1 >= STALL_LOOKS:
            del self._looks[consumer]
            return True
        else:
            look.times += 1
        return False
