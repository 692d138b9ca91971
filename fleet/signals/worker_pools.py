"""Load of the workers by model version and machine type, from their last heartbeats. Pure."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from fleet.signals.signal_report import PoolSignals
from streams.messages import Heartbeat

HEARD_SECONDS = 3.0  # as the dispatcher has it: three heartbeats


class WorkerPools:
    """The last heartbeat of each worker for each version of one model that it serves.

    One that has not been heard for `HEARD_SECONDS` counts in nothing until it is heard again. Times
    are seconds of one clock.
    """

    def __init__(self) -> None:
        self._beats: dict[tuple[str, str], tuple[Heartbeat, float]] = {}

    def record(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat that was heard at `now`; a worker's last one removes it."""
        key = beat.worker, beat.version
        if beat.drained:
            self._beats.pop(key, None)
        else:
            self._beats[key] = beat, now

    def expire(self, now: float) -> None:
        """Forget workers that are silent."""
        self._beats = {
            key: (beat, at) for key, (beat, at) in self._beats.items() if now - at < HEARD_SECONDS
        }

    def __len__(self) -> int:
        return len(self._beats)

    def heartbeats(self) -> list[tuple[Heartbeat, float]]:
        """Return the last heartbeat of each worker and version, with the time it was heard."""
        return list(self._beats.values())

    def measure(self) -> list[PoolSignals]:
        """Return the pools, by version and type."""
        beats = sorted((beat for beat, _ in self._beats.values()), key=_pool_key)
        return [_measure(*key, list(found)) for key, found in groupby(beats, _pool_key)]


def _pool_key(beat: Heartbeat) -> tuple[str, str]:
    return beat.version, beat.type


def _measure(version: str, type: str, beats: Sequence[Heartbeat]) -> PoolSignals:
    serving = [beat for beat in beats if not beat.draining]
    paces = [beat.tokens_per_second for beat in beats if beat.running]
    return PoolSignals(
        version=version,
        type=type,
        workers=len(serving),
        draining=len(beats) - len(serving),
        running=sum(beat.running for beat in beats),
        waiting=sum(beat.waiting for beat in beats),
        batch_fill=_share((beat.running, beat.max_sequences) for beat in beats),
        kv_fill=_share((beat.kv_tokens - beat.free_tokens, beat.kv_tokens) for beat in serving),
        tokens_per_second=sum(beat.tokens_per_second for beat in beats),
        pace=sum(paces) / len(paces) if paces else None,
    )


def _share(pairs: Iterable[tuple[int, int]]) -> float | None:
    """The sum of the first numbers over that of the second ones; None if that is 0."""
    used = total = 0
    for part, whole in pairs:
        used, total = used + part, total + whole
    return max(0, used) / total if total else None
