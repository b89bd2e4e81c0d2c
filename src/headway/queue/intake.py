"""Putting tasks in by one statement, on PostgreSQL: the row, its place in turn, its event, the count and the wake-up.

A single task is that statement alone, in one round trip. It may be sent again when its answer was lost, because a task
carries its identity: the second time nothing is inserted, and whoever finds that looks the task up. Whatever is not plain
(an id or a user's place that is taken) is decided by `records.submit`, which this one is a shorter way to; SQLite, where a
statement costs no round trip, always goes that way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from headway._sql import Database, Row, Tx, Value
from headway.events.sql import SHARE_APPENDING
from headway.queue import records
from headway.queue.records import _COLUMNS, task_of
from headway.queue.values import NewTask, Task

_FIELDS = (
    "n bigint, id text, kind text, queue text, place integer, party text, user_id text, slot integer, role text, "
    "payload text, fingerprint text, retries integer, retry_delay double precision, timeout double precision, "
    "delay double precision"
)
# A party's tasks stand one behind the other; a party that comes new joins the round that is served now (see
# `records._Placing`).
_SUBMIT = f"""
WITH clock AS MATERIALIZED (
    SELECT extract(epoch FROM statement_timestamp())::double precision AS now, ({SHARE_APPENDING}) AS appending
), given AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(? AS json)) AS g ({_FIELDS})
), parties AS MATERIALIZED (
    SELECT p.queue, p.party, greatest(head.turn, coalesce(last.turn + 1, head.turn)) AS turn
    FROM (SELECT DISTINCT queue, place, party FROM given) AS p
    CROSS JOIN LATERAL (
        SELECT coalesce((SELECT turn FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND place = p.place
                         ORDER BY place, turn, no LIMIT 1), 0) AS turn
    ) AS head
    CROSS JOIN LATERAL (
        SELECT (SELECT turn FROM tasks WHERE status = 'QUEUED' AND queue = p.queue AND party = p.party
                ORDER BY queue DESC, party DESC, turn DESC LIMIT 1) AS turn
    ) AS last
), put AS (
    INSERT INTO tasks (id, kind, queue, place, turn, party, status, ready, user_id, slot, role, payload, fingerprint,
                       retries, retry_delay, timeout, run_at, created_at, updated_at, hinted_at)
    SELECT id, kind, queue, place,
           CASE WHEN delay > 0 THEN {records.NO_TURN}
                ELSE turn + row_number() OVER (PARTITION BY queue, party, delay > 0 ORDER BY n) - 1 END, party, 'QUEUED',
           CASE WHEN delay > 0 THEN 0 ELSE 1 END, user_id, slot, role, payload, fingerprint, retries, retry_delay, timeout,
           now + delay, now, now, CASE WHEN delay > 0 OR CAST(? AS integer) = 0 THEN NULL ELSE now END
    FROM given JOIN parties USING (queue, party) CROSS JOIN clock ORDER BY n
    ON CONFLICT DO NOTHING RETURNING *
), told AS (
    INSERT INTO outbox (id, type, at, source, job, version, data)
    SELECT id || '-1', 'task.queued', created_at, 'headway.queue', id, 1,
           json_build_object('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, 'attempts', attempts,
                             'error', error)
    FROM put ORDER BY no ON CONFLICT (id) DO NOTHING
), counted AS (
    INSERT INTO task_minutes (minute, queue, kind, share, submitted)
    SELECT floor(created_at / 60)::bigint, queue, kind, ?, count(*) FROM put GROUP BY 1, 2, 3 ORDER BY 2, 3
    ON CONFLICT (minute, queue, kind, share) DO UPDATE SET submitted = task_minutes.submitted + excluded.submitted
), woken AS MATERIALIZED (
    SELECT pg_notify('headway_tasks', '') WHERE CAST(? AS integer) = 0 AND EXISTS (SELECT 1 FROM put)
)
SELECT {_COLUMNS} FROM put LEFT JOIN woken ON true
"""


def submit(database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinting: bool) -> list[Task]:
    """As `records.submit`, in a transaction of its own."""
    if database.engine != "postgresql" or not _plain(tasks, per_user):
        return database.run(
            lambda tx: records.submit(tx, tasks, per_user=per_user, hinting=hinting), operation="queue.submit"
        )
    values = _values(tasks, per_user, hinting=hinting)
    if len(tasks) == 1:
        rows = database.write(_SUBMIT, values, operation="queue.submit", idempotent=True)
        if rows:
            return [task_of(rows[0])]

    def work(tx: Tx) -> list[Task]:
        rows: list[Row] = tx.all(_SUBMIT, values) if len(tasks) > 1 else []
        if len(rows) == len(tasks):
            put = {task.id: task for task in map(task_of, rows)}
            return [put[task.id] for task in tasks]
        # Somebody was there before. Those that were put in are found there as any other.
        return records.submit(tx, tasks, per_user=per_user, hinting=hinting)

    return database.run(work, operation="queue.submit")


def _plain(tasks: Sequence[NewTask], per_user: int | None) -> bool:
    """Whether each task's place is known beforehand and no two of them ask for the same id or place."""
    users = [task.user_id for task in tasks if task.user_id is not None]
    return len({task.id for task in tasks}) == len(tasks) and (
        per_user is None or not users or (per_user == 1 and len(set(users)) == len(users))
    )


def _values(tasks: Sequence[NewTask], per_user: int | None, *, hinting: bool) -> tuple[Value, ...]:
    given = [
        {
            "n": n, "id": task.id, "kind": task.kind, "queue": task.priority.value, "place": task.priority.place,
            "party": task.party, "user_id": task.user_id,
            "slot": None if per_user is None or task.user_id is None else 0, "role": task.role, "payload": task.payload,
            "fingerprint": task.fingerprints[0], "retries": task.retries, "retry_delay": task.retry_delay,
            "timeout": task.timeout, "delay": task.delay,
        }
        for n, task in enumerate(tasks)
    ]  # fmt: skip
    return json.dumps(given), int(hinting), os.getpid() % 16, int(hinting)
