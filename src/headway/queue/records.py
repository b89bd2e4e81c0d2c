"""The rows of tasks: reading, cancelling, pausing. The rows are the truth; RQ only carries their ids.

Every function works inside the caller's transaction, and every change appends its event there: the event exists exactly
if the change does. What lets a task in is in `headway.queue.admission`, handing out and settling in `headway.queue.claims`.
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
from headway.queue.values import (
    PRIORITIES,
    Priority,
    QueueInfo,
    Status,
    Task,
    check_text,
    moment,
)

#: The turn of a task that may not run yet: it is given one when it may (`claims.promote`), and counts for nobody's next.
NO_TURN = -1
#: Among so many of the newest tasks a page of them is looked for first.
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
    """These tasks, as far as they are there, in the order in which they came."""
    found: list[Row] = []
    for page in pages(sorted(ids)):
        found += tx.all(f"SELECT {_COLUMNS}, no FROM tasks WHERE id IN ({marks(len(page))})", page)
    return [task_of(row[:-1]) for row in sorted(found, key=lambda row: int(row[-1]))]


def get(tx: Tx, id: str, *, user_id: str | None = None) -> Task:
    """One task. With ``user_id`` another user's task is as missing as one that never was."""
    task, _ = get_with(tx, id, "NULL", user_id=user_id)
    return task


def get_with(tx: Tx, id: str, column: str, *, user_id: str | None = None) -> tuple[Task, Any]:
    """One task, and what stands in one more column of its row at the same moment."""
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
    """The newest tasks that match, older than the task ``before`` (the last one of the page before this one)."""
    where, values = ["true"], list[Value]()
    if status is not None:  # in the text: for a parameter PostgreSQL keeps a plan without the index of that status
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
        # Of these there may be a million, and then the newest of all are among them. The bounds leave a planner without
        # statistics nothing cheaper than them, and what is done to the status keeps it from the indexes of those who wait.
        near = ["no > ? AND no <= ?", *where[:1], *(one.replace("status", "status || ''") for one in where[1:])]
        newest = bound - 1 if bound is not None else int((tx.one("SELECT coalesce(max(no), 0) FROM tasks") or (0,))[0])
        rows = tx.all(listed.format(where=" AND ".join(near), order="no"), [newest - NEWEST, newest, *values])
        if len(rows) == limit:
            return [task_of(row) for row in rows]
    # The few that are active have indexes of their own: a walk from the newest task back to them could pass a million.
    order = "+no" if status in (Status.QUEUED, Status.RUNNING) else "no"
    rows = tx.all(listed.format(where=" AND ".join(where), order=order), values)
    return [task_of(row) for row in rows]


def _number_of(tx: Tx, id: str, *, user_id: str | None) -> int:
    """Of a task that a page ended with. One that was deleted since is said: an empty page would be taken for the last."""
    row = tx.one("SELECT no, user_id FROM tasks WHERE id = ?", (id,))
    if row is None or (user_id is not None and row[1] != user_id):
        raise NotFound(f"There is no task {id} (any more) to list older ones of.", hint="Begin with the newest.")
    return int(row[0])


def newest_of(tx: Tx, users: Sequence[str], *, limit: int = 20) -> list[Task]:
    """The newest tasks of each of these users, by one statement for hundreds of them."""
    of_one = f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE user_id = ? ORDER BY no DESC LIMIT ?) newest"
    found = []
    for page in pages(users):
        values = [value for user in page for value in (user, limit)]
        found += [task_of(row) for row in tx.all(" UNION ALL ".join([of_one] * len(page)), values)]
    return found


def astir(tx: Tx, *, since: float, limit: int = 100) -> list[Task]:
    """Tasks that run, and those that ended after ``since``; the newest of each."""
    rows = tx.all(
        f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE status = 'RUNNING' ORDER BY no DESC LIMIT ?) running UNION ALL "
        f"SELECT * FROM (SELECT {_COLUMNS} FROM tasks WHERE ended_at > ? ORDER BY ended_at DESC LIMIT ?) ended",
        (limit, since, limit),
    )
    return [task_of(row) for row in rows]


def queue_infos(tx: Tx, *, unserved: Mapping[str, Sequence[str]]) -> list[QueueInfo]:
    """Return the four queues in the order of service. Ended tasks are counted over the last hour and in all.

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


#: Ended tasks of each queue since a minute (given three times), then the totals. It is one statement because another
#: transaction may add minutes to the totals at any time.
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

#: Minutes after which a minute is added to the totals. No transaction lasts that long, and the last hour is read from the rows.
MINUTES_OPEN = 120


def add_up_minutes(tx: Tx) -> None:
    """Add the minutes that are over to the totals of their queues, so that readers need not sum the whole history."""
    until = int(tx.now() // 60) - MINUTES_OPEN
    over = "FROM task_minutes m WHERE m.queue = task_queues.name AND m.minute > task_queues.counted_until AND m.minute <= ?"
    tx.execute(
        f"UPDATE task_queues SET completed = completed + coalesce((SELECT sum(m.completed) {over}), 0), "
        f"failed = failed + coalesce((SELECT sum(m.failed) {over}), 0), counted_until = ? WHERE counted_until < ?",
        (until, until, until, until),
    )


def count_waiting(tx: Tx, queues: Sequence[Priority], kinds: Sequence[str], *, most: int) -> int:
    """Count tasks of these queues and kinds that may run now, up to ``most``."""
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
    """Cancel a task that waits at once; ask the worker of one that runs. One that has ended stays as it is."""
    check_actor(by)
    row = tx.one(f"SELECT no, status, user_id FROM tasks WHERE id = ?{LOCKED[tx.engine]}", (id,))
    if row is None or (user_id is not None and row[2] != user_id):
        return get(tx, id, user_id=user_id)  # says that there is none
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
    """As it is kept. The last moment that there is becomes, as a float, one that nobody can read any more."""
    try:
        moment(until.timestamp())
        return until.timestamp()
    except (ValueError, OverflowError):
        raise InvalidInput(
            "until= is further away than time is counted.", hint="Use none: until it is resumed."
        ) from None


def resume(tx: Tx, queue: Priority, *, by: str, reason: str = "") -> bool:
    """Whether it had been paused."""
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
# Who did what


def check_actor(by: object, reason: object = "") -> None:
    check_text(by, "who does it")
    check_text(reason, "a reason")


def audit(tx: Tx, by: str, action: str, detail: Mapping[str, object]) -> None:
    """A line of the audit trail (`headway audit`): who changed what."""
    check_actor(by)
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, '', ?)",
        (tx.now(), by, action, json.dumps(detail, ensure_ascii=False)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Events and counts


def tell(tx: Tx, task: Task, now: float) -> None:
    """The event of a change of status. Its id is the task's version, so a change has one event however often it is told."""
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
    """Tell workers that listen to the database that there may be something to claim; they look for themselves."""
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
    """Add to the current minute, in this process's share: two writers rarely wait for each other's row.

    ``share``: one of the caller's own, whose transaction may last, so that nobody waits for it.
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
        wait_seconds = run_seconds = 0.0  # of the whole call: counted once


def pages(values: Sequence[_T], size: int = 500) -> Iterable[Sequence[_T]]:
    return (values[start : start + size] for start in range(0, len(values), size))
