"""The queue: its four queues, its tasks, its workers."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway.queue.store.workers import Online
    from headway.queue.task import QueueInfo, Task
    from headway.queue.task_queue import TaskQueue


class QueueView(NamedTuple):
    """One queue."""

    queue: Annotated[str, "urgent, high, normal or low"]
    waiting: Annotated[int, "tasks that may run now"]
    delayed: Annotated[int, "tasks that wait for their time"]
    running: Annotated[int, "tasks that run"]
    oldest_wait: Annotated[float | None, "seconds the longest waiting task waits"]
    completed: Annotated[int, "tasks completed in the last hour"]
    failed: Annotated[int, "tasks that failed for good in the last hour"]
    cancelled: Annotated[int, "tasks cancelled in the last hour"]
    paused: Annotated[bool, "whether nothing of it is handed out"]
    paused_by: Annotated[str | None, "who paused it"]
    paused_until: Annotated[datetime | None, "when it goes on by itself"]
    reason: Annotated[str, "why it is paused"]
    unserved: Annotated[tuple[str, ...], "kinds of waiting tasks that no online worker runs"] = ()
    completed_total: Annotated[int, "tasks completed since counting began, purged ones included"] = 0
    failed_total: Annotated[int, "tasks that failed for good since counting began, purged ones included"] = 0


class Queues(NamedTuple):
    """`headway queues`: the queues, in the order of service."""

    queues: Annotated[tuple[QueueView, ...], "urgent, high, normal, low"]
    workers_online: Annotated[int | None, "online workers; null: an older server does not tell"] = None

    def as_json(self) -> Json:
        return document(self)


class TaskView(NamedTuple):
    """One task."""

    id: Annotated[str, "the task's id"]
    kind: Annotated[str, "which handler runs it"]
    queue: Annotated[str, "urgent, high, normal or low"]
    status: Annotated[str, "QUEUED, RUNNING, COMPLETED, FAILED or CANCELLED"]
    version: Annotated[int, "grows with every change"]
    user_id: Annotated[str | None, "who asked for it"]
    role: Annotated[str, "the role they had"]
    attempts: Annotated[int, "runs that did not succeed"]
    retries: Annotated[int, "how many further tries it may have"]
    percent: Annotated[float, "how far it is, 0 to 100"]
    message: Annotated[str, "what its handler said last"]
    error: Annotated[str | None, "why the last run did not succeed"]
    worker: Annotated[str | None, "who runs it or ran it last"]
    cancelling: Annotated[bool, "somebody asked for it to be cancelled, and it still runs"]
    created_at: Annotated[datetime, "when it was submitted"]
    updated_at: Annotated[datetime, "when it changed last"]
    run_at: Annotated[datetime, "not before"]
    started_at: Annotated[datetime | None, "when its last run began"]
    ended_at: Annotated[datetime | None, "when it was over"]


class Tasks(NamedTuple):
    """`headway tasks`: the newest tasks that match."""

    tasks: Annotated[tuple[TaskView, ...], "newest first"]
    next: Annotated[str | None, "the id to continue from: --before"]

    def as_json(self) -> Json:
        return document(self)


class TaskAttempt(NamedTuple):
    """A run of a task that did not succeed."""

    no: Annotated[int, "number of the run"]
    outcome: Annotated[str, "failed, timeout, memory or lost"]
    error: Annotated[str, "why"]
    worker: Annotated[str | None, "who ran it"]
    at: Annotated[datetime, "when it ended"]
    seconds: Annotated[float | None, "how long it took"]
    traceback: Annotated[str | None, "its traceback, cut to the last 4,000 characters; not for a role user"] = None


class TaskSheet(NamedTuple):
    """`headway task show`: one task with the runs that did not succeed."""

    task: Annotated[TaskView, "the task"]
    runs: Annotated[tuple[TaskAttempt, ...], "oldest first"]
    unserved: Annotated[bool, "whether it waits and no online worker runs its kind"] = False
    hinted_at: Annotated[datetime | None, "when its id was put into RQ last; null: RQ does not know the task"] = None
    workers_online: Annotated[int | None, "online workers; null: an older server does not tell"] = None

    def as_json(self) -> Json:
        return document(self)


class WorkerView(NamedTuple):
    """One worker."""

    name: Annotated[str, "its name"]
    host: Annotated[str, "where it runs"]
    pid: Annotated[int, "its process"]
    state: Annotated[str, "idle, busy, ended or lost"]
    queues: Annotated[tuple[str, ...], "what it serves, in order"]
    task: Annotated[str | None, "what it runs"]
    completed: Annotated[int, "tasks it completed"]
    failed: Annotated[int, "runs that did not succeed"]
    rss: Annotated[int | None, "bytes of memory"]
    version: Annotated[str, "of headway"]
    wanted: Annotated[str | None, "drain or stop: what an operator asked for"]
    wanted_by: Annotated[str | None, "who asked for it"]
    wanted_at: Annotated[datetime | None, "when they did"]
    started_at: Annotated[datetime, "when it began"]
    seen_at: Annotated[datetime, "its last sign of life"]


class Workers(NamedTuple):
    """`headway workers`: those that work, and those that ended in the last day."""

    workers: Annotated[tuple[WorkerView, ...], "the living first"]

    def as_json(self) -> Json:
        return document(self)


class QueueSetting(NamedTuple):
    """One setting of the running queue."""

    name: Annotated[str, "its name"]
    value: Annotated[float | str | None, "its value; a text only where it is refused"]
    origin: Annotated[str, "where the value comes from; operator: headway queue set"]
    set_by: Annotated[str | None, "who set it"]
    set_at: Annotated[datetime | None, "when they did"]


class QueueSettings(NamedTuple):
    """`headway queue settings`: what workers and supervisors go by, as this host sees it."""

    settings: Annotated[tuple[QueueSetting, ...], "the settings"]

    def as_json(self) -> Json:
        return document(self)


def read_queues(queue: TaskQueue) -> Queues:
    from headway.queue.store.workers import online_workers

    with queue.database.read() as tx:
        online = len(online_workers(tx))
    return Queues(tuple(_view(QueueView, info) for info in queue.stats()), online)


def task_view(task: Task) -> TaskView:
    return _view(TaskView, task)


_V = TypeVar("_V", QueueView, TaskView)


def _view(kind: type[_V], value: Task | QueueInfo) -> _V:
    """By the names of its fields: `as_json` of the value has the same."""
    from headway.queue.task import JSON_NAMES

    names = {key: name for name, key in JSON_NAMES.items()}
    found: list[Any] = [getattr(value, names.get(field, field)) for field in kind._fields]
    return kind._make(str(each) if isinstance(each, StrEnum) else each for each in found)


def read_settings(queue: TaskQueue) -> QueueSettings:
    from headway.queue.settings import listing

    found = listing(queue.database, queue.worker_config({}))
    return QueueSettings(tuple(QueueSetting(one.name, one.value, one.origin, one.set_by, one.set_at) for one in found))


def read_tasks(
    queue: TaskQueue,
    *,
    status: str | None = None,
    name: str | None = None,
    kind: str | None = None,
    user_id: str | None = None,
    before: str | None = None,
    limit: int = 50,
) -> Tasks:
    found = queue.list(status=status, queue=name, kind=kind, user_id=user_id, before=before, limit=limit)
    return Tasks(tuple(task_view(task) for task in found), found[-1].id if len(found) == limit else None)


def read_task(queue: TaskQueue, id: str, *, tracebacks: bool = True) -> TaskSheet:
    task = queue.get(id)
    rows = queue.database.all(
        "SELECT a.no, a.outcome, a.error, a.worker, a.at, a.seconds, a.detail FROM task_attempts a "
        "JOIN tasks t ON t.no = a.task WHERE t.id = ? ORDER BY a.no",
        (id,),
    )
    from headway.queue.task import moment

    runs = [
        TaskAttempt(no, outcome, error, who, moment(at), took, detail if tracebacks else None)
        for no, outcome, error, who, at, took, detail in rows
    ]
    from headway.queue.store.workers import online_workers

    with queue.database.read() as tx:
        online, now = online_workers(tx), tx.now()
    hinted = queue.database.one("SELECT hinted_at FROM tasks WHERE id = ?", (id,))
    return TaskSheet(
        task_view(task),
        tuple(runs),
        unserved=_is_unserved(task, online, now),
        hinted_at=None if hinted is None or hinted[0] is None else moment(hinted[0]),
        workers_online=len(online),
    )


def _is_unserved(task: Task, online: list[Online], now: float) -> bool:
    from headway.queue.store.workers import WaitingKind, unserved_by
    from headway.queue.task import Status

    run_at = task.run_at.timestamp()
    if task.status is not Status.QUEUED or run_at > now:
        return False
    return bool(unserved_by(online, [WaitingKind(task.priority.value, task.kind, 1, run_at)]))


def read_workers(queue: TaskQueue) -> Workers:
    """One that nobody marked as lost is lost all the same: whoever marks them may be lost too."""
    from headway._sql import NOW
    from headway.queue.store.workers import is_gone
    from headway.queue.task import moment

    rows = queue.database.all(
        "SELECT name, host, pid, state, queues, task, completed, failed, rss, version, wanted, wanted_by, wanted_at, "
        f"started_at, seen_at, owner, ended_at, {NOW[queue.database.engine]} FROM task_workers "
        "ORDER BY ended_at IS NOT NULL, started_at, name"
    )
    return Workers(
        tuple(
            WorkerView(
                name, host, pid, "lost" if ended_at is None and is_gone(owner, seen_at, now) else state,
                tuple(queues.split(",")), task, completed, failed, rss, version, wanted, wanted_by,
                None if wanted_at is None else moment(wanted_at), moment(started_at), moment(seen_at),
            )
            for name, host, pid, state, queues, task, completed, failed, rss, version, wanted, wanted_by, wanted_at,
                started_at, seen_at, owner, ended_at, now in rows
        )
    )  # fmt: skip
