"""Read, cancel and count task rows. The rows are authoritative; RQ only carries their ids.

Every function works inside the caller's transaction. A change and its event are written in that same transaction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from headway._sql import Database, Row, Tx, Value, marks
from headway.errors import NotFound
from headway.queue.store import task_store
from headway.queue.task import PRIORITIES, Priority, QueueInfo, Status, Task, check_actor, moment

#: Turn of a delayed task. `claim.promote` assigns the real turn. It does not affect the turns of other tasks.
NO_TURN = -1
#: `listing` first searches this many of the newest tasks for a whole page.
NEWEST = 5000

COLUMNS = (
    "id, kind, queue, status, version, user_id, role, attempts, retries, percent, message, error, worker, "
    "created_at, updated_at, run_at, started_at, ended_at, cancel_by"
)
#: Columns that the event of a change is made of.
EVENT_COLUMNS = "id, kind, queue, status, version, user_id, attempts, error, updated_at"
_T = TypeVar("_T")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def task_of(row: Row) -> Task:
    """Convert a row of `COLUMNS` to a task."""
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
        found += tx.all(f"SELECT {COLUMNS}, no FROM tasks WHERE id IN ({marks(len(page))})", page)
    return [task_of(row[:-1]) for row in sorted(found, key=lambda row: int(row[-1]))]


def get(tx: Tx, id: str, *, user_id: str | None = None) -> Task:
    """Return one task. With ``user_id``, another user's task raises `NotFound` like a missing one."""
    task, _ = get_with(tx, id, "NULL", user_id=user_id)
    return task


def status_of(database: Database, id: str, *, user_id: str) -> Status | None:
    """Return the status of a user's task; None if there is none."""
    row = database.one("SELECT status FROM tasks WHERE id = ? AND user_id = ?", (id, user_id))
    return None if row is None else Status(row[0])


def get_with(tx: Tx, id: str, column: str, *, user_id: str | None = None) -> tuple[Task, Any]:
    """Return one task and the value of another column, read from the row at the same moment."""
    row = tx.one(f"SELECT {COLUMNS}, {column} FROM tasks WHERE id = ?", (id,))
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
    # As text: with a parameter the cached plan cannot use the partial index.
    has_status = "true" if status is None else f"status = '{Status(status).value}'"
    for column, wanted in (("queue", queue), ("kind", kind), ("user_id", user_id)):
        if wanted is not None:
            where.append(f"{column} = ?")
            values.append(str(wanted))
    bound = None if before is None else _number_of(tx, before, user_id=user_id)
    if status in (None, Status.QUEUED, Status.COMPLETED) and user_id is None:
        # There may be a million such tasks, so the newest tasks overall probably include a full page. The bounds make the
        # primary key the cheapest path even without statistics. The inner LIMIT keeps the status out of the subquery, where it
        # would make PostgreSQL choose a partial index.
        newest = bound - 1 if bound is not None else int((tx.one("SELECT coalesce(max(no), 0) FROM tasks") or (0,))[0])
        rows = tx.all(
            f"SELECT {COLUMNS} FROM (SELECT {COLUMNS}, no FROM tasks WHERE no > ? AND no <= ? AND {' AND '.join(where)} "
            f"ORDER BY no DESC LIMIT {NEWEST}) AS newest WHERE {has_status} ORDER BY no DESC LIMIT {int(limit)}",
            (newest - NEWEST, newest, *values),
        )
        if len(rows) == limit:
            return [task_of(row) for row in rows]
    if bound is not None:
        where.append("no < ?")
        values.append(bound)
    # Active tasks have their own indexes: `+no` is not the primary key, so their index is used and its rows are sorted.
    # Scanning back from the newest task could pass a million ended ones.
    order = "+no" if status in (Status.QUEUED, Status.RUNNING) else "no"
    rows = tx.all(
        f"SELECT {COLUMNS} FROM tasks WHERE {has_status} AND {' AND '.join(where)} ORDER BY {order} DESC LIMIT {int(limit)}",
        values,
    )
    return [task_of(row) for row in rows]


def _number_of(tx: Tx, id: str, *, user_id: str | None) -> int:
    """Return the number of a page's last task. Raises `NotFound` if it was deleted, so the list does not seem to end."""
    row = tx.one("SELECT no, user_id FROM tasks WHERE id = ?", (id,))
    if row is None or (user_id is not None and row[1] != user_id):
        raise NotFound(
            f"There is no task {id} to continue after; it may have been deleted.", hint="Start with the newest."
        )
    return int(row[0])


def newest_of(tx: Tx, users: Sequence[str], *, limit: int = 20) -> list[Task]:
    """Return each user's newest tasks, with one statement for up to 500 users."""
    of_one = f"SELECT * FROM (SELECT {COLUMNS} FROM tasks WHERE user_id = ? ORDER BY no DESC LIMIT ?) newest"
    found = []
    for page in pages(users):
        values = [value for user in page for value in (user, limit)]
        found += [task_of(row) for row in tx.all(" UNION ALL ".join([of_one] * len(page)), values)]
    return found


