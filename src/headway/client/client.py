"""`Client`, the questions and actions of a server; `AsyncClient`, the same for event loops."""

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
    from headway.views.failed import RqCauses, TaskCauses
    from headway.views.jobs.dead import Dead, DeadItems, DeadLetters
    from headway.views.jobs.items import Items, ItemSheet, JobLog, LogEntry
    from headway.views.jobs.job import DeadLetter, JobSheet, Runs
    from headway.views.jobs.listing import Job, Jobs
    from headway.views.jobs.map import JobMap
    from headway.views.projects import ProjectProgress, Projects
    from headway.views.queue import Queues, QueueSettings, Tasks, TaskSheet, Workers
    from headway.views.states import States, StatesJobs
    from headway.views.system.access import Acted, Activity
    from headway.views.system.alerts import Alerts
    from headway.views.system.health import Health
    from headway.views.system.performance import Performances
    from headway.views.system.records import Audit, Settings
    from headway.views.system.relay import RelayStatus

P = ParamSpec("P")
T = TypeVar("T")

#: Rows asked for at a time by what reads everything.
PAGE = 1000


class Client:
    """A server. Every method is one request, or where it gives an iterator one per page; any thread may call them."""

    def __init__(self, address: str, token: str | None = None, *, timeout: float = TIMEOUT) -> None:
        self._connection = Connection(address, token, timeout=timeout)
        self.address = self._connection.address

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self, *, archived: bool = False, before: str | None = None, limit: int | None = None) -> Jobs:
        """All jobs, the one that changed last first; with ``limit`` a page, the newest job first."""
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
        from headway.views.jobs.job import JobSheet

        return parse(JobSheet, self._connection.get(f"/jobs/{part(id)}"))

    def runs(self, id: str) -> Runs:
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
        from headway.views.jobs.items import ItemSheet

        return parse(ItemSheet, self._connection.get(f"/jobs/{part(id)}/items/{part(name)}", payload=payload))

    def log(self, id: str) -> Iterator[LogEntry]:
        after: int | None = -1
        while after is not None:
            page = self.log_page(id, after=after)
            yield from page.log
            after = page.next_after if isinstance(page.next_after, int) else None

    def log_page(self, id: str, *, after: int = -1, limit: int = PAGE) -> JobLog:
        from headway.views.jobs.items import JobLog

        return parse(JobLog, self._connection.get(f"/jobs/{part(id)}/log", after=after, limit=limit))

    def item_map(self, id: str) -> JobMap:
        from headway.views.jobs.map import JobMap

        return parse(JobMap, self._connection.get(f"/jobs/{part(id)}/map"))

    def dead(self, id: str | None = None) -> Dead:
        from headway.views.jobs.dead import Dead

        return parse(Dead, self._connection.get("/dead", job=id))

    def dead_items(self, id: str, *, cause: int | None = None, limit: int = 10, payload: bool = False) -> DeadItems:
        """Read the causes with some items each. The server gives no payloads in lists."""
        from headway.views.jobs.dead import DeadItems

        return parse(DeadItems, self._connection.get(f"/jobs/{part(id)}/dead", cause=cause, limit=min(limit, PAGE)))

    def dead_letters(
        self, id: str, *, cause: int | None = None, payload: bool = False, after: int = -1, limit: int = 50
    ) -> DeadLetters:
        from headway.views.jobs.dead import DeadLetters

        path = f"/jobs/{part(id)}/dead/letters"
        return parse(DeadLetters, self._connection.get(path, cause=cause, payload=payload, after=after, limit=limit))

    def export_dead(self, id: str, *, cause: int | None = None, payload: bool = False) -> Iterator[DeadLetter]:
        after: int | None = -1
        while after is not None:
            page = self.dead_letters(id, cause=cause, payload=payload, after=after, limit=PAGE)
            yield from page.letters
            after = page.next_after

    def alerts(self, *, history: int = 50) -> Alerts:
        from headway.views.system.alerts import Alerts

        return parse(Alerts, self._connection.get("/alerts", history=history))

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def queues(self) -> Queues:
        from headway.views.queue import Queues

        return parse(Queues, self._connection.get("/queues"))

    def queue_settings(self) -> QueueSettings:
        """As the server's host sees them."""
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
        from headway.views.queue import Tasks

        asked = status and status.lower()
        return parse(
            Tasks,
            self._connection.get(
                "/tasks", status=asked, queue=queue, kind=kind, user=user_id, before=before, limit=limit
            ),
        )

    def task(self, id: str) -> TaskSheet:
        from headway.views.queue import TaskSheet

        return parse(TaskSheet, self._connection.get(f"/tasks/{part(id)}"))

    def workers(self) -> Workers:
        from headway.views.queue import Workers

        return parse(Workers, self._connection.get("/workers"))

    def task_causes(self, *, limit: int = 50) -> TaskCauses:
        from headway.views.failed import TaskCauses

        return parse(TaskCauses, self._connection.get("/task-causes", limit=limit))

    def rq_causes(self) -> RqCauses:
        from headway.views.failed import RqCauses

        return parse(RqCauses, self._connection.get("/rq-causes"))

    def performance(self, *, range: Literal["1h", "24h", "7d"] = "24h") -> Performances:
        from headway.views.system.performance import Performances

        return parse(Performances, self._connection.get("/performance", range=range))

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def projects(self, *, after: str = "", limit: int = 50) -> Projects:
        from headway.views.projects import Projects

        return parse(Projects, self._connection.get("/projects", after=after, limit=limit))

    def project(self, id: str) -> ProjectProgress:
        from headway.views.projects import ProjectProgress

        return parse(ProjectProgress, self._connection.get(f"/projects/{part(id)}"))

    def states_jobs(self) -> StatesJobs:
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
        """All current states of a job; with ``limit`` a page."""
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
        from headway.views.system.relay import RelayStatus

        return parse(RelayStatus, self._connection.get("/relay"))

    def activity(
        self, *, job: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 50
    ) -> Activity:
        from headway.views.system.access import Activity

        return parse(Activity, self._connection.get("/activity", job=job, actor=actor, before=before, limit=limit))

    def audit(self, job: str | None = None) -> Audit:
        """The whole trail, the oldest first."""
        from headway.views.system.records import Audit, AuditEntry

        entries: list[AuditEntry] = []
        page = self.activity(job=job, limit=PAGE)
        while True:
            entries += [AuditEntry(one.at, one.actor, one.action, one.job, one.detail) for one in page.activity]
            if page.next_before is None:
                return Audit(tuple(reversed(entries)))
            page = self.activity(job=job, before=page.next_before, limit=PAGE)

    def settings(self) -> Settings:
        from headway.views.system.records import Settings

        return parse(Settings, self._connection.get("/settings"))

    def health(self) -> Health:
        from headway.views.system.health import Health

        return parse(Health, self._connection.get("/health"))

    # ---- changing ----------------------------------------------------------------------------------------------------

    def retry_dead(
        self, job: str, *, cause: int | None = None, items: Sequence[str | int] = (), reason: str = ""
    ) -> Acted:
        return self._act(f"/jobs/{part(job)}/retry", cause=cause, items=list(items), reason=reason)

    def retry_all_dead(self, *, reason: str = "") -> Acted:
        """Every dead letter of every job."""
        return self._act("/dead/retry", reason=reason)

    def retry_tasks(self, *, cause: int | None = None, reason: str = "") -> Acted:
        """Failed tasks of a cause, or all of them."""
        return self._act("/task-causes/retry", cause=cause, reason=reason)

    def requeue_cause(self, cause: str, *, until: datetime | None = None, reason: str = "") -> Acted:
        """Failed jobs of RQ; those that had failed by ``until`` (`RqCause.last_seen`), or all."""
        from headway.views.shape import iso

        return self._act(f"/rq-causes/{part(cause)}/requeue", until=iso(until), reason=reason)

    def forget(self, job: str, *, reason: str = "") -> Acted:
        return self._act(f"/jobs/{part(job)}/forget", reason=reason)

    def pause_run(self, job: str, *, reason: str = "") -> Acted:
        return self._act(f"/jobs/{part(job)}/pause", reason=reason)

    def resume_run(self, job: str, *, reason: str = "") -> Acted:
        return self._act(f"/jobs/{part(job)}/resume", reason=reason)

    def stop_run(self, job: str, *, now: bool = False, reason: str = "") -> Acted:
        return self._act(f"/jobs/{part(job)}/stop", now=now, reason=reason)

    def scale_run(self, job: str, workers: int, *, reason: str = "") -> Acted:
        return self._act(f"/jobs/{part(job)}/scale", workers=workers, reason=reason)

    def pause(self, queue: str, *, reason: str = "", seconds: float | None = None) -> Acted:
        return self._act(f"/queues/{part(queue)}/pause", reason=reason, seconds=seconds)

    def resume(self, queue: str, *, reason: str = "") -> Acted:
        return self._act(f"/queues/{part(queue)}/resume", reason=reason)

    def cancel_task(self, task: str, *, reason: str = "") -> Acted:
        return self._act(f"/tasks/{part(task)}/cancel", reason=reason)

    def retry_task(self, task: str, *, reason: str = "") -> Acted:
        return self._act(f"/tasks/{part(task)}/retry", reason=reason)

    def drain_worker(self, worker: str, *, reason: str = "") -> Acted:
        return self._act(f"/workers/{part(worker)}/drain", reason=reason)

    def stop_worker(self, worker: str, *, reason: str = "") -> Acted:
        return self._act(f"/workers/{part(worker)}/stop", reason=reason)

    def remove_worker(self, worker: str, *, reason: str = "") -> Acted:
        """One that was lost or has ended."""
        return self._act(f"/workers/{part(worker)}/remove", reason=reason)

    def acknowledge(self, alert: int, *, reason: str = "") -> Acted:
        return self._act(f"/alerts/{alert}/acknowledge", reason=reason)

    def mute(self, rule: str, *, seconds: float = 3600.0, subject: str = "", reason: str = "") -> Acted:
        return self._act(f"/alert-rules/{part(rule)}/mute", seconds=seconds, subject=subject, reason=reason)

    def unmute(self, rule: str, *, subject: str = "", reason: str = "") -> Acted:
        return self._act(f"/alert-rules/{part(rule)}/unmute", subject=subject, reason=reason)

    def _act(self, path: str, **body: object) -> Acted:
        from headway.views.system.access import Acted

        return parse(Acted, self._connection.post(path, **body))


_ASYNC: weakref.WeakSet[AsyncClient] = weakref.WeakSet()


class AsyncClient:
    """`Client` for event loops: ``await client.ask(Client.items, "ads", status="dead")``.

    The questions are those of `Client`, with their types; each is asked in one of a few threads of its own, with a
    connection each, so that the loop goes on. What gives an iterator is read page by page (`Client.log_page`).
    """

    def __init__(
        self, address: str, token: str | None = None, *, timeout: float = TIMEOUT, connections: int = 4
    ) -> None:
        self._all = tuple(Client(address, token, timeout=timeout) for _ in range(connections))
        self.begin()
        _ASYNC.add(self)

    def begin(self) -> None:
        """With threads that live: a forked child has none of its parent's, and would wait for them for ever."""
        self._free = list(self._all)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="headway-client")

    async def ask(self, question: Callable[Concatenate[Client, P], T], *args: P.args, **options: P.kwargs) -> T:
        def call() -> T:
            client = self._free.pop()  # there are as many as there are threads
            try:
                return question(client, *args, **options)
            finally:
                self._free.append(client)

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
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
