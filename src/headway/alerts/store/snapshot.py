"""One consistent snapshot of the counters that the rules need.

It takes a few statements, whose cost does not grow with items or finished tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway._sql import Database, Row, Tx
from headway.alerts.rules import Reading, Rules
from headway.queue.store.workers import WaitingKind, waiting_kinds

QUEUES = ("urgent", "high", "normal", "low")
#: Seconds by which the commit of a cause may follow its ``first_seen``.
CAUSE_MARGIN = 300.0


@dataclass(slots=True)
class Snapshot:
    """The rows that `fetch` read at ``now`` by the database's clock."""

    now: float
    workers: list[Row]
    waiting: list[Row]
    kinds: list[WaitingKind]
    paused: list[Row]
    task_runs: list[Row]
    jobs: list[Row]
    causes: list[Row]
    sinks: list[Row]
    #: Readings by rule that do not come from the database. A missing rule has no known value.
    others: dict[str, list[Reading]] = field(default_factory=dict)


def fetch(database: Database, rules: Rules, at: float | None) -> Snapshot:
    """Read the snapshot. ``at`` replaces the database's time."""
    with database.read() as tx:
        now = tx.now() if at is None else at
        window = int((now - rules.failure_window) // 60)
        return Snapshot(
            now=now,
            workers=tx.all(
                "SELECT name, owner, queues, state, wanted, task, started_at, seen_at, ended_at, kinds FROM task_workers"
            ),
            waiting=_waiting(tx, int(rules.limits.get("backlog") or 0) or 10_000),
            kinds=waiting_kinds(tx),
            paused=tx.all(
                "SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)", (now,)
            ),
            task_runs=tx.all(
                "SELECT kind, sum(completed), sum(failures) FROM task_minutes WHERE minute > ? GROUP BY kind", (window,)
            ),
            jobs=_jobs(tx, window),
            causes=_new_causes(tx, rules, now),
            # The process of a job serves that job's own sinks.
            sinks=tx.all(
                "SELECT s.name, (SELECT o.at FROM outbox o WHERE o.seq > s.since AND NOT EXISTS "
                "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq) ORDER BY o.seq LIMIT 1) "
                "FROM sinks s WHERE s.job IS NULL"
            ),
        )


def _jobs(tx: Tx, window: int) -> list[Row]:
    """Return unfinished and recent jobs with their runs since the minute ``window``.

    Columns: id, finished_at, updated_at, holder, lease_until, done, failed, paused.
    """
    return tx.all(
        "SELECT j.id, j.finished_at, j.updated_at, j.holder, j.lease_until, "
        # The current minute of a job is in its own row.
        "coalesce(m.done, 0) + CASE WHEN j.minute > ? THEN j.minute_done ELSE 0 END, "
        "coalesce(m.failed, 0) + CASE WHEN j.minute > ? THEN j.minute_failed ELSE 0 END, "
        "EXISTS (SELECT 1 FROM controls c WHERE c.job = j.no AND c.paused = 1 "
        "AND c.run = (SELECT max(r.no) FROM runs r WHERE r.job = j.no)) "
        "FROM jobs j LEFT JOIN (SELECT job, sum(done) AS done, sum(failed) AS failed FROM minutes "
        "WHERE minute > ? AND job IN (SELECT no FROM jobs WHERE updated_at > ?) GROUP BY job) m ON m.job = j.no "
        "WHERE j.archived = 0 AND (j.finished_at IS NULL OR j.updated_at > ?)",
        (window, window, window, window * 60.0, window * 60.0),
    )


def _new_causes(tx: Tx, rules: Rules, now: float) -> list[Row]:
    """Return the causes of jobs and tasks since the last evaluation of ``new_cause``."""
    last = tx.one("SELECT checked_at FROM alert_rules WHERE name = 'new_cause'")
    since = now - (rules.limits.get("new_cause") or 0.0) if last is None else min(now, last[0])
    return tx.all(
        "SELECT 'job', j.id, j.function, c.type, c.message, c.frame FROM causes c JOIN jobs j ON j.no = c.job "
        "WHERE c.first_seen > ? UNION ALL "
        "SELECT 'task', kind, kind, type, message, frame FROM task_causes WHERE first_seen > ?",
        (since - CAUSE_MARGIN, since - CAUSE_MARGIN),
    )


def _waiting(tx: Tx, most: int) -> list[Row]:
    """Return (queue, waiting tasks, start of the oldest wait) of each queue.

    The first query stops at the limit of the rule. The exact number is counted only when an alert will name it.
    """
    rows = tx.all(
        " UNION ALL ".join(
            f"SELECT '{queue}', count(*), min(run_at) FROM (SELECT run_at FROM tasks WHERE status = 'QUEUED' "
            f"AND ready = 1 AND place = {place} ORDER BY place, turn, no LIMIT {most}) q{place}"
            for place, queue in enumerate(QUEUES)
        )
    )
    if all(count < most for _, count, _ in rows):
        return rows
    exact: dict[str, int] = dict(
        tx.all("SELECT queue, count(*) FROM tasks WHERE status = 'QUEUED' AND ready = 1 GROUP BY queue")
    )
    return [(queue, exact.get(queue, count), oldest) for queue, count, oldest in rows]
