"""`Client`: the queries and actions of a Headway server. `AsyncClient`: the same for event loops."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, Self, TypeVar

from headway.client.connection import TIMEOUT, Connection, part
from headway.views.parsing import parse

if TYPE_CHECKING:
    from datetime import datetime

    from headway.core.ids import UserId
    from headway.views.failed import CauseGroups, RqCauses, TaskCauses
    from headway.views.history import Marks
    from headway.views.jobs.dead import Dead, DeadItems, DeadLetters
    from headway.views.jobs.items import Items, ItemSheet, JobLog, LogEntry
    from headway.views.jobs.job import DeadLetter, JobSheet, Runs
    from headway.views.jobs.listing import Job, Jobs
    from headway.views.jobs.map import JobMap
    from headway.views.projects import ProjectProgress, Projects
    from headway.views.queue import Queues, QueueSettings, Tasks, TaskSheet, Workers
    from headway.views.search import FailuresByHost, Found
    from headway.views.states import States, StatesJobs
    from headway.views.system.access import Acted, Activity
    from headway.views.system.alerts import Alerts
    from headway.views.system.health import Health
    from headway.views.system.performance import Performances
    from headway.views.system.records import Audit, Settings
    from headway.views.system.relay import RelayStatus

P = ParamSpec("P")
T = TypeVar("T")

#: Rows per request of the methods that read all pages.
PAGE = 1000


class Client:
    """A Headway server. A method sends one request, or one per page. Thread-safe."""

    def __init__(self, address: str, token: str | None = None, *, timeout: float = TIMEOUT) -> None:
        self._connection = Connection(address, token, timeout=timeout)
        self.address = self._connection.address

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self, *, archived: bool = False, before: str | None = None, limit: int | None = None) -> Jobs:
        """Return all jobs, most recently changed first. With ``limit``, return one page, newest job first."""
        from headway.views.jobs.listing import Jobs

        if limit is not None:
            return parse(Jobs, self._connection.get("/jobs", archived=archived, before=before, limit=limit))
        found: list[Job] = []
        while True:
            page = self.jobs(archived=archived, before=before, limit=PAGE)
            found += page.jobs
            if not isinstance(page.next, str):
                return Jobs(tuple(sorted(found, key=lambda job: job.updated_at, reverse=True)))
            before = page.next

    def job(self, id: str) -> JobSheet:
        """Return a job with its details."""
        from headway.views.jobs.job import JobSheet

        return parse(JobSheet, self._connection.get(f"/jobs/{part(id)}"))

    def runs(self, id: str) -> Runs:
        """Return a job's runs."""
        from headway.views.jobs.job import Runs

        return parse(Runs, self._connection.get(f"/jobs/{part(id)}/runs"))

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
        """Read a page. The server gives at most 1,000 rows per request, and no payloads in lists."""
        from headway.views.jobs.items import Item, Items

        path, rows = f"/jobs/{part(id)}/items", list[Item]()
        while True:
            some = min(PAGE, limit - len(rows))
            found = parse(Items, self._connection.get(path, status=status, cause=cause, after=after, limit=some))
            rows += found.items
            if found.next_after is None or len(rows) >= limit:
                return found._replace(items=tuple(rows))
            after = found.next_after

    def item(self, id: str, name: str, *, payload: bool = False) -> ItemSheet:
        """Return an item with its attempts."""
        from headway.views.jobs.items import ItemSheet

        return parse(ItemSheet, self._connection.get(f"/jobs/{part(id)}/items/{part(name)}", payload=payload))

    def log(self, id: str) -> Iterator[LogEntry]:
        """Iterate over a job's log, oldest entry first."""
        after: int | None = -1
        while after is not None:
            page = self.log_page(id, after=after)
            yield from page.log
            after = page.next_after if isinstance(page.next_after, int) else None

    def log_page(self, id: str, *, after: int = -1, limit: int = PAGE) -> JobLog:
        """Return one page of a job's log: up to ``limit`` entries above ``after``."""
        from headway.views.jobs.items import JobLog

        return parse(JobLog, self._connection.get(f"/jobs/{part(id)}/log", after=after, limit=limit))

    def item_map(self, id: str) -> JobMap:
        """Return the map of a job's items."""
        from headway.views.jobs.map import JobMap

        return parse(JobMap, self._connection.get(f"/jobs/{part(id)}/map"))

    def dead(self, id: str | None = None) -> Dead:
        """Return the dead letters of a job, or of all jobs, by cause."""
        from headway.views.jobs.dead import Dead

        return parse(Dead, self._connection.get("/dead", job=id))

    def dead_items(self, id: str, *, cause: int | None = None, limit: int = 10, payload: bool = False) -> DeadItems:
        """Read the causes with some items each. The server gives no payloads in lists."""
        from headway.views.jobs.dead import DeadItems

        return parse(DeadItems, self._connection.get(f"/jobs/{part(id)}/dead", cause=cause, limit=min(limit, PAGE)))

    def dead_letters(
        self, id: str, *, cause: int | None = None, payload: bool = False, after: int = -1, limit: int = 50
    ) -> DeadLetters:
        """Return one page of a job's dead letters."""
        from headway.views.jobs.dead import DeadLetters

        path = f"/jobs/{part(id)}/dead/letters"
        return parse(DeadLetters, self._connection.get(path, cause=cause, payload=payload, after=after, limit=limit))

    def export_dead(self, id: str, *, cause: int | None = None, payload: bool = False) -> Iterator[DeadLetter]:
        """Iterate over a job's dead letters."""
        after: int | None = -1
        while after is not None:
            page = self.dead_letters(id, cause=cause, payload=payload, after=after, limit=PAGE)
            yield from page.letters
            after = page.next_after

    def alerts(self, *, history: int = 50) -> Alerts:
        """Return the open alerts and the last ``history`` closed ones."""
        from headway.views.system.alerts import Alerts

        return parse(Alerts, self._connection.get("/alerts", history=history))

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def queues(self) -> Queues:
        """Return the queues."""
        from headway.views.queue import Queues

        return parse(Queues, self._connection.get("/queues"))

    def queue_settings(self) -> QueueSettings:
        """Return the queue settings of the server."""
        from headway.views.queue import QueueSettings

        return parse(QueueSettings, self._connection.get("/queue-settings"))

    def tasks(
        self,
        *,
        status: str | None = None,
        queue: str | None = None,
        kind: str | None = None,
        user_id: UserId | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Tasks:
        """Return one page of tasks, newest first."""
        from headway.views.queue import Tasks

        return parse(
            Tasks,
            self._connection.get(
                "/tasks",
                status=status and status.lower(),
                queue=queue,
                kind=kind,
                user=user_id,
                before=before,
                limit=limit,
            ),
        )

    def task(self, id: str) -> TaskSheet:
        """Return a task with its details."""
        from headway.views.queue import TaskSheet

        return parse(TaskSheet, self._connection.get(f"/tasks/{part(id)}"))

    def workers(self) -> Workers:
        """Return the workers."""
        from headway.views.queue import Workers

        return parse(Workers, self._connection.get("/workers"))

    def task_causes(self, *, limit: int = 50) -> TaskCauses:
        """Return the causes of failed tasks."""
        from headway.views.failed import TaskCauses

        return parse(TaskCauses, self._connection.get("/task-causes", limit=limit))

    def rq_causes(self) -> RqCauses:
        """Return the causes of failed RQ jobs."""
        from headway.views.failed import RqCauses

        return parse(RqCauses, self._connection.get("/rq-causes"))

    def performance(self, *, range: Literal["1h", "24h", "7d"] = "24h") -> Performances:
        """Return the measured performance over a period."""
        from headway.views.system.performance import Performances

        return parse(Performances, self._connection.get("/performance", range=range))

    def causes(self, *, limit: int = 50) -> CauseGroups:
        """Return the causes of dead letters, grouped over all jobs."""
        from headway.views.failed import CauseGroups

        return parse(CauseGroups, self._connection.get("/causes", limit=limit))

    def oldest_tasks(self, queue: str, *, limit: int = 50) -> Tasks:
        """Return the tasks of a queue that have waited for longest, oldest first."""
        from headway.views.queue import Tasks

        return parse(Tasks, self._connection.get(f"/queues/{part(queue)}/oldest", limit=limit))

    def search(self, text: str) -> Found:
        """Return what a text finds: jobs, items, tasks, users, workers and causes."""
        from headway.views.search import Found

        return parse(Found, self._connection.get("/search", q=text))

    def failures_by_host(self, *, seconds: float = 3600.0) -> FailuresByHost:
        """Return the failed attempts of the last ``seconds`` by machine."""
        from headway.views.search import FailuresByHost

        return parse(FailuresByHost, self._connection.get("/failures-by-host", seconds=seconds))

    def marks(self, *, seconds: float = 86_400.0, job: str | None = None) -> Marks:
        """Return what happened in the last ``seconds``, in one job or everywhere."""
        from headway.views.history import Marks

        return parse(Marks, self._connection.get("/marks", seconds=seconds, job=job))

    # ---- projects, states, the server ---------------------------------------------------------------------------------

    def projects(self, *, after: str = "", limit: int = 50) -> Projects:
        """Return one page of the projects."""
        from headway.views.projects import Projects

        return parse(Projects, self._connection.get("/projects", after=after, limit=limit))

    def project(self, id: str) -> ProjectProgress:
        """Return the progress of a project."""
        from headway.views.projects import ProjectProgress

        return parse(ProjectProgress, self._connection.get(f"/projects/{part(id)}"))

    def states_jobs(self) -> StatesJobs:
        """Return the jobs that have states."""
        from headway.views.states import StatesJobs

        return parse(StatesJobs, self._connection.get("/states"))

    def states(
        self,
        job: str,
        *,
        task: int | None = None,
        tag: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> States:
        """Return all current states of a job, or one page with ``limit``."""
        from headway.views.shape import ABSENT
        from headway.views.states import State, States

        path, rows = f"/states/{part(job)}", list[State]()
        while True:
            page = parse(
                States,
                self._connection.get(path, task=task, tag=tag, after=after, limit=PAGE if limit is None else limit),
            )
            if limit is not None:
                return page
            rows += page.states
            if not isinstance(page.next_after, str):
                return page._replace(states=tuple(rows), next_after=ABSENT)
            after = page.next_after

    def relay(self) -> RelayStatus:
        """Return the status of the relay."""
        from headway.views.system.relay import RelayStatus

        return parse(RelayStatus, self._connection.get("/relay"))

    def activity(
        self, *, job: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 50
    ) -> Activity:
        """Return one page of the audit trail, newest entry first."""
        from headway.views.system.access import Activity

        return parse(Activity, self._connection.get("/activity", job=job, actor=actor, before=before, limit=limit))

    def audit(self, job: str | None = None) -> Audit:
        """Return the whole audit trail, oldest entry first."""
        from headway.views.system.records import Audit, AuditEntry

        entries: list[AuditEntry] = []
        page = self.activity(job=job, limit=PAGE)
        while True:
            entries += [AuditEntry(one.at, one.actor, one.action, one.job, one.detail) for one in page.activity]
            if page.next_before is None:
                return Audit(tuple(reversed(entries)))
            page = self.activity(job=job, before=page.next_before, limit=PAGE)

    def settings(self) -> Settings:
        """Return the server's settings."""
        from headway.views.system.records import Settings

        return parse(Settings, self._connection.get("/settings"))

    def health(self) -> Health:
        """Return the server's health."""
        from headway.views.system.health import Health

        return parse(Health, self._connection.get("/health"))

    # ---- actions ----------------------------------------------------------------------------------------------------

    def retry_dead(
        self, job: str, *, cause: int | None = None, items: Sequence[str | int] = (), reason: str = ""
    ) -> Acted:
        """Retry dead items of a job: those of a cause, the named ``items``, or all."""
        return self._act(f"/jobs/{part(job)}/retry", cause=cause, items=list(items), reason=reason)

    def retry_all_dead(self, *, reason: str = "") -> Acted:
        """Retry the dead items of all jobs."""
        return self._act("/dead/retry", reason=reason)

    def retry_tasks(self, *, cause: int | None = None, reason: str = "") -> Acted:
        """Retry the failed tasks of a cause, or all failed tasks."""
        return self._act("/task-causes/retry", cause=cause, reason=reason)

    def requeue_cause(self, cause: str, *, until: datetime | None = None, reason: str = "") -> Acted:
        """Requeue the failed RQ jobs of a cause, or only those that failed by ``until`` (`RqCause.last_seen`)."""
        from headway.views.shape import iso

        return self._act(f"/rq-causes/{part(cause)}/requeue", until=iso(until), reason=reason)

    def forget(self, job: str, *, reason: str = "") -> Acted:
        """Delete a job with all its records."""
        return self._act(f"/jobs/{part(job)}/forget", reason=reason)

    def pause_run(self, job: str, *, reason: str = "") -> Acted:
        """Pause the current run of a job."""
        return self._act(f"/jobs/{part(job)}/pause", reason=reason)

    def resume_run(self, job: str, *, reason: str = "") -> Acted:
        """Resume a paused run."""
        return self._act(f"/jobs/{part(job)}/resume", reason=reason)

    def stop_run(self, job: str, *, now: bool = False, reason: str = "") -> Acted:
        """Stop the current run. With ``now``, do not wait for the running items."""
        return self._act(f"/jobs/{part(job)}/stop", now=now, reason=reason)

    def scale_run(self, job: str, workers: int, *, reason: str = "") -> Acted:
        """Set the number of workers of the current run."""
        return self._act(f"/jobs/{part(job)}/scale", workers=workers, reason=reason)

    def pause(self, queue: str, *, reason: str = "", seconds: float | None = None) -> Acted:
        """Pause a queue, for ``seconds`` or until `resume`."""
        return self._act(f"/queues/{part(queue)}/pause", reason=reason, seconds=seconds)

    def resume(self, queue: str, *, reason: str = "") -> Acted:
        """Resume a queue."""
        return self._act(f"/queues/{part(queue)}/resume", reason=reason)

    def cancel_task(self, task: str, *, reason: str = "") -> Acted:
        """Cancel a task."""
        return self._act(f"/tasks/{part(task)}/cancel", reason=reason)

    def retry_task(self, task: str, *, reason: str = "") -> Acted:
        """Retry a failed task."""
        return self._act(f"/tasks/{part(task)}/retry", reason=reason)

    def drain_worker(self, worker: str, *, reason: str = "") -> Acted:
        """Ask a worker to exit after its current tasks."""
        return self._act(f"/workers/{part(worker)}/drain", reason=reason)

    def stop_worker(self, worker: str, *, reason: str = "") -> Acted:
        """Stop a worker."""
        return self._act(f"/workers/{part(worker)}/stop", reason=reason)

    def remove_worker(self, worker: str, *, reason: str = "") -> Acted:
        """Remove a worker that is lost or has exited."""
        return self._act(f"/workers/{part(worker)}/remove", reason=reason)

    def acknowledge(self, alert: int, *, reason: str = "") -> Acted:
        """Acknowledge an alert."""
        return self._act(f"/alerts/{alert}/acknowledge", reason=reason)

    def mute(self, rule: str, *, seconds: float = 3600.0, subject: str = "", reason: str = "") -> Acted:
        """Mute an alert rule, or one ``subject`` of it."""
        return self._act(f"/alert-rules/{part(rule)}/mute", seconds=seconds, subject=subject, reason=reason)

    def unmute(self, rule: str, *, subject: str = "", reason: str = "") -> Acted:
        """End the mute of an alert rule."""
        return self._act(f"/alert-rules/{part(rule)}/unmute", subject=subject, reason=reason)

    def _act(self, path: str, **body: object) -> Acted:
        from headway.views.system.access import Acted

        return parse(Acted, self._connection.post(path, **body))


_ASYNC: weakref.WeakSet[AsyncClient] = weakref.WeakSet()


class AsyncClient:
    """`Client` for event loops: ``await client.ask(Client.items, "ads", status="dead")``.

    `ask` calls a method of `Client` in one of ``connections`` threads, each with its own connection. Methods that return
    an iterator are replaced by their paged form (`Client.log_page`).
    """

    def __init__(
        self, address: str, token: str | None = None, *, timeout: float = TIMEOUT, connections: int = 4
    ) -> None:
        self._all = tuple(Client(address, token, timeout=timeout) for _ in range(connections))
        self.begin()
        _ASYNC.add(self)

    def begin(self) -> None:
        """Start new threads. A forked child does not inherit its parent's threads."""
        self._free = list(self._all)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="headway-client")

    async def ask(self, question: Callable[Concatenate[Client, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Call a method of `Client` in a thread and return its result."""

        def call() -> T:
            client = self._free.pop()  # one client per thread
            try:
                return question(client, *args, **options)
            finally:
                self._free.append(client)

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
        """Close the connections without waiting for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._all:
            await asyncio.to_thread(client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _after_fork() -> None:
    for client in list(_ASYNC):
        client.begin()


os.register_at_fork(after_in_child=_after_fork)
