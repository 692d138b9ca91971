"""What beats tell of progress: everybody in turn, and no beat too much."""

from gpu_worker.progress import MOST_PROGRESS, PROGRESS_SECONDS, Progress


def test_beats_in_quick_succession_tell_it_once() -> None:
    """Beats follow every change of credit; the dispatcher needs this only now and then."""
    progress, counts = Progress(), [(1, 5)]
    assert progress.some(lambda: counts, 0.0) == counts
    assert progress.some(lambda: counts, PROGRESS_SECONDS / 2) == []
    assert progress.some(lambda: counts, PROGRESS_SECONDS) == counts


def test_everybody_has_a_turn_and_no_beat_grows() -> None:
    """A beat is bounded however many requests a worker holds."""
    progress, counts = Progress(), [(seq, 1) for seq in range(2 * MOST_PROGRESS + 10)]
    beats = [progress.some(lambda: counts, float(number)) for number in range(4)]
    assert [len(beat) for beat in beats] == [MOST_PROGRESS, MOST_PROGRESS, 10, MOST_PROGRESS]
    assert [pair for beat in beats[:3] for pair in beat] == counts
