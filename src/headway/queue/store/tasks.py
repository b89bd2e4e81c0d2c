"""Read, cancel and count task rows; pause queues. The rows are authoritative; RQ only carries their ids.

Every function works inside the caller's transaction. A change and its event are written in that same transaction.
In this package, `insert` accepts tasks, `claim` claims them and `complete` records outcomes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from headway._sql import Row, Tx, Value, marks
from headway.errors import InvalidInput, NotFound
from headway.events import Event, append
from headway.queue.task import (
    PRIORITIES,
    Priority,
    QueueInfo,
    Status,
    Task,
    check_text,
    moment,
)

#: Turn of a delayed task. `claims.promote` assigns the real turn. It does not affect the turns of other tasks.
NO_TURN = -1
#: `listing` first looks for a page among this many of the newest tasks.
NEWEST = 5000

_COLUMNS = (
    "id, kind, queue, status, version, user_id, role, attempts, retries, percent, message, error, worker, "
    "created_at, updated_at, run_at, started_at, ended_at, cancel_by"
)
_T = TypeVar("_T")
LOCKED = {"sqlite": "", "postgresql": " FOR UPDATE"}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def task_of(row: Row) -> Task:
    """Convert a row of `_COLUMNS` to a task."""
    (id, kind, queue, status, version, user_id, role, attempts, retries, percent, message, error, worker,
     created_at, updated_at, run_at, started_at, ended_at, cancel_by) = row  # fmt: skip
    return Task(
        id=id, kind=kind, priority=Priority(queue), status=Status(status), version=version, user_id=user_id, role=role,
        attempts=attempts, retries=retries, percent=percent, message=message, error=error, worker=worker,
        created_at=moment(created_at), updated_at=moment(updated_at), run_at=moment(run_at),
        started_at=None if started_at is None else moment(started_at),
        ended_at=None if ended_at is None else moment(ended_at),
        cancelling=cancel_by is not None and not Status(status).is_final,
    )  # fmt: skip


def read(tx: Tx, ids: Iterable[str]) -> list[Task]:
    """Return the tasks that exist among ``ids``, in order of submission."""
    found: list[Row] = []
    for page in pages(sorted(ids)):
        found += tx.all(f"SELECT {_COLUMNS}, no FROM tasks WHERE id IN ({marks(len(page))})", page)
    return [task_of(row[:-1]) for row in sorted(found, key=lambda row: int(row[-1]))]


def get(tx: Tx, id: str, *, user_id: str | None = None) -> Task:
    """Return one task. With ``user_id``, another user's task raises `NotFound` like a missing one."""
    task, _ = get_with(tx, id, "NULL", user_id=user_id)
    return task


def get_with(tx: Tx, id: str, column: str, *, user_id: str | None = None) -> tuple[Task, Any]:
    """Return one task and the value of another column, read from the row at the same moment."""
    row = tx.one(f"SELECT {_COLUMNS}, {column} FROM tasks WHERE id = ?", (id,))
    task = task_of(row[:-1]) if row is not None else None
    if row is None or task is None or (user_id is not None and task.user_id != user_id):
        raise NotFound(f"There is no task {id}.", hint="List them: headway tasks")
    return task, row[-1]


