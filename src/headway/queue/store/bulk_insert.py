"""Submit tasks with one PostgreSQL statement: rows, turns, events, counters and the wake-up notification.

The statement is sent in one round trip and may be sent again when its reply was lost. Task ids make it idempotent: the second
send inserts nothing, and the tasks are looked up instead. If an id or a user slot is taken, `admission.submit` decides.
SQLite always uses `admission.submit`, because a statement there costs no round trip.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime

from headway._sql import Database, Value, array
from headway.errors import StorageError
from headway.events.store.postgres import SHARE_APPENDING
from headway.queue.store import insert as admission
from headway.queue.store.tasks import NO_TURN
from headway.queue.task import NewTask, Priority, Status, Task, moment

# Tasks of one party get consecutive turns, and a new party starts in the current round (see `admission._Placing`). A user
# with a task in a slot above 0 is "crowded": the limit was higher before. Then nothing is inserted, and `admission.submit`
# decides.
_SUBMIT = f"""
WITH clock AS MATERIALIZED (
    SELECT extract(epoch FROM statement_timestamp())::double precision AS now, ({SHARE_APPENDING}) AS appending
), parties AS MATERIALIZED (
    SELECT p.number, p.queue, p.place, p.party, greatest(head.turn, coalesce(last.turn + 1, head.turn)) AS turn
    FROM unnest(CAST(? AS text[]), CAST(? AS integer[]), CAST(? AS text[])) WITH ORDINALITY AS p (queue, place, party, number)
    CROSS JOIN LATERAL (
        SELECT coalesce((SELECT turn FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND place = p.place
                         ORDER BY place, turn, no LIMIT 1), 0) AS turn
    ) AS head
    CROSS JOIN LATERAL (
        SELECT (SELECT turn FROM tasks WHERE status = 'QUEUED' AND queue = p.queue AND party = p.party
                ORDER BY queue DESC, party DESC, turn DESC LIMIT 1) AS turn
    ) AS last
), crowded AS MATERIALIZED (
    SELECT 1 FROM tasks WHERE user_id = ANY (CAST(? AS text[])) AND status IN ('QUEUED', 'RUNNING') AND slot > 0 LIMIT 1
), put AS (
    INSERT INTO tasks (id, kind, queue, place, turn, party, status, ready, user_id, slot, role, payload, fingerprint,
                       retries, retry_delay, timeout, run_at, created_at, updated_at, hinted_at)
    SELECT id, kind, queue, place, CASE WHEN delay > 0 THEN {NO_TURN} ELSE turn + behind END, party, 'QUEUED',
           CASE WHEN delay > 0 THEN 0 ELSE 1 END, user_id, slot, role, payload, fingerprint, retries, retry_delay, timeout,
           now + delay, now, now, CASE WHEN delay > 0 OR CAST(? AS integer) = 0 THEN NULL ELSE now END
    FROM unnest(CAST(? AS text[]), CAST(? AS text[]), CAST(? AS bigint[]), CAST(? AS bigint[]), CAST(? AS text[]),
                CAST(? AS integer[]), CAST(? AS text[]), CAST(? AS text[]), CAST(? AS text[]), CAST(? AS integer[]),
                CAST(? AS double precision[]), CAST(? AS double precision[]), CAST(? AS double precision[])) WITH ORDINALITY
         AS given (id, kind, number, behind, user_id, slot, role, payload, fingerprint, retries, retry_delay, timeout, delay, n)
    JOIN parties USING (number) CROSS JOIN clock WHERE NOT EXISTS (SELECT 1 FROM crowded) ORDER BY n
    {{conflict}} RETURNING *
), told AS (
    INSERT INTO outbox (id, type, at, source, job, version, data)
    SELECT id || '-1', 'task.queued', created_at, 'headway.queue', id, 1,
           json_build_object('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, 'attempts', attempts,
                             'error', error)
    FROM put ORDER BY no {{conflict}}
), counted AS (
    INSERT INTO task_minutes (minute, queue, kind, share, submitted)
    SELECT floor(created_at / 60)::bigint, queue, kind, ?, count(*) FROM put GROUP BY 1, 2, 3 ORDER BY 2, 3
    ON CONFLICT (minute, queue, kind, share) DO UPDATE SET submitted = task_minutes.submitted + excluded.submitted
), woken AS MATERIALIZED (
    SELECT pg_notify('headway_tasks', '') WHERE CAST(? AS integer) = 0 AND EXISTS (SELECT 1 FROM put)
)
SELECT now, (SELECT count(*) FROM put) FROM clock LEFT JOIN woken ON true
"""
_ONE = _SUBMIT.format(conflict="ON CONFLICT DO NOTHING")
# A batch is assumed to be new, because checking every index for conflicts first is a fifth of the work. A conflict fails the
# whole statement.
_MANY = _SUBMIT.format(conflict="")


def submit(database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinting: bool) -> list[Task]:
    """Submit tasks in their own transaction. Arguments and errors are those of `admission.submit`."""
    if database.engine != "postgresql" or not _plain(tasks, per_user):
        return database.run(
            lambda tx: admission.submit(tx, tasks, per_user=per_user, hinting=hinting), operation="queue.submit"
        )
    values = _values(tasks, per_user, hinting=hinting)
    try:
        [(now, put)] = database.write(
            _ONE if len(tasks) == 1 else _MANY, values, operation="queue.submit", idempotent=True
        )
        if put == len(tasks):
            created = moment(now)
            return [_accepted(task, now, created) for task in tasks]
    except StorageError as error:
        if type(error.__cause__).__name__ != "UniqueViolation":
            raise
    # An id or a slot was taken, possibly by an earlier send of this statement whose reply was lost.
    return database.run(
        lambda tx: admission.submit(tx, tasks, per_user=per_user, hinting=hinting), operation="queue.submit"
    )


def _accepted(task: NewTask, now: float, created: datetime) -> Task:
    """Build the accepted task from its inputs, equal to its row, without reading it back."""
    return Task(
        id=task.id, kind=task.kind, priority=task.priority, status=Status.QUEUED, version=1, user_id=task.user_id,
        role=task.role, attempts=0, retries=task.retries, percent=0.0, message="", error=None, worker=None,
        created_at=created, updated_at=created, run_at=moment(now + task.delay) if task.delay else created,
        started_at=None, ended_at=None, cancelling=False,
    )  # fmt: skip


def _plain(tasks: Sequence[NewTask], per_user: int | None) -> bool:
    """Return whether every slot is known in advance and no two tasks share an id or a slot."""
    users = [task.user_id for task in tasks if task.user_id is not None]
    return len({task.id for task in tasks}) == len(tasks) and (
        per_user is None or not users or (per_user == 1 and len(set(users)) == len(users))
    )


def _values(tasks: Sequence[NewTask], per_user: int | None, *, hinting: bool) -> tuple[Value, ...]:
    """Return the parameters of the statement: parties, then tasks as columns.

    Each task refers to its party by number and has the count of earlier tasks of that party.
    """
    parties: dict[tuple[Priority, str], int] = {}
    before: dict[int, int] = {}
    numbers, behind = [], []
    for task in tasks:
        number = parties.setdefault((task.priority, task.party), len(parties) + 1)
        numbers.append(number)
        behind.append(before.get(number, 0))
        before[number] = behind[-1] + (task.delay <= 0)
    queues = [priority for priority, _ in parties]
    return (
        array([queue.value for queue in queues]), array([queue.place for queue in queues]),
        array([party for _, party in parties]),
        array([task.user_id for task in tasks if per_user is not None and task.user_id is not None]), int(hinting),
        array([task.id for task in tasks]), array([task.kind for task in tasks]), array(numbers), array(behind),
        array([task.user_id for task in tasks]),
        array([None if per_user is None or task.user_id is None else 0 for task in tasks]),
        array([task.role for task in tasks]), array([task.payload for task in tasks]),
        array([task.fingerprints[0] for task in tasks]), array([task.retries for task in tasks]),
        array([task.retry_delay for task in tasks]), array([task.timeout for task in tasks]),
        array([task.delay for task in tasks]), os.getpid() % 16, int(hinting),
    )  # fmt: skip
