"""Requests start side by side; one that is suspected starts alone."""

from gpu_worker.attempt.start_quarantine import StartQuarantine


def test_a_suspect_starts_alone_and_nobody_overtakes_it() -> None:
    """Else it would not be known whose fault a failure is, or a busy engine would never try it."""
    starts, begun = StartQuarantine(), list[str]()
    first, second = (starts.enqueue(False, lambda n=n: begun.append(n)) for n in ("a", "b"))  # type: ignore[misc]
    suspect = starts.enqueue(True, lambda: begun.append("suspect"))
    starts.enqueue(False, lambda: begun.append("late"))
    assert begun == ["a", "b"]
    starts.release(first)
    assert begun == ["a", "b"]
    starts.release(second)
    assert begun == ["a", "b", "suspect"]
    starts.release(suspect)
    starts.release(suspect)
    assert begun == ["a", "b", "suspect", "late"]


def test_who_leaves_before_its_turn_holds_nobody_up() -> None:
    """Its client has cancelled, or the worker drains."""
    starts, begun = StartQuarantine(), list[str]()
    running = starts.enqueue(False, lambda: begun.append("runs"))
    suspect = starts.enqueue(True, lambda: begun.append("suspect"))
    starts.enqueue(False, lambda: begun.append("late"))
    starts.release(suspect)
    assert begun == ["runs", "late"]
    starts.release(running)
    assert begun == ["runs", "late"]
