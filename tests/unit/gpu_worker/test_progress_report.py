"""What beats tell of progress: everybody in turn, and no beat too much."""

from gpu_worker.pool.progress_report import (
    MAX_REPORTED_REQUESTS,
    PROGRESS_REPORT_SECONDS,
    ProgressReporter,
)


def test_beats_in_quick_succession_tell_it_once() -> None:
    """Beats follow every change of credit; the dispatcher needs this only now and then."""
    progress, counts = ProgressReporter(), [(1, 5)]
    assert progress.select_due(lambda: counts, 0.0) == counts
    assert progress.select_due(lambda: counts, PROGRESS_REPORT_SECONDS / 2) == []
    assert progress.select_due(lambda: counts, PROGRESS_REPORT_SECONDS) == counts


def test_everybody_has_a_turn_and_no_beat_grows() -> None:
    """A beat is bounded however many requests a worker holds."""
    progress, counts = (
        ProgressReporter(),
        [(seq, 1) for seq in range(2 * MAX_REPORTED_REQUESTS + 10)],
    )
    beats = [progress.select_due(lambda: counts, float(number)) for number in range(4)]
    assert [len(beat) for beat in beats] == [
        MAX_REPORTED_REQUESTS,
        MAX_REPORTED_REQUESTS,
        10,
        MAX_REPORTED_REQUESTS,
    ]
    assert [pair for beat in beats[:3] for pair in beat] == counts