def listing(
    tx: Tx,
    *,
    status: Status | None = None,
    queue: Priority | None = None,
    kind: str | None = None,
    user_id: str | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[Task]:
    """List matching tasks, newest first. ``before``: id of the last task on the previous page."""
    where, values = ["true"], list[Value]()
    if status is not None:  # as text: with a parameter the cached plan cannot use the partial index
        where.append(f"status = '{Status(status).value}'")
    for column, wanted in (("queue", queue), ("kind", kind), ("user_id", user_id)):
        if wanted is not None:
            where.append(f"{column} = ?")
            values.append(str(wanted))
    bound = None if before is None else _number_of(tx, before, user_id=user_id)
    if bound is not None:
        where.append("no < ?")
        values.append(bound)
    listed = f"SELECT {_COLUMNS} FROM tasks WHERE {{where}} ORDER BY {{order}} DESC LIMIT {int(limit)}"
    if status in (None, Status.QUEUED, Status.COMPLETED) and user_id is None:
        # There may be a million such tasks, so the newest tasks overall probably include a full page. The bounds make the
        # primary key the cheapest path even without statistics. `status || ''` keeps the planner off the partial indexes.
        near = ["no > ? AND no <= ?", *where[:1], *(one.replace("status", "status || ''") for one in where[1:])]
        newest = bound - 1 if bound is not None else int((tx.one("SELECT coalesce(max(no), 0) FROM tasks") or (0,))[0])
        rows = tx.all(listed.format(where=" AND ".join(near), order="no"), [newest - NEWEST, newest, *values])
        if len(rows) == limit:
            return [task_of(row) for row in rows]
    # Active tasks have their own indexes. Scanning back from the newest task could pass a million ended ones.
    order = "+no" if status in (Status.QUEUED, Status.RUNNING) else "no"
    rows = tx.all(listed.format(where=" AND ".join(where), order=order), values)
    return [task_of(row) for row in rows]


def _number_of(tx: Tx, id: str, *, user_id: str | None) -> int:
    """Return the number of a page's last task. Raises `NotFound` if it was deleted, so the list does not seem to end."""
    row = tx.one("SELECT no, user_id FROM tasks WHERE id = ?", (id,))
    if row is None or (user_id is not None and row[1] != user_id):
        raise NotFound(f"There is no task {id} (any more) to list older ones of.", hint="Begin with the newest.")
    return int(row[0])


def newest_of(tx: Tx, users: Sequence[str], *, limit: int = 20) -> list[Task]:
    """Return each user's newest tasks, with one statement for up to 500 users."""
    of_one = f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE user_id = ? ORDER BY no DESC LIMIT ?) newest"
    found = []
    for page in pages(users):
        values = [value for user in page for value in (user, limit)]
        found += [task_of(row) for row in tx.all(" UNION ALL ".join([of_one] * len(page)), values)]
    return found


def astir(tx: Tx, *, since: float, limit: int = 100) -> list[Task]:
    """Return the newest running tasks and the newest tasks that ended after ``since`` (a timestamp)."""
    rows = tx.all(
        f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE status = 'RUNNING' ORDER BY no DESC LIMIT ?) running UNION ALL "
        f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE ended_at > ? ORDER BY ended_at DESC LIMIT ?) ended",
        (limit, since, limit),
    )
    return [task_of(row) for row in rows]


