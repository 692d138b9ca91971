"""Who holds what: marks of prompt prefixes and adapters by worker, learned from beats. Pure."""

from collections.abc import Iterable

from streams import prefix_hashes
from streams.messages import Heartbeat


class PrefixIndex:
    """An index of what the workers of one model announce that they hold."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[str, ...]] = {}  # by mark
        self._hashes: dict[str, set[int]] = {}  # by worker

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        """Take in what a worker has come to hold and holds no more."""
        held = prefix_hashes.unpack(beat.holds)
        if beat.holds_only:
            self._drop(beat.worker, self._hashes.get(beat.worker, set()).difference(held))
        self._drop(beat.worker, prefix_hashes.unpack(beat.dropped))
        self.expect(beat.worker, held)

    def expect(self, worker: str, held: Iterable[int]) -> None:
        """A worker will come to hold these: it was sent what they mark."""
        known = self._hashes.setdefault(worker, set())
        alone = (worker,)  # one for all marks: most have no other holder
        for mark in set(held) - known:
            known.add(mark)
            others = self._workers.get(mark)
            self._workers[mark] = (*others, worker) if others else alone

    def remove_worker(self, worker: str) -> None:
        """It is gone."""
        self._drop(worker, self._hashes.get(worker, set()).copy())
        self._hashes.pop(worker, None)

    def workers_with(self, mark: int) -> tuple[str, ...]:
        """The workers that hold what is marked so."""
        return self._workers.get(mark, ())

    def workers_with_each(self, marks: Iterable[int]) -> Iterable[tuple[str, ...] | None]:
        """The same for several; None where nobody does."""
        return map(self._workers.get, marks)

    def count_hashes(self, worker: str) -> int:
        """How many marks a worker is known to hold."""
        return len(self._hashes.get(worker, ()))

    def _drop(self, worker: str, gone: Iterable[int]) -> None:
        known = self._hashes.get(worker, set())
        for mark in known.intersection(gone):
            known.remove(mark)
            if others := tuple(each for each in self._workers[mark] if each != worker):
                self._workers[mark] = others
            else:
                del self._workers[mark]
