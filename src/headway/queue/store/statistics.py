"""Statistics of the queue: counts by minute, durations, causes of failure, workers. Every function works inside the
caller's transaction."""

from __future__ import annotations

from typing import NamedTuple

from headway._sql import Row, Tx, marks
from headway.queue.store.workers import HEAD, is_gone
from headway.queue.task import Priority

#: The cause of a failed task is that of its last attempt.
_LAST_ATTEMPT = "a.no = (SELECT max(l.no) FROM task_attempts l WHERE l.task = t.no)"


# ---- minutes and durations ---------------------------------------------------------------------------------------------


def work_by_slot(tx: Tx, first: int, step: int) -> list[Row]:
    """Return (queue, slot, completed, failures, seconds, submitted) since the minute ``first``, ``step`` minutes a slot."""
    return tx.all(
        "SELECT queue, minute / ?, sum(completed), sum(failures), sum(run_seconds), sum(submitted) FROM task_minutes "
        "WHERE minute >= ? GROUP BY 1, 2",
        (step, first),
    )


def work_by_kind(tx: Tx, first: int) -> list[Row]:
    """Return (kind, completed, failures, seconds) since the minute ``first``."""
    return tx.all(
        "SELECT kind, sum(completed), sum(failures), sum(run_seconds) FROM task_minutes WHERE minute >= ? GROUP BY kind",
        (first,),
    )


def newest_durations(tx: Tx, since: float, limit: int) -> list[Row]:
    """Return (queue, kind, seconds waited, seconds run) of the tasks that ended last."""
    return tx.all(
        "SELECT queue, kind, started_at - run_at, ended_at - started_at FROM tasks "
        "WHERE ended_at IS NOT NULL AND ended_at >= ? AND started_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?",
        (since, limit),
    )


# ---- waiting tasks -----------------------------------------------------------------------------------------------------


def waits_for_more_than(tx: Tx, most: int) -> bool:
    """Return whether more than ``most`` tasks are ready to run."""
    row = tx.one(
        "SELECT count(*) FROM (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 1 LIMIT ?) AS waiting",
        (most + 1,),
    )
    return row is not None and int(row[0]) > most


def waiting_parties(tx: Tx) -> list[Row]:
    """Return (queue, party, tasks) of the waiting tasks. The party is the partition key, otherwise the user."""
    return tx.all(
        "SELECT queue, party, count(*) FROM tasks WHERE status = 'QUEUED' GROUP BY queue, party "
        "ORDER BY count(*) DESC, party"
    )


# ---- failed tasks ------------------------------------------------------------------------------------------------------


class FailedTasks(NamedTuple):
    """Permanently failed tasks of one cause."""

    no: int
    kind: str
    type: str
    message: str
    frame: str
    failures: int
    dead: int
    first_seen: float
    last_seen: float
    example: str | None


def failed_by_cause(tx: Tx, limit: int) -> list[FailedTasks]:
    """Return the causes of permanently failed tasks, most tasks first."""
    rows = tx.all(
        "SELECT c.no, c.kind, c.type, c.message, c.frame, c.count, f.dead, c.first_seen, c.last_seen, f.example "
        "FROM task_causes c JOIN (SELECT a.cause AS cause, count(*) AS dead, max(t.id) AS example FROM tasks t "
        f"JOIN task_attempts a ON a.task = t.no WHERE t.status = 'FAILED' AND {_LAST_ATTEMPT} GROUP BY a.cause) f "
        "ON f.cause = c.no ORDER BY f.dead DESC, c.no LIMIT ?",
        (limit,),
    )
    return [FailedTasks(*row) for row in rows]


def failed_ids(tx: Tx, *, cause: int | None, after: int, limit: int) -> list[tuple[int, str]]:
    """Return (number, id) of permanently failed tasks by number, of one cause or of all."""
    by_cause = f"AND EXISTS (SELECT 1 FROM task_attempts a WHERE a.task = t.no AND a.cause = ? AND {_LAST_ATTEMPT}) "
    rows = tx.all(
        f"SELECT t.no, t.id FROM tasks t WHERE t.status = 'FAILED' AND t.no > ? {by_cause if cause is not None else ''}"
        "ORDER BY t.no LIMIT ?",
        (after, limit) if cause is None else (after, cause, limit),
    )
    return [(int(no), str(id)) for no, id in rows]


def failed_in_all(tx: Tx) -> int:
    """Return the number of permanently failed tasks."""
    row = tx.one("SELECT count(*) FROM tasks WHERE status = 'FAILED'")
    return int(row[0]) if row else 0


def failed_attempts(tx: Tx, task: str) -> list[Row]:
    """Return (no, outcome, error, worker, at, seconds, traceback) of a task's failed attempts, oldest first."""
    return tx.all(
        "SELECT a.no, a.outcome, a.error, a.worker, a.at, a.seconds, a.detail FROM task_attempts a "
        "JOIN tasks t ON t.no = a.task WHERE t.id = ? ORDER BY a.no",
        (task,),
    )


