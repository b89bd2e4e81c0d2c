"""The queue: the four queues, tasks and workers."""

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
    waiting: Annotated[int, "tasks that are ready to run"]
    delayed: Annotated[int, "tasks scheduled for later"]
    running: Annotated[int, "tasks in progress"]
    oldest_wait: Annotated[float | None, "seconds that the oldest waiting task has waited"]
    completed: Annotated[int, "tasks completed in the last hour"]
    failed: Annotated[int, "tasks that failed permanently in the last hour"]
    cancelled: Annotated[int, "tasks cancelled in the last hour"]
    paused: Annotated[bool, "whether workers leave its tasks alone"]
    paused_by: Annotated[str | None, "who paused it"]
    paused_until: Annotated[datetime | None, "when it resumes by itself"]
    reason: Annotated[str, "why it is paused"]
    unserved: Annotated[tuple[str, ...], "kinds of waiting tasks that no online worker runs"] = ()
    completed_total: Annotated[int, "tasks completed since counting began, purged ones included"] = 0
    failed_total: Annotated[int, "tasks that failed permanently since counting began, purged ones included"] = 0
    workers: Annotated[int | None, "online workers that serve it; null: unknown, from an older server"] = None


class KindHoldView(NamedTuple):
    """A kind of which nothing starts now."""

    kind: Annotated[str, "the kind"]
    until: Annotated[datetime, "until when"]
    reason: Annotated[str, "the reason that the handler gave"]


class Queues(NamedTuple):
    """`headway queues`: the queues, in the order of service."""

    queues: Annotated[tuple[QueueView, ...], "urgent, high, normal, low"]
    workers_online: Annotated[int | None, "online workers; null: unknown, from an older server"] = None
    holds: Annotated[tuple[KindHoldView, ...], "kinds of which nothing starts now, by `RetryLater`"] = ()

    def as_json(self) -> Json:
        return document(self)


class TaskView(NamedTuple):
    """One task."""

    id: Annotated[str, "the task's id"]
    kind: Annotated[str, "the kind, which selects the handler"]
    queue: Annotated[str, "urgent, high, normal or low"]
    status: Annotated[str, "QUEUED, RUNNING, COMPLETED, FAILED or CANCELLED"]
    version: Annotated[int, "version; grows with every change"]
    user_id: Annotated[str | None, "the user it belongs to"]
    role: Annotated[str, "the user's role"]
    attempts: Annotated[int, "failed attempts"]
    retries: Annotated[int, "how often it may be retried"]
    percent: Annotated[float, "progress, 0 to 100"]
    message: Annotated[str, "the handler's last progress message"]
    error: Annotated[str | None, "the error of the last failed attempt"]
    worker: Annotated[str | None, "the worker that runs it or ran it last"]
    cancelling: Annotated[bool, "whether it was asked to cancel and still runs"]
    created_at: Annotated[datetime, "when it was submitted"]
    updated_at: Annotated[datetime, "when it last changed"]
    run_at: Annotated[datetime, "earliest start"]
    started_at: Annotated[datetime | None, "when its last attempt began"]
    ended_at: Annotated[datetime | None, "when it ended"]


class Tasks(NamedTuple):
    """`headway tasks`: the tasks that match."""

    tasks: Annotated[tuple[TaskView, ...], "newest first; with `oldest` the longest waiting first"]
    next: Annotated[str | None, "the id to continue from (`--before`)"]

    def as_json(self) -> Json:
        return document(self)


class TaskAttempt(NamedTuple):
    """A failed attempt at a task."""

    no: Annotated[int, "number of the attempt"]
    outcome: Annotated[str, "failed, timeout, memory or lost"]
    error: Annotated[str, "the error"]
    worker: Annotated[str | None, "the worker"]
    at: Annotated[datetime, "when it ended"]
    seconds: Annotated[float | None, "how long it took"]
    traceback: Annotated[str | None, "its last 4,000 characters; hidden from the role user"] = None


class TaskSheet(NamedTuple):
    """`headway task show`: one task with its failed attempts."""

    task: Annotated[TaskView, "the task"]
    runs: Annotated[tuple[TaskAttempt, ...], "oldest first"]
    unserved: Annotated[bool, "whether it is ready and no online worker runs its kind"] = False
    hinted_at: Annotated[datetime | None, "when its id was last given to RQ; null: RQ does not know the task"] = None
    workers_online: Annotated[int | None, "online workers; null: unknown, from an older server"] = None
    postponed: Annotated[int, "how often its handler postponed it by `RetryLater`"] = 0
    waits_until: Annotated[datetime | None, "until when it waits because of `RetryLater`"] = None
    waits_reason: Annotated[str, "why it waits until then"] = ""

    def as_json(self) -> Json:
        return document(self)


class WorkerView(NamedTuple):
    """One worker."""

    name: Annotated[str, "its name"]
    host: Annotated[str, "its machine"]
    pid: Annotated[int, "its process id"]
    state: Annotated[str, "idle, busy, ended or lost"]
    queues: Annotated[tuple[str, ...], "the queues it serves, in order"]
    task: Annotated[str | None, "the task it runs"]
    completed: Annotated[int, "tasks it completed"]
    failed: Annotated[int, "failed attempts"]
    rss: Annotated[int | None, "memory in bytes"]
    version: Annotated[str, "version of Headway"]
    wanted: Annotated[str | None, "drain or stop, if an operator asked for it"]
    wanted_by: Annotated[str | None, "who asked for it"]
    wanted_at: Annotated[datetime | None, "when"]
    started_at: Annotated[datetime, "when it started"]
    seen_at: Annotated[datetime, "its last heartbeat"]


