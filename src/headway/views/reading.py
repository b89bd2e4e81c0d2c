"""Everything that can be read, by name: one object over the stores of an installation.

The command line, the web API and `headway.client` have these questions in common. `headway.client.Client` has the same
methods and asks a server instead; so a verb of the command line is written once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config
    from headway.ledger import Job, Ledger
    from headway.queue.taskqueue import TaskQueue
    from headway.views.dead import Dead, DeadItems
    from headway.views.health import Health
    from headway.views.items import Items, ItemSheet, LogEntry
    from headway.views.job import DeadLetter, JobSheet, Runs
    from headway.views.jobs import Jobs
    from headway.views.queue import Queues, Tasks, TaskSheet, Workers
    from headway.views.states import States, StatesJobs


class Reader:
    """Reads the stores that ``config`` names. It connects at its first question and may be asked by several threads."""

    def __init__(self, config: Config, *, create: bool = False) -> None:
        self.config = config
        self._create = create
        self._opening = threading.Lock()
        self._database: Database | None = None

    @property
    def database(self) -> Database:
        with self._opening:
            if self._database is None:
                from headway._sql import connect

                self._database = connect(self.config.text("database"), create=self._create)
            return self._database

    @property
    def ledger(self) -> Ledger:
        from headway.ledger.ledger import Ledger

        return Ledger(self.database)

    @property
    def queue(self) -> TaskQueue:
        from headway.queue.taskqueue import TaskQueue

        return TaskQueue(self.database)

    def _job(self, id: str) -> Job:
        from headway.views.jobs import find_job

        return find_job(self.ledger, id)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self, *, archived: bool = False) -> Jobs:
        from headway.views.jobs import read_jobs

        return read_jobs(self.database, archived=archived)

    def job(self, id: str) -> JobSheet:
        from headway.views.job import read_sheet

        return read_sheet(self._job(id))

    def runs(self, id: str) -> Runs:
        from headway.views.job import read_runs

        return read_runs(self._job(id))

    def items(
        self, id: str, *, status: str | None = None, cause: int | None = None, after: int = -1, limit: int = 50
    ) -> Items:
        from headway.views.items import read_items

        return read_items(self._job(id), status=status, cause=cause, after=after, limit=limit)

    def item(self, id: str, name: str, *, payload: bool = False) -> ItemSheet:
        from headway.views.items import read_item

        return read_item(self._job(id), name, payload=payload)

    def log(self, id: str) -> Iterator[LogEntry]:
        from headway.views.items import read_log

        return read_log(self._job(id))

    def dead(self, id: str | None = None) -> Dead:
        from headway.views.dead import read_dead

        return read_dead(self.ledger, id)

    def dead_items(self, id: str, *, cause: int | None = None, limit: int = 10) -> DeadItems:
        from headway.views.dead import read_dead_items

        return read_dead_items(self._job(id), cause=cause, limit=limit)

    def export_dead(self, id: str, *, cause: int | None = None, payload: bool = False) -> Iterator[DeadLetter]:
        from headway.views.dead import export_dead

        return export_dead(self._job(id), cause=cause, payload=payload)

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def queues(self) -> Queues:
        from headway.views.queue import read_queues

        return read_queues(self.queue)

    def tasks(
        self,
        *,
        status: str | None = None,
        queue: str | None = None,
        kind: str | None = None,
        user_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Tasks:
        from headway.views.queue import read_tasks

        return read_tasks(self.queue, status=status, name=queue, kind=kind, user_id=user_id, before=before, limit=limit)

    def task(self, id: str) -> TaskSheet:
        from headway.views.queue import read_task

        return read_task(self.queue, id)

    def workers(self) -> Workers:
        from headway.views.queue import read_workers

        return read_workers(self.queue)

    # ---- states, health ----------------------------------------------------------------------------------------------

    def states_jobs(self) -> StatesJobs:
        from headway.views.states import read_states_jobs

        return read_states_jobs(self.config.text("states"))

    def states(self, job: str, *, task: int | None = None, tag: str | None = None) -> States:
        from headway import states
        from headway.views.states import read_states

        opened, num_tasks = states.open_store(self.config.text("states"), job)
        with states.Manager(job, 0, num_tasks, opened) as manager:
            return read_states(manager, task_id=task, tag=tag)

    def health(self) -> Health:
        from headway import __version__
        from headway.views.health import examine, health

        return health(list(examine(self.config.text("database"), version=__version__)))

    def close(self) -> None:
        with self._opening:
            if self._database is not None:
                self._database.close()
                self._database = None
