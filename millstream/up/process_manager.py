"""The child processes of one `millstream up`: kept running, and stopped in order."""

import asyncio
from pathlib import Path

from millstream.up import state_file
from millstream.up.child_process import ChildProcess, OnDeath, Program
from millstream.up.data_directory import DataDirectory
from millstream.up.launch_plan import DRAIN_SHARES, LaunchPlan


class ProcessManager:
    """The child processes of one `millstream up`, which are kept running in a task group.

    `add` starts a process, and `stop` ends all of them in order.
    """

    def __init__(
        self, tasks: asyncio.TaskGroup, directory: DataDirectory, plan: LaunchPlan
    ) -> None:
        self.directory, self.plan = directory, plan
        self._tasks = tasks
        self._children: dict[str, list[ChildProcess]] = {}  # by service

    def add(
        self,
        service: str,
        program: Program,
        on_death: OnDeath | None = None,
        logs: Path | None = None,
    ) -> ChildProcess:
        """Return a new `ChildProcess` at once, and start its program in a task.

        `service` is a key of `DRAIN_SHARES`, by which `stop` orders the processes. The program is
        started again after each death; `on_death` is awaited before that. Until `mark_started` is
        called, 3 deaths in a row fail the task group with `StartFailed`. Its log file is in the
        directory `logs`, by default that of all services.
        """
        child = ChildProcess(program, logs or self.directory.logs, on_death)
        self._children.setdefault(service, []).append(child)
        self._tasks.create_task(child.keep_running(), name=program.name)
        return child

    def remove(self, service: str, child: ChildProcess) -> None:
        """Forget a process that was added and has been stopped."""
        self._children[service].remove(child)

    def mark_started(self) -> None:
        """End the starting phase of all processes added so far.

        From now on these are started again however often they die; no `StartFailed` is raised.
        """
        for children in self._children.values():
            for child in children:
                child.is_starting = False

    async def stop(self) -> None:
        """Stop all processes, remove the state file, and return when all have ended.

        Gateways are stopped first, then the fleet service, workers, dispatchers, the jobs service,
        the ledger's export, the admin service and nats-server; the processes of one service are
        stopped together. Each gets SIGTERM, and SIGKILL if it still runs after its service's
        `kill_after_seconds`.
        """
        for service in DRAIN_SHARES:
            seconds = self.plan.kill_after_seconds(service)
            children = self._children.get(service, [])
            await asyncio.gather(*(child.stop(seconds) for child in children))
        state_file.remove(self.directory.path)