def hinted_at(tx: Tx, task: str) -> float | None:
    """Return when the task was last hinted to RQ; None if RQ has no hint of it."""
    row = tx.one("SELECT hinted_at FROM tasks WHERE id = ?", (task,))
    return None if row is None or row[0] is None else float(row[0])


def failures_by_worker(tx: Tx, since: float) -> list[tuple[str, int]]:
    """Return (worker, failed attempts) of tasks since a Unix time."""
    rows = tx.all("SELECT worker, count(*) FROM task_attempts WHERE at >= ? GROUP BY worker", (since,))
    return [(worker or "", int(count)) for worker, count in rows]


# ---- search ------------------------------------------------------------------------------------------------------------


def tasks_by_prefix(tx: Tx, prefix: str, limit: int) -> list[Row]:
    """Return (id, kind, status, user) of tasks whose id, or whose user's id, begins with ``prefix``, newest first."""
    columns = "no, id, kind, status, user_id"
    by_id = tx.all(f"SELECT {columns} FROM tasks WHERE id >= ? ORDER BY id LIMIT ?", (prefix, limit))
    rows = {row[0]: row for row in by_id if str(row[1]).startswith(prefix)}
    for user, _ in users_by_prefix(tx, prefix, limit):
        own = tx.all(f"SELECT {columns} FROM tasks WHERE user_id = ? ORDER BY no DESC LIMIT ?", (user, limit))
        rows |= {row[0]: row for row in own}
    return [rows[no][1:] for no in sorted(rows, reverse=True)[:limit]]


def users_by_prefix(tx: Tx, prefix: str, limit: int) -> list[tuple[str, int]]:
    """Return (user, tasks) of users whose id begins with ``prefix``. At most `HEAD` tasks are read."""
    rows = tx.all(
        "SELECT user_id, count(*) FROM (SELECT user_id FROM tasks WHERE user_id >= ? ORDER BY user_id LIMIT ?) AS near "
        "GROUP BY user_id ORDER BY user_id",
        (prefix, HEAD),
    )
    return [(user, int(count)) for user, count in rows if user.startswith(prefix)][:limit]


def causes_by_text(tx: Tx, pattern: str, limit: int) -> list[Row]:
    """Return (no, type, message, failed tasks) of causes whose type, message or frame matches a lower-case LIKE pattern."""
    return tx.all(
        "SELECT c.no, c.type, c.message, (SELECT count(*) FROM tasks t JOIN task_attempts a ON a.task = t.no "
        f"WHERE t.status = 'FAILED' AND a.cause = c.no AND {_LAST_ATTEMPT}) FROM task_causes c "
        "WHERE lower(c.type) LIKE ? ESCAPE '!' OR lower(c.message) LIKE ? ESCAPE '!' OR lower(c.frame) LIKE ? ESCAPE '!' "
        "ORDER BY c.last_seen DESC, c.no LIMIT ?",
        (pattern, pattern, pattern, limit),
    )


def oldest_ready(tx: Tx, queue: Priority, limit: int) -> list[str]:
    """Return the ids of the tasks that have waited longest in a queue, oldest first."""
    rows = tx.all(
        f"SELECT id FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND place = {queue.place} ORDER BY created_at, no LIMIT ?",
        (limit,),
    )
    return [str(id) for (id,) in rows]


# ---- workers -----------------------------------------------------------------------------------------------------------


def listed_workers(tx: Tx) -> list[Row]:
    """Return every listed worker, online ones first, with its task of this moment.

    A heartbeat is up to some seconds old, so tasks decide: a worker that holds one is busy. A lost worker keeps the task of
    its last heartbeat, also after another worker was given it, unless it ended the task itself. A worker without a heartbeat
    is lost, even if no sweeper has marked it.
    """
    running: dict[str, str] = dict(
        tx.all("SELECT worker, min(id) FROM tasks WHERE status = 'RUNNING' AND worker IS NOT NULL GROUP BY worker")
    )
    rows = tx.all(
        "SELECT name, host, pid, state, queues, task, completed, failed, rss, version, wanted, wanted_by, wanted_at, "
        f"started_at, seen_at, owner, ended_at, {tx.clock} FROM task_workers ORDER BY ended_at IS NOT NULL, started_at, name"
    )
    found = []
    for *facts, owner, ended_at, now in rows:
        seen_at = facts[-1]
        if ended_at is None and is_gone(owner, seen_at, now):
            facts[3] = "lost"
        if facts[0] in running:
            facts[3] = "busy" if facts[3] == "idle" else facts[3]
            facts[5] = running[facts[0]]
        found.append(facts)
    held = [facts[5] for facts in found if facts[3] == "lost" and facts[5] and facts[0] not in running]
    sql = f"SELECT id, worker FROM tasks WHERE ended_at IS NOT NULL AND id IN ({marks(len(held))})"
    ended: dict[str, str] = dict(tx.all(sql, held)) if held else {}
    for facts in found:
        if facts[5] in ended and ended[facts[5]] == facts[0]:
            facts[5] = None
    return [tuple(facts) for facts in found]
