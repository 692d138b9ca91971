"""An index of the prefixes and adapters that workers hold, by hash, from heartbeats. Pure."""

from collections.abc import Iterable

from streams import prefix_hashes
from streams.messages import Heartbeat


class PrefixIndex:
    """The workers of one model version by the prefix and adapter hashes that they hold."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[str, ...]] = {}  # by prefix hash
        self._hashes: dict[str, set[int]] = {}  # by worker

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        """Add the hashes that a worker reports to hold, and drop those that it dropped.

        A heartbeat with `holds_only` lists all that the worker holds: everything else is dropped.
        """
        held = prefix_hashes.unpack(beat.holds)
        if beat.holds_only:
            self._drop(beat.worker, self._hashes.get(beat.worker, set()).difference(held))
        self._drop(beat.worker, prefix_hashes.unpack(beat.dropped))
        self.expect(beat.worker, held)

    def expect(self, worker: str, held: Iterable[int]) -> None:
        """Note that a worker will hold these hashes, since it was sent a request that has them."""
        known = self._hashes.setdefault(worker, set())
        only_holder = (worker,)  # one tuple for all: most hashes have no other holder
        for prefix_hash in set(held) - known:
            known.add(prefix_hash)
            others = self._workers.get(prefix_hash)
            self._workers[prefix_hash] = (*others, worker) if others else only_holder

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all that it holds."""
        self._drop(worker, self._hashes.get(worker, set()).copy())
        self._hashes.pop(worker, None)

    def workers_with(self, prefix_hash: int) -> tuple[str, ...]:
        """The workers that hold what has this hash."""
        return self._workers.get(prefix_hash, ())

    def workers_with_each(self, hashes: Iterable[int]) -> Iterable[tuple[str, ...] | None]:
        """The workers that hold each of several hashes; None for one that nobody holds."""
        return map(self._workers.get, hashes)

    def count_hashes(self, worker: str) -> int:
        """The number of hashes that a worker is known to hold."""
        return len(self._hashes.get(worker, ()))

    def _drop(self, worker: str, gone: Iterable[int]) -> None:
        known = self._hashes.get(worker, set())
        for prefix_hash in known.intersection(gone):
            known.remove(prefix_hash)
            if others := tuple(each for each in self._workers[prefix_hash] if each != worker):
                self._workers[prefix_hash] = others
            else:
                del self._workers[prefix_hash]
