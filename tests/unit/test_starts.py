"""Requests start side by side; one that is suspected starts alone."""

from gpu_worker.starts import Starts


def test_a_suspect_starts_alone_and_nobody_overtakes_it() -> None:
    """Else it would not be known whose fault a failure is, or a busy engine would never try it."""
    starts, begun = Starts(), list[str]()
    first, second = (starts.ask(False, lambda n=n: begun.append(n)) for n in ("a", "b"))  # type: ignore[misc]
    suspect = starts.ask(True, lambda: begun.append("suspect"))
    starts.ask(False, lambda: begun.append("late"))
    assert begun == ["a", "b"]
    starts.leave(first)
    assert begun == ["a", "b"]
    starts.leave(second)
    assert begun == ["a", "b", "suspect"]
    starts.leave(suspect)
    starts.leave(suspect)
    assert begun == ["a", "b", "suspect", "late"]


def test_who_leaves_before_its_turn_holds_nobody_up() -> None:
    """Its client has cancelled, or the worker drains."""
    starts, begun = Starts(), list[str]()
    running = starts.ask(False, lambda: begun.append("runs"))
    suspect = starts.ask(True, lambda: begun.append("suspect"))
    starts.ask(False, lambda: begun.append("late"))
    starts.leave(suspect)
    assert begun == ["runs", "late"]
    starts.leave(running)
    assert begun == ["runs", "late"]