def astir(tx: Tx, *, since: float, limit: int = 100) -> list[Task]:
    """Return the newest running tasks and the newest tasks that ended after ``since`` (a timestamp)."""
    rows = tx.all(
        f"SELECT * FROM (SELECT {COLUMNS} FROM tasks WHERE status = 'RUNNING' ORDER BY no DESC LIMIT ?) running UNION ALL "
        f"SELECT * FROM (SELECT {COLUMNS} FROM tasks WHERE ended_at > ? ORDER BY ended_at DESC LIMIT ?) ended",
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


def count_waiting(tx: Tx, queues: Sequence[Priority], kinds: Sequence[str], *, most: int) -> int:
    """Count ready tasks of these queues and kinds, up to ``most``. Paused queues and held kinds are excluded."""
    if not kinds:
        return 0
    now = tx.now()
    row = tx.one(
        "SELECT count(*) FROM (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 1 "
        f"AND place IN ({marks(len(queues))}) AND kind IN ({marks(len(kinds))}) AND queue NOT IN "
        "(SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)) "
        f"AND kind NOT IN (SELECT kind FROM task_holds WHERE until > ?) LIMIT {int(most)}) AS found",
        (*(queue.place for queue in queues), *kinds, now, now),
    )
    return int(row[0]) if row else 0


def cancel(tx: Tx, id: str, *, by: str, user_id: str | None = None) -> Task:
    """Cancel a waiting task at once, or ask a running task's worker to stop. An ended task does not change."""
    check_actor(by)
    row = tx.one(f"SELECT no, status, user_id FROM tasks WHERE id = ?{tx.for_update}", (id,))
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
        task_store(tx).append_events(tx, [id])
        count_minutes(tx, now, cancelled=[task])
        return task
    if status == Status.RUNNING:
        tx.execute(
            "UPDATE tasks SET version = version + 1, cancel_by = coalesce(cancel_by, ?), updated_at = ? WHERE no = ?",
            (by, now, no),
        )
    return get(tx, id)


# ---------------------------------------------------------------------------------------------------------------------
# Events and counters


def event_insert(json_object: str, rows: str, *, conflict: str = "ON CONFLICT (id) DO NOTHING") -> str:
    """Return the statement that appends the event of each task in ``rows``.

    All events of tasks are written by it. ``json_object``: the engine's function that makes a JSON object. ``rows``: the
    rest of a SELECT after FROM; it has the `EVENT_COLUMNS`. The event id has the version, so each change has one event.
    """
    return (
        "INSERT INTO outbox (id, type, at, source, job, version, data) SELECT id || '-' || version, "
        "'task.' || lower(status), updated_at, 'headway.queue', id, version, "
        f"{json_object}('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, 'attempts', attempts, "
        f"'error', error) FROM {rows} {conflict}"
    )


_COUNT = """
INSERT INTO task_minutes
    (minute, queue, kind, share, submitted, completed, failed, cancelled, failures, wait_seconds, run_seconds)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (minute, queue, kind, share) DO UPDATE SET
    submitted = task_minutes.submitted + excluded.submitted, completed = task_minutes.completed + excluded.completed,
    failed = task_minutes.failed + excluded.failed, cancelled = task_minutes.cancelled + excluded.cancelled,
    failures = task_minutes.failures + excluded.failures,
    wait_seconds = task_minutes.wait_seconds + excluded.wait_seconds,
    run_seconds = task_minutes.run_seconds + excluded.run_seconds
"""
_COUNTED = ("submitted", "completed", "failed", "cancelled", "failures")


def count_minutes(
    tx: Tx, now: float, *, wait_seconds: float = 0.0, run_seconds: float = 0.0, share: int | None = None,
    **changed: Iterable[Task],
) -> None:  # fmt: skip
    """Add to the counters of the current minute, in this process's share so that writers rarely block each other.

    ``changed``: the tasks for each of the counters `_COUNTED`. ``share``: a separate share for a long transaction, so that
    other writers do not wait for its rows.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for counter, tasks in changed.items():
        for task in tasks:
            sums.setdefault((task.priority.value, task.kind), [0] * len(_COUNTED))[_COUNTED.index(counter)] += 1
    share = os.getpid() % 16 if share is None else share
    for (queue, kind), counts in sorted(sums.items()):
        tx.execute(_COUNT, (int(now // 60), queue, kind, share, *counts, wait_seconds, run_seconds))
        wait_seconds = run_seconds = 0.0  # totals of the whole call: add them only once


def pages(values: Sequence[_T], size: int = 500) -> Iterable[Sequence[_T]]:
    """Split ``values`` into slices of at most ``size``."""
    return (values[start : start + size] for start in range(0, len(values), size))
