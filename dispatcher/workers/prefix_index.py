"""An index of the prefixes and adapters that workers hold, by hash, from heartbeats. Pure."""

from collections.abc import Iterable

from streams import prefix_hashes
from streams.messages import Heartbeat


class PrefixIndex:
    """The workers of one model version by the prompt prefixes and adapters that they hold.

    Prefixes that a worker has cached, and LoRA adapters that it has loaded, are known by their
    hashes.
    """

    def __init__(self) -> None:
        self._workers: dict[int, tuple[str, ...]] = {}  # by prefix hash
        self._hashes: dict[str, set[int]] = {}  # by worker

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        """Add the hashes that a worker reports to hold, and drop those that it no longer holds.

        A heartbeat with `holds_only` lists all that the worker holds, so that its other hashes are
        dropped. Raises `struct.error` if the hashes are malformed.
        """
        held = prefix_hashes.unpack(beat.holds)
        if beat.holds_only:
            self._drop(beat.worker, self._hashes.get(beat.worker, set()).difference(held))
        self._drop(beat.worker, prefix_hashes.unpack(beat.dropped))
        self.expect(beat.worker, held)

    def expect(self, worker: str, held: Iterable[int]) -> None:
        """Count these hashes as held by a worker before the worker reports them.

        Call it when the worker is sent a request with these prefixes, which it will have cached
        soon.
        """
        known = self._hashes.setdefault(worker, set())
        only_holder = (worker,)  # one tuple for all: most hashes have no other holder
        for prefix_hash in set(held) - known:
            known.add(prefix_hash)
            others = self._workers.get(prefix_hash)
            self._workers[prefix_hash] = (*others, worker) if others else only_holder

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all that it holds; an unknown worker is ignored."""
        self._drop(worker, self._hashes.get(worker, set()).copy())
        self._hashes.pop(worker, None)

    def workers_with(self, prefix_hash: int) -> tuple[str, ...]:
        """Return the workers that hold the prefix or adapter with this hash; empty if none does."""
        return self._workers.get(prefix_hash, ())

    def workers_with_each(self, hashes: Iterable[int]) -> Iterable[tuple[str, ...] | None]:
        """Return, for each of the hashes in order, the workers that hold it; None if none does."""
        return map(self._workers.get, hashes)

    def count_hashes(self, worker: str) -> int:
        """Return how many hashes a worker is known to hold; 0 for an unknown worker."""
        return len(self._hashes.get(worker, ()))

    def _drop(self, worker: str, gone: Iterable[int]) -> None:
        known = self._hashes.get(worker, set())
        for prefix_hash in known.intersection(gone):
            known.remove(prefix_hash)
            if others := tuple(each for each in self._workers[prefix_hash] if each != worker):
                self._workers[prefix_hash] = others
            else:
                del self._workers[prefix_hash]
