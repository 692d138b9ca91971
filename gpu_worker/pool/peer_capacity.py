"""Tracks from heartbeats which peers could take over a request. Pure."""

from dataclasses import dataclass

from gpu_worker.identity import WorkerIdentity
from streams.messages import Heartbeat

STALE_SECONDS = 3.0  # three missed heartbeats, as for the dispatcher


@dataclass(slots=True)
class _Peer:
    sequences: int
    tokens: int
    heard_at: float


class PeerCapacity:
    """The free capacity of the other workers that serve this worker's model version.

    `now` is in seconds of any one monotonic clock.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._peers: dict[str, _Peer] = {}

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Record a peer's free capacity; one that drains or has not loaded the model has none.

        Replaces what was known and reserved of that peer. Heartbeats of this worker itself and of
        other versions are ignored.
        """
        if beat.worker == self._identity.worker or beat.version != self._identity.version:
            return
        self._peers.pop(beat.worker, None)
        if beat.resident and not beat.draining:
            free = beat.free_sequences - beat.waiting
            self._peers[beat.worker] = _Peer(free, beat.free_tokens, now)

    def has_room(self, now: float) -> bool:
        """Return True if a peer that has loaded the model could run one more request now."""
        return any(
            now - peer.heard_at < STALE_SECONDS and peer.sequences > 0
            for peer in self._peers.values()
        )

    def reserve(self, cost: int, now: float) -> bool:
        """Count a sequence and `cost` KV tokens as taken on a peer that has them free.

        Returns True if there is such a peer, False if there is none and nothing was taken. A peer
        last heard three seconds ago or earlier counts as gone. The peer is not told; its next
        heartbeat replaces the count.
        """
        for peer in self._peers.values():
            if now - peer.heard_at < STALE_SECONDS and peer.sequences > 0 and cost <= peer.tokens:
                peer.sequences -= 1
                peer.tokens -= cost
                return True
        return False