def queue_infos(tx: Tx, *, unserved: Mapping[str, Sequence[str]]) -> list[QueueInfo]:
    """Return the four queues in order of service. Ended tasks are counted for the last hour and in total.

    ``unserved``: queue -> kinds of its waiting tasks that no online worker runs (`workers.unserved`).
    """
    now = tx.now()
    waiting = {
        (queue, ready): (count, oldest)
        for queue, ready, count, oldest in tx.all(
            "SELECT queue, ready, count(*), min(created_at) FROM tasks WHERE status = 'QUEUED' GROUP BY queue, ready"
        )
    }
    running: dict[str, int] = dict(tx.all("SELECT queue, count(*) FROM tasks WHERE status = 'RUNNING' GROUP BY queue"))
    ended = {queue: counts for queue, *counts in tx.all(_ENDED, (int(now // 60) - 60,) * 3)}
    paused = {
        name: facts for name, *facts in tx.all("SELECT name, paused, paused_by, paused_until, reason FROM task_queues")
    }
    infos = []
    for priority in PRIORITIES:
        count, oldest = waiting.get((priority.value, 1), (0, None))
        is_paused, by, until, reason = paused.get(priority.value, (0, None, None, ""))
        stands = bool(is_paused) and (until is None or until > now)
        completed, failed, cancelled, *totals = (int(n or 0) for n in ended.get(priority.value, (0,) * 5))
        infos.append(
            QueueInfo(
                priority=priority, waiting=int(count), delayed=int(waiting.get((priority.value, 0), (0, None))[0]),
                running=int(running.get(priority.value, 0)),
                oldest_wait=None if oldest is None else max(0.0, now - oldest),
                paused=stands, paused_by=by if stands else None, reason=reason if stands else "",
                paused_until=moment(until) if stands and until is not None else None,
                completed=completed, failed=failed, cancelled=cancelled,
                unserved=tuple(unserved.get(priority.value, ())), completed_total=totals[0], failed_total=totals[1],
            )
        )  # fmt: skip
    return infos


#: Ended tasks per queue since a given minute (passed three times), and the totals. One statement, because another transaction
#: may add minutes to the totals at any time.
_ENDED = (
    "SELECT q.name, m.completed, m.failed, m.cancelled, q.completed + coalesce(m.all_completed, 0), "
    "q.failed + coalesce(m.all_failed, 0) FROM task_queues q LEFT JOIN (SELECT t.queue, "
    "sum(CASE WHEN t.minute > ? THEN t.completed ELSE 0 END) AS completed, "
    "sum(CASE WHEN t.minute > ? THEN t.failed ELSE 0 END) AS failed, "
    "sum(CASE WHEN t.minute > ? THEN t.cancelled ELSE 0 END) AS cancelled, "
    "sum(CASE WHEN t.minute > u.counted_until THEN t.completed ELSE 0 END) AS all_completed, "
    "sum(CASE WHEN t.minute > u.counted_until THEN t.failed ELSE 0 END) AS all_failed "
    "FROM task_minutes t JOIN task_queues u ON u.name = t.queue "
    "WHERE t.minute > (SELECT min(counted_until) FROM task_queues) GROUP BY t.queue) m ON m.queue = q.name"
)

#: Age in minutes at which a minute is added to the totals. No transaction lasts that long; the last hour is read from rows.
MINUTES_OPEN = 120


def add_up_minutes(tx: Tx) -> None:
    """Add past minutes to the totals of their queues, so that readers need not sum the whole history."""
    until = int(tx.now() // 60) - MINUTES_OPEN
    over = "FROM task_minutes m WHERE m.queue = task_queues.name AND m.minute > task_queues.counted_until AND m.minute <= ?"
    tx.execute(
        f"UPDATE task_queues SET completed = completed + coalesce((SELECT sum(m.completed) {over}), 0), "
        f"failed = failed + coalesce((SELECT sum(m.failed) {over}), 0), counted_until = ? WHERE counted_until < ?",
        (until, until, until, until),
    )


def count_waiting(tx: Tx, queues: Sequence[Priority], kinds: Sequence[str], *, most: int) -> int:
    """Count ready tasks of these queues and kinds, up to ``most``. Paused queues are excluded."""
    if not kinds:
        return 0
    row = tx.one(
        "SELECT count(*) FROM (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 1 "
        f"AND place IN ({marks(len(queues))}) AND kind IN ({marks(len(kinds))}) AND queue NOT IN "
        "(SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)) "
        f"LIMIT {int(most)}) AS found",
        (*(queue.place for queue in queues), *kinds, tx.now()),
    )
    return int(row[0]) if row else 0


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling, pausing


def cancel(tx: Tx, id: str, *, by: str, user_id: str | None = None) -> Task:
    """Cancel a waiting task at once, or ask a running task's worker to stop. An ended task does not change."""
    check_actor(by)
    row = tx.one(f"SELECT no, status, user_id FROM tasks WHERE id = ?{LOCKED[tx.engine]}", (id,))
    if row is None or (user_id is not None and row[2] != user_id):
        return get(tx, id, user_id=user_id)  # raises NotFound
    no, status, _ = row
    now = tx.now()
    if status == Status.QUEUED:
        tx.execute(
            "UPDATE tasks SET status = 'CANCELLED', version = version + 1, cancel_by = ?, ended_at = ?, updated_at = ?, "
            "message = ? WHERE no = ?",
            (by, now, now, f"cancelled by {by}", no),
        )
        task = get(tx, id)
        tell(tx, task, now)
        count_minutes(tx, now, cancelled=[task])
        return task
    if status == Status.RUNNING:
        tx.execute(
            "UPDATE tasks SET version = version + 1, cancel_by = coalesce(cancel_by, ?), updated_at = ? WHERE no = ?",
            (by, now, no),
        )
    return get(tx, id)


def pause(tx: Tx, queue: Priority, *, reason: str, by: str, until: datetime | None) -> None:
    """Pause a queue until it is resumed, or until ``until`` (a datetime with a time zone)."""
    check_actor(by, reason)
    if until is not None and getattr(until, "tzinfo", None) is None:
        raise InvalidInput(
            "until= is no time that is the same everywhere.", hint="Use datetime.now(UTC) + timedelta(...)"
        )
    end = None if until is None else _seconds(until)
    if end is not None and end <= tx.now():
        raise InvalidInput(
            "until= is over already: the queue would not be paused.", hint="Use a time to come, or none."
        )
    tx.execute(
        "UPDATE task_queues SET paused = 1, paused_by = ?, paused_at = ?, paused_until = ?, reason = ? WHERE name = ?",
        (by, tx.now(), end, reason, queue.value),
    )
    audit(
        tx, by, "queue.pause",
        {"queue": queue.value, "reason": reason, "until": None if until is None else until.isoformat(timespec="seconds")},
    )  # fmt: skip


def _seconds(until: datetime) -> float:
    """Convert to a timestamp. Near `datetime.max` the float rounds to a value that cannot be converted back."""
    try:
        moment(until.timestamp())
        return until.timestamp()
    except (ValueError, OverflowError):
        raise InvalidInput(
            "until= is further away than time is counted.", hint="Use none: until it is resumed."
        ) from None


def resume(tx: Tx, queue: Priority, *, by: str, reason: str = "") -> bool:
    """Resume a queue; return whether it was paused."""
    check_actor(by, reason)
    changed = tx.execute(
        "UPDATE task_queues SET paused = 0, paused_by = NULL, paused_until = NULL, reason = '' "
        "WHERE name = ? AND paused = 1",
        (queue.value,),
    )
    if changed:
        audit(tx, by, "queue.resume", {"queue": queue.value, "reason": reason})
    return changed == 1


# ---------------------------------------------------------------------------------------------------------------------
# Audit trail


def check_actor(by: object, reason: object = "") -> None:
    """Validate the actor and the reason of an operation."""
    check_text(by, "who does it")
    check_text(reason, "a reason")


def audit(tx: Tx, by: str, action: str, detail: Mapping[str, object]) -> None:
    """Write an audit trail entry (`headway audit`)."""
    check_actor(by)
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, '', ?)",
        (tx.now(), by, action, json.dumps(detail, ensure_ascii=False)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Events and counts


def tell(tx: Tx, task: Task, now: float) -> None:
    """Append the event of a status change. The event id contains the version, so each change has one event."""
    data: dict[str, Any] = {
        "kind": task.kind,
        "status": task.status.value,
        "queue": task.priority.value,
        "user_id": task.user_id,
        "attempts": task.attempts,
        "error": task.error,
    }
    append(
        tx,
        Event(
            id=f"{task.id}-{task.version}",
            type=f"task.{task.status.value.lower()}",
            at=datetime.fromtimestamp(now, UTC),
            source="headway.queue",
            job=task.id,
            version=task.version,
            data=data,
        ),
    )


def wake(tx: Tx) -> None:
    """Notify workers that listen to the database that tasks may be claimable. On SQLite this does nothing."""
    if tx.engine == "postgresql":
        tx.one("SELECT pg_notify('headway_tasks', '')")


def count_minutes(
    tx: Tx,
    now: float,
    *,
    submitted: Iterable[Task] = (),
    completed: Iterable[Task] = (),
    failed: Iterable[Task] = (),
    cancelled: Iterable[Task] = (),
    failures: Iterable[Task] = (),
    wait_seconds: float = 0.0,
    run_seconds: float = 0.0,
    share: int | None = None,
) -> None:
    """Add to the counters of the current minute, in this process's share so that writers rarely block each other.

    ``share``: a separate share for a long transaction, so that other writers do not wait for its rows.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for place, tasks in enumerate((submitted, completed, failed, cancelled, failures)):
        for task in tasks:
            sums.setdefault((task.priority.value, task.kind), [0] * 5)[place] += 1
    share = os.getpid() % 16 if share is None else share
    for (queue, kind), counts in sorted(sums.items()):
        tx.execute(
            "INSERT INTO task_minutes (minute, queue, kind, share, submitted, completed, failed, cancelled, failures, "
            "wait_seconds, run_seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (minute, queue, kind, share) DO UPDATE SET submitted = task_minutes.submitted + excluded.submitted, "
            "completed = task_minutes.completed + excluded.completed, failed = task_minutes.failed + excluded.failed, "
            "cancelled = task_minutes.cancelled + excluded.cancelled, failures = task_minutes.failures + excluded.failures, "
            "wait_seconds = task_minutes.wait_seconds + excluded.wait_seconds, "
            "run_seconds = task_minutes.run_seconds + excluded.run_seconds",
            (int(now // 60), queue, kind, share, *counts, wait_seconds, run_seconds),
        )
        wait_seconds = run_seconds = 0.0  # totals of the whole call: add them only once


def pages(values: Sequence[_T], size: int = 500) -> Iterable[Sequence[_T]]:
    """Split ``values`` into slices of at most ``size``."""
    return (values[start : start + size] for start in range(0, len(values), size))
