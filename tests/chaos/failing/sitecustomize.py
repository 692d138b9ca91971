"""In a process that finds this on its path, SIGUSR1 makes the mock engine's next step fail.

Python imports a module of this name by itself at its start (`site`).
"""

import signal


def fail(*_: object) -> None:
    """The module is loaded by then; a process whose only engine has failed ends."""
    from gpu_worker.engines.mock import MockEngine

    def step(self: MockEngine) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    MockEngine.step = step  # type: ignore[method-assign, assignment]


signal.signal(signal.SIGUSR1, fail)