class Workers(NamedTuple):
    """`headway workers`: online workers, and those that ended in the last day."""

    workers: Annotated[tuple[WorkerView, ...], "online workers first"]

    def as_json(self) -> Json:
        return document(self)


class QueueSetting(NamedTuple):
    """One setting of the running queue."""

    name: Annotated[str, "its name"]
    value: Annotated[float | str | None, "its value; a string if it was refused"]
    origin: Annotated[str, "where the value comes from; operator: headway queue set"]
    set_by: Annotated[str | None, "who set it"]
    set_at: Annotated[datetime | None, "when"]


class QueueSettings(NamedTuple):
    """`headway queue settings`: the settings that workers and supervisors use, as seen from this host."""

    settings: Annotated[tuple[QueueSetting, ...], "the settings"]

    def as_json(self) -> Json:
        return document(self)


def read_queues(queue: TaskQueue) -> Queues:
    """Read the four queues, the number of online workers and the held kinds."""
    from headway.queue.store.limits import holds
    from headway.queue.store.workers import online_workers

    with queue.database.read() as tx:
        online = len(online_workers(tx))
        held = tuple(KindHoldView(*each) for each in holds(tx))
    return Queues(queue_views(queue), online, held)


def queue_views(queue: TaskQueue) -> tuple[QueueView, ...]:
    """Read the four queues alone, for the live updates."""
    return tuple(_view(QueueView, info) for info in queue.stats())


def task_view(task: Task) -> TaskView:
    """Return the view of a task."""
    return _view(TaskView, task)


_V = TypeVar("_V", QueueView, TaskView)


def _view(kind: type[_V], value: Task | QueueInfo) -> _V:
    """Copy the fields of ``value`` by their JSON names."""
    from headway.queue.task import JSON_NAMES

    names = {key: name for name, key in JSON_NAMES.items()}
    values: list[Any] = [getattr(value, names.get(field, field)) for field in kind._fields]
    values = [str(each) if isinstance(each, StrEnum) else each for each in values]
    return kind(*values)


def read_settings(queue: TaskQueue) -> QueueSettings:
    """Read the settings of the running queue."""
    from headway.queue.settings import listing

    found = listing(queue.database, queue.backend.worker_config({}))
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
    """Read a page of tasks, newest first."""
    found = queue.list(status=status, queue=name, kind=kind, user_id=user_id, before=before, limit=limit)
    return Tasks(tuple(task_view(task) for task in found), found[-1].id if len(found) == limit else None)


def read_oldest(queue: TaskQueue, name: str, *, limit: int = 50) -> Tasks:
    """Read the tasks of a queue that have been ready for longest, oldest first."""
    from headway.queue.store.statistics import oldest_ready
    from headway.queue.task import Priority

    with queue.database.read() as tx:
        ids = oldest_ready(tx, Priority(name), limit)
    return Tasks(tuple(task_view(queue.get(id)) for id in ids), None)


def read_task(queue: TaskQueue, id: str, *, tracebacks: bool = True) -> TaskSheet:
    """Read a task with its failed attempts, and whether a worker can run it."""
    from headway.queue.store import statistics
    from headway.queue.store.limits import wait_of
    from headway.queue.store.workers import online_workers
    from headway.queue.task import moment

    task = queue.get(id)
    with queue.database.read() as tx:
        rows = statistics.failed_attempts(tx, id)
        online, now = online_workers(tx), tx.now()
        hinted = statistics.hinted_at(tx, id)
        postponed, waits = wait_of(tx, task)
    attempts = [
        TaskAttempt(no, outcome, error, worker, moment(at), took, traceback if tracebacks else None)
        for no, outcome, error, worker, at, took, traceback in rows
    ]
    return TaskSheet(
        task_view(task),
        tuple(attempts),
        unserved=_is_unserved(task, online, now),
        hinted_at=None if hinted is None else moment(hinted),
        workers_online=len(online),
        postponed=postponed,
        waits_until=waits and waits.until,
        waits_reason=waits.reason if waits else "",
    )


def _is_unserved(task: Task, online: list[Online], now: float) -> bool:
    """Return whether the task is ready and no online worker runs its kind."""
    from headway.queue.store.workers import WaitingKind, unserved_by
    from headway.queue.task import Status

    run_at = task.run_at.timestamp()
    if task.status is not Status.QUEUED or run_at > now:
        return False
    return bool(unserved_by(online, [WaitingKind(task.priority.value, task.kind, 1, run_at)]))


def read_workers(queue: TaskQueue) -> Workers:
    """Read the workers. A worker without a heartbeat is lost, even if no sweeper has marked it."""
    from headway.queue.store.statistics import listed_workers
    from headway.queue.task import moment

    with queue.database.read() as tx:
        rows = listed_workers(tx)
    return Workers(
        tuple(
            WorkerView(
                name, host, pid, state, tuple(queues.split(",")), task, completed, failed, rss, version, wanted, wanted_by,
                None if wanted_at is None else moment(wanted_at), moment(started_at), moment(seen_at),
            )
            for name, host, pid, state, queues, task, completed, failed, rss, version, wanted, wanted_by, wanted_at,
                started_at, seen_at in rows
        )
    )  # fmt: skip
