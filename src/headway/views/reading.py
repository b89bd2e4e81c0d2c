"""One object with a method for everything that can be read from the stores of an installation.

The command line, the web API and `headway.client` share these methods. `headway.client.Client` sends them to a server, so
a verb of the command line is written once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Self

from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config
    from headway.core.retry import RetryPolicy
    from headway.ledger import Job, Ledger
    from headway.queue.task_queue import TaskQueue
    from headway.views.failed import CauseGroups, RqCauses, TaskCauses
    from headway.views.history import Marks
    from headway.views.jobs.dead import Dead, DeadItems, DeadLetters
    from headway.views.jobs.items import Items, ItemSheet, JobLog, LogEntry
    from headway.views.jobs.job import DeadLetter, JobSheet, Runs
    from headway.views.jobs.listing import Jobs
    from headway.views.jobs.map import JobMap
    from headway.views.projects import ProjectProgress, Projects
    from headway.views.queue import Queues, QueueSettings, Tasks, TaskSheet, Workers
    from headway.views.search import FailuresByHost, Found
    from headway.views.states import States, StatesJobs
    from headway.views.system.access import Activity
    from headway.views.system.alerts import Alerts
    from headway.views.system.health import Health
    from headway.views.system.performance import Performances
    from headway.views.system.records import Audit, Settings
    from headway.views.system.relay import RelayStatus

#: Seconds for which a failure to open the database is the answer to every caller.
RETRY_AFTER = 1.0


class Reader:
    """Reads the stores that ``config`` names. It connects on first use and is thread-safe."""

    def __init__(self, config: Config, *, create: bool = False, retry: RetryPolicy | None = None) -> None:
        """``retry`` replaces the database's retry policy for a PostgreSQL server that is unreachable."""
        self.config = config
        self._create = create
        self._retry = retry
        self._failure: tuple[float, HeadwayError] | None = None
        self._opening = threading.Lock()
        self._database: Database | None = None

    @property
    def database(self) -> Database:
        """Return the database, and open it on first use."""
        with self._opening:
            if self._database is not None:
                return self._database
            # Threads that waited here while another thread failed get its error instead of waiting for their own.
            if self._failure is not None and time.monotonic() - self._failure[0] < RETRY_AFTER:
                raise self._failure[1]
            from headway._sql import connect, sqlite_path

            try:
                self._database = connect(self.config.text("database"), create=self._create)
            except HeadwayError as error:
                self._failure = (time.monotonic(), error)
                raise
            if self._retry is not None and sqlite_path(self.config.text("database")) is None:
                self._database.retry = self._retry  # SQLite is at most busy, so waiting helps
            return self._database

    @property
    def ledger(self) -> Ledger:
        from headway.ledger.ledger import Ledger

        return Ledger(self.database)

    @property
    def queue(self) -> TaskQueue:
        from headway.queue.task_queue import TaskQueue

        return TaskQueue(self.database)

    def has_backlog(self, most: int) -> bool:
        """Return whether more than ``most`` tasks are ready to run."""
        from headway.queue.store.statistics import waits_for_more_than

        with self.database.read() as tx:
            return waits_for_more_than(tx, most)

    def _job(self, id: str) -> Job:
        from headway.views.jobs.listing import find_job

        return find_job(self.ledger, id)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self, *, archived: bool = False, before: str | None = None, limit: int | None = None) -> Jobs:
        """Return all jobs, most recently changed first; with ``limit`` a page, newest job first."""
        from headway.views.jobs.listing import read_jobs

        return read_jobs(self.database, archived=archived, before=before, limit=limit)

    def job(self, id: str) -> JobSheet:
        from headway.views.jobs.job import read_sheet

        return read_sheet(self._job(id))

    def runs(self, id: str) -> Runs:
        from headway.views.jobs.job import read_runs

        return read_runs(self._job(id))

    def items(
        self,
        id: str,
        *,
        status: str | None = None,
        cause: int | None = None,
        after: int = -1,
        limit: int = 50,
        payload: bool = False,
    ) -> Items:
        from headway.views.jobs.items import read_items

        return read_items(self._job(id), status=status, cause=cause, after=after, limit=limit, payload=payload)

    def item(self, id: str, name: str, *, payload: bool = False) -> ItemSheet:
        from headway.views.jobs.items import read_item

        return read_item(self._job(id), name, payload=payload)

    def log(self, id: str) -> Iterator[LogEntry]:
        from headway.views.jobs.items import read_log

        return read_log(self._job(id))

    def log_page(self, id: str, *, after: int = -1, limit: int = 1000) -> JobLog:
        from headway.views.jobs.items import read_log_page

        return read_log_page(self._job(id), after=after, limit=limit)

    def item_map(self, id: str) -> JobMap:
        from headway.views.jobs.map import read_job_map

        return read_job_map(self._job(id))

    def dead(self, id: str | None = None) -> Dead:
        from headway.views.jobs.dead import read_dead

        return read_dead(self.ledger, id)

    def dead_items(self, id: str, *, cause: int | None = None, limit: int = 10, payload: bool = False) -> DeadItems:
        from headway.views.jobs.dead import read_dead_items

        return read_dead_items(self._job(id), cause=cause, limit=limit, payload=payload)

    def export_dead(self, id: str, *, cause: int | None = None, payload: bool = False) -> Iterator[DeadLetter]:
        from headway.views.jobs.dead import export_dead

        return export_dead(self._job(id), cause=cause, payload=payload)

    def dead_letters(
        self, id: str, *, cause: int | None = None, payload: bool = False, after: int = -1, limit: int = 50
    ) -> DeadLetters:
        from headway.views.jobs.dead import read_dead_letters

        return read_dead_letters(self._job(id), cause=cause, payload=payload, after=after, limit=limit)

    def alerts(self, *, history: int = 50) -> Alerts:
        from headway.views.system.alerts import read_alerts

        return read_alerts(self.database, history=history)

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def queues(self) -> Queues:
        from headway.views.queue import read_queues

        return read_queues(self.queue)

    def queue_settings(self) -> QueueSettings:
        from headway.views.queue import read_settings

        return read_settings(self.queue)

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

    def oldest_tasks(self, queue: str, *, limit: int = 50) -> Tasks:
        """Return the tasks of a queue that have waited for longest, oldest first."""
        from headway.views.queue import read_oldest

        return read_oldest(self.queue, queue, limit=limit)

    def task(self, id: str, *, user_id: str | None = None) -> TaskSheet:
        """Return a task. With ``user_id``, another user's task is `NotFound`, and tracebacks are left out."""
        from headway.views.queue import read_task

        queue = self.queue
        queue.get(id, user_id=user_id)
        return read_task(queue, id, tracebacks=user_id is None)

    def workers(self) -> Workers:
        from headway.views.queue import read_workers

        return read_workers(self.queue)

    def task_causes(self, *, limit: int = 50) -> TaskCauses:
        """Return why tasks failed permanently."""
        from headway.views.failed import read_failed_tasks

        return read_failed_tasks(self.database, limit=limit)

    def causes(self, *, limit: int = 50) -> CauseGroups:
        """Return the causes of dead letters, grouped over all jobs."""
        from headway.views.failed import read_all_causes

        return read_all_causes(self.database, limit=limit)

    def rq_causes(self) -> RqCauses:
        """Return why jobs failed in the RQ deployment that the watcher follows."""
        from headway.views.failed import read_rq_causes

        return read_rq_causes(self.config, self.database)

    def performance(self, *, range: Literal["1h", "24h", "7d"] = "24h") -> Performances:
        from headway.views.system.performance import read_performances

        return read_performances(self.database, range)

    # ---- search ------------------------------------------------------------------------------------------------------

    def search(self, text: str) -> Found:
        """Return what a text finds: jobs, items, tasks, users, workers and causes."""
        from headway.views.search import read_search

        return read_search(self.database, text)

    def failures_by_host(self, *, seconds: float = 3600.0) -> FailuresByHost:
        """Return the failed attempts of the last ``seconds`` by machine."""
        from headway.views.search import read_failures_by_host

        return read_failures_by_host(self.database, seconds=seconds)

    def marks(self, *, seconds: float = 86_400.0, job: str | None = None) -> Marks:
        """Return what happened in the last ``seconds``, in one job or everywhere."""
        from headway.views.history import read_marks

        return read_marks(self.database, self.database.now() - seconds, job=job)

    # ---- projects, events --------------------------------------------------------------------------------------------

    def projects(self, *, after: str = "", limit: int = 50) -> Projects:
        from headway.views.projects import read_projects

        return read_projects(self.database, after=after, limit=limit)

    def recorded_project(self, id: str) -> ProjectProgress:
        """Return a project's progress from the database: exact with a journal, else as of the last checkpoint."""
        from headway.finishline.progress import NOT_FOUND, checked_project
        from headway.finishline.store.records import Records
        from headway.views.projects import project_view

        row = Records(self.database).find(checked_project(id))
        return project_view(id, NOT_FOUND if row is None else row.progress())

    def ping_database(self) -> None:
        """Check that the database answers. Raises `StorageError`."""
        self.database.now()

    def ping_redis(self) -> None:
        """Check that the Redis server of the projects answers. Raises `Unavailable`."""
        from headway import _redis

        address = self.config.text("projects_redis")
        try:
            with _redis.connect(address, role="state", timeout=1.0, connect_timeout=1.0) as client:
                client.ping()
        except _redis.failures() as error:
            raise _redis.translate(error, address) from error

    def relay(self) -> RelayStatus:
        from headway.views.system.relay import read_relay

        return read_relay(self.config)

    # ---- states, health ----------------------------------------------------------------------------------------------

    def states_jobs(self) -> StatesJobs:
        from headway.views.states import read_states_jobs

        return read_states_jobs(self.config.text("states"))

    def states(
        self,
        job: str,
        *,
        task: int | None = None,
        tag: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> States:
        """Return all current states of a job; with ``limit`` a page."""
        from headway import states
        from headway.views.states import read_states

        opened, num_tasks = states.open_store(self.config.text("states"), job)
        with states.Manager(job, 0, num_tasks, opened) as manager:
            return read_states(manager, task_id=task, tag=tag, after=after, limit=limit)

    def activity(
        self, *, job: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 50
    ) -> Activity:
        from headway.views.system.access import read_activity

        return read_activity(self.database, job=job, actor=actor, before=before, limit=limit)

    def audit(self, job: str | None = None) -> Audit:
        from headway.views.system.records import read_audit

        return read_audit(self.ledger, job)

    def settings(self) -> Settings:
        from headway.views.system.records import read_settings

        return read_settings(self.config)

    def health(self) -> Health:
        from headway import __version__
        from headway.views.system.health import examine, health

        return health(list(examine(self.config.text("database"), version=__version__)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._opening:
            if self._database is not None:
                self._database.close()
                self._database = None
