"""The task store on PostgreSQL: one statement, and so one round trip, for each step of a task.

A statement changes rows, appends their events and adds to the minute counters. `SHARE_APPENDING` is taken before the first
number of the outbox is drawn, because the inserted events come from a join with it.

`tests/ledger/test_query_plans.py` measures how many rows these statements read on a table without statistics, where the
planner assumes that partial indexes are empty. The comments name the statements that are shaped by it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from headway._lease import write_owner
from headway._sql import Database, Row, Tx, Value, array
from headway.errors import HeadwayError, StorageError
from headway.events.store.postgres import SHARE_APPENDING
from headway.queue.store import ClaimCheck, insert
from headway.queue.store import claim as claims
from headway.queue.store.claim import CLAIM_VALUES, CLAIMED, DELAYED_DUE, Claimant, claim_values, claims_of
from headway.queue.store.complete import COMPLETE_VALUES, Success
from headway.queue.store.tasks import COLUMNS, EVENT_COLUMNS, NO_TURN, event_insert, task_of
from headway.queue.task import Claim, NewTask, Priority, Status, Task, moment
from headway.telemetry import Log

log = Log("queue")

# Constant within a statement, so that indexes can be used with it.
_NOW = "extract(epoch FROM statement_timestamp())::double precision"
_APPENDING = f"appending AS MATERIALIZED ({SHARE_APPENDING})"
_SHARES = 16  # of the minute counters, so that processes rarely wait for each other's rows

# ---------------------------------------------------------------------------------------------------------------------
# Submitting

# Tasks of one party get consecutive turns, and a new party starts in the current round (see `insert._Turns`). A user with a
# task in a slot above 0 is "crowded": the limit was higher before. Then nothing is inserted, and `insert.submit` decides.
_SUBMIT = f"""
WITH clock AS MATERIALIZED (
    SELECT {_NOW} AS now, ({SHARE_APPENDING}) AS appending
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
    {event_insert("json_build_object", "put ORDER BY no", conflict="{conflict}")}
), counted AS (
    INSERT INTO task_minutes (minute, queue, kind, share, submitted)
    SELECT floor(created_at / 60)::bigint, queue, kind, ?, count(*) FROM put GROUP BY 1, 2, 3 ORDER BY 2, 3
    ON CONFLICT (minute, queue, kind, share) DO UPDATE SET submitted = task_minutes.submitted + excluded.submitted
), woken AS MATERIALIZED (
    SELECT pg_notify('headway_tasks', '') WHERE CAST(? AS integer) = 0 AND EXISTS (SELECT 1 FROM put)
)
SELECT now, (SELECT count(*) FROM put) FROM clock LEFT JOIN woken ON true
"""
_SUBMIT_ONE = _SUBMIT.format(conflict="ON CONFLICT DO NOTHING")
# A batch is assumed to be new, because checking every index for conflicts first is a fifth of the work. A conflict fails the
# whole statement.
_SUBMIT_BATCH = _SUBMIT.format(conflict="")

# ---------------------------------------------------------------------------------------------------------------------
# Claiming

_CHECK = (
    f"SELECT {_NOW}, EXISTS (SELECT 1 FROM task_limits), {DELAYED_DUE.format(now=_NOW)}, "
    "EXISTS (SELECT 1 FROM task_holds), q.name, q.paused_until FROM (SELECT 1) AS one LEFT JOIN task_queues q ON q.paused = 1"
)
# In all claims: `picked` is materialized, because inside an IN the planner might evaluate it again, and lock and change more
# rows than its LIMIT. The limit is a literal, because for a parameter PostgreSQL assumes a tenth of all rows and would sort
# the backlog. Rows locked by other workers are skipped.
_CLAIM_READY = f"""
WITH picked AS MATERIALIZED (
    SELECT no AS picked_no FROM tasks
    WHERE status = 'QUEUED' AND ready = 1 AND place IN ({{places}}) AND kind = ANY (CAST(? AS text[])){{hinted}}
    ORDER BY place, turn, no LIMIT {{limit}} FOR UPDATE SKIP LOCKED
), {_APPENDING}, claimed AS (
    UPDATE tasks SET {CLAIM_VALUES.format(now=_NOW)} FROM picked WHERE no = picked_no RETURNING tasks.*
), told AS ({event_insert("json_build_object", "claimed CROSS JOIN appending")})
SELECT {CLAIMED} FROM claimed
"""
_CLAIM_NUMBERS = f"""
WITH {_APPENDING}, claimed AS (
    UPDATE tasks SET {CLAIM_VALUES.format(now=_NOW)} WHERE no = ANY (CAST(? AS bigint[])) RETURNING tasks.*
), told AS ({event_insert("json_build_object", "claimed CROSS JOIN appending")})
SELECT {CLAIMED} FROM claimed
"""
# The CTEs of a claim without a transaction around it. `mine` are the rows of an earlier send whose reply was lost; the process
# must match as well, because a restarted worker may reuse the name, and the sweeper ends its predecessor's runs. Rows whose
# lease is half over are left out, because the sweeper may soon give them to another worker. The open queues are resolved
# before tasks are scanned, so that the backlog of a paused queue is never read. Nothing is claimed if limits or holds exist or
# delayed tasks are due: then `claim.claim` decides.
_NEXT = f"""
mine AS MATERIALIZED (
    SELECT {CLAIMED} FROM tasks WHERE status = 'RUNNING' AND worker = ? AND starts_with(holder, ?)
    AND lease_until > {_NOW} + ?{{not_given}} AND no <> ALL (CAST(? AS bigint[]))
), picked AS MATERIALIZED (
    SELECT no AS picked_no FROM tasks
    WHERE status = 'QUEUED' AND ready = 1 AND kind = ANY (CAST(? AS text[])){{hinted}} AND place = ANY (ARRAY(
        SELECT at FROM unnest(CAST(? AS integer[]), CAST(? AS text[])) AS served (at, name)
        WHERE name NOT IN (SELECT q.name FROM task_queues q
                           WHERE q.paused = 1 AND (q.paused_until IS NULL OR q.paused_until > {_NOW}))))
    AND NOT EXISTS (SELECT 1 FROM mine) AND NOT EXISTS (SELECT 1 FROM task_limits)
    AND NOT EXISTS (SELECT 1 FROM task_holds) AND NOT ({DELAYED_DUE.format(now=_NOW)})
    ORDER BY place, turn, no LIMIT {{limit}} FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE tasks SET {CLAIM_VALUES.format(now=_NOW)} WHERE no = ANY (ARRAY(SELECT picked_no FROM picked))
    RETURNING {CLAIMED}, status, error, updated_at
), {_APPENDING}"""
_CLAIM = f"""
WITH {_NEXT}, told AS ({event_insert("json_build_object", "claimed CROSS JOIN appending")})
SELECT {CLAIMED} FROM claimed UNION ALL SELECT * FROM mine
"""

# ---------------------------------------------------------------------------------------------------------------------
# Completing

# The subselects hide the array lengths from the planner, which then assumes ten elements and uses index lookups. If it saw a
# hundred, it would estimate a disk read for each and scan a table of ten thousand rows instead.
_GIVEN = """
given AS MATERIALIZED (
    SELECT * FROM unnest((SELECT CAST(? AS bigint[])), (SELECT CAST(? AS bigint[])), (SELECT CAST(? AS text[])),
                         (SELECT CAST(? AS text[])), (SELECT CAST(? AS double precision[])),
                         (SELECT CAST(? AS double precision[])))
    AS g (given_no, given_token, given_result, given_message, given_waited, given_seconds)
)"""
# Exactly the running rows have a holder. No index is on it, so the rows are found by their primary key.
_COMPLETED = f"""
completed AS (
    UPDATE tasks SET {COMPLETE_VALUES.format(now=_NOW)} FROM given
    WHERE no = given_no AND token = given_token AND holder IS NOT NULL RETURNING tasks.*
), counted AS (
    INSERT INTO task_minutes (minute, queue, kind, share, completed, wait_seconds, run_seconds)
    SELECT floor(updated_at / 60)::bigint, queue, kind, ?, count(*), sum(given_waited), sum(given_seconds)
    FROM completed JOIN given ON no = given_no GROUP BY 1, 2, 3 ORDER BY 2, 3
    ON CONFLICT (minute, queue, kind, share) DO UPDATE SET completed = task_minutes.completed + excluded.completed,
    wait_seconds = task_minutes.wait_seconds + excluded.wait_seconds,
    run_seconds = task_minutes.run_seconds + excluded.run_seconds
)"""
_COMPLETE = f"""
WITH {_GIVEN}, {_APPENDING}, {_COMPLETED},
told AS ({event_insert("json_build_object", "completed CROSS JOIN appending")})
SELECT {COLUMNS} FROM completed
"""
_COMPLETE_AND_CLAIM = f"""
WITH {_GIVEN}, {_COMPLETED}, {_NEXT}, told AS ({
    event_insert(
        "json_build_object",
        f"(SELECT {EVENT_COLUMNS} FROM completed UNION ALL SELECT {EVENT_COLUMNS} FROM claimed) AS changed "
        "CROSS JOIN appending",
    )
})
SELECT (SELECT array_agg(id) FROM completed) AS completed_ids, next.* FROM (SELECT 1) AS one
LEFT JOIN (SELECT {CLAIMED} FROM claimed UNION ALL SELECT * FROM mine) AS next ON true
"""
# A separate statement: as part of `_COMPLETE` it made PostgreSQL scan the whole table.
_READ_GIVEN = f"""
WITH {_GIVEN} SELECT {COLUMNS} FROM given JOIN tasks ON no = given_no AND token = given_token
"""
_APPEND_EVENTS = f"""
WITH {_APPENDING}
{event_insert("json_build_object", "tasks CROSS JOIN appending WHERE id = ANY (CAST(? AS text[])) ORDER BY no")}
"""
_RESTART_LEASES = f"UPDATE tasks SET lease_until = {_NOW} + ?, holder = ? WHERE no = ?"


class _PostgresTasks:
    """`TaskStore` on PostgreSQL."""

    def submit(self, database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinted: bool) -> list[Task]:
        """Insert plain tasks with one statement; leave all other cases to `insert.submit`.

        Task ids make the statement idempotent: a second send inserts nothing, and the tasks are looked up instead.
        """
        if _slots_are_known(tasks, per_user):
            try:
                [(now, inserted)] = database.write(
                    _SUBMIT_ONE if len(tasks) == 1 else _SUBMIT_BATCH, _submit_values(tasks, per_user, hinted=hinted),
                    operation="queue.submit", idempotent=True,
                )  # fmt: skip
                if inserted == len(tasks):
                    created = moment(now)
                    return [_accepted(task, now, created) for task in tasks]
            except StorageError as error:
                if not insert.is_duplicate(error):
                    raise
        # An id or a slot was taken, possibly by an earlier send of the statement whose reply was lost.
        return database.run(
            lambda tx: insert.submit(tx, tasks, per_user=per_user, hinted=hinted), operation="queue.submit"
        )

    def claim(
        self, database: Database, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Claim]:
        if queues and who.kinds and limit > 0:
            statement = _CLAIM.format(limit=int(limit), hinted=_hinted(unhinted), not_given="")
            values = _next_values(who, queues)
            rows = database.write(statement, values, operation="queue.claim", idempotent=True)
            if rows:
                return claims_of(rows)
        return database.run(
            lambda tx: claims.claim(tx, who, queues=queues, limit=limit, unhinted=unhinted), operation="queue.claim"
        )

    def complete(self, database: Database, successes: Sequence[Success]) -> dict[str, Task]:
        rows = database.write(_COMPLETE, _complete_values(successes), operation="queue.settle", idempotent=True)
        tasks = {task.id: task for task in map(task_of, rows)}
        return tasks | _completed_before(database, successes, tasks)

    def complete_and_claim(
        self, database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]]:
        statement = _COMPLETE_AND_CLAIM.format(
            limit=int(limit), hinted="", not_given=" AND no NOT IN (SELECT given_no FROM given)"
        )
        values = (*_complete_values(successes), *_next_values(who, queues))
        rows = database.write(statement, values, operation="queue.settle", idempotent=True)
        ids = set(rows[0][0] or ())
        ids.update(_completed_before(database, successes, ids))
        return ids, claims_of([row[1:] for row in rows if row[1] is not None])

    def check_claim(self, tx: Tx) -> ClaimCheck:
        return claims.claim_check(tx.all(_CHECK))

    def claim_ready(
        self, tx: Tx, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Row]:
        statement = _CLAIM_READY.format(
            places=", ".join(str(queue.place) for queue in queues), hinted=_hinted(unhinted), limit=int(limit)
        )
        return tx.all(statement, (array(who.kinds), *claim_values(who)))

    def claim_numbers(self, tx: Tx, who: Claimant, numbers: Sequence[int]) -> list[Row]:
        return tx.all(_CLAIM_NUMBERS, (*claim_values(who), array(numbers)))

    def complete_in(self, tx: Tx, successes: Sequence[Success]) -> dict[str, Task]:
        return {task.id: task for task in map(task_of, tx.all(_COMPLETE, _complete_values(successes)))}

    def append_events(self, tx: Tx, ids: Iterable[str]) -> None:
        tx.execute(_APPEND_EVENTS, (array(list(ids)),))

    def restart_leases(self, tx: Tx, holders: Sequence[tuple[str | None, int]], seconds: float) -> None:
        tx.executemany(_RESTART_LEASES, [(seconds, holder, no) for holder, no in holders])

    def notify(self, tx: Tx) -> None:
        tx.one("SELECT pg_notify('headway_tasks', '')")

    def counter_share(self, tx: Tx) -> int:
        row = tx.one("SELECT pg_backend_pid()")
        return _SHARES + (int(row[0]) if row else 0)

    def wakeups(self, database: Database) -> _Notifications:
        return _Notifications(database)


STORE = _PostgresTasks()


def _hinted(unhinted: bool) -> str:
    return " AND hinted_at IS NULL" if unhinted else ""


def _slots_are_known(tasks: Sequence[NewTask], per_user: int | None) -> bool:
    """Return whether every slot is known in advance and no two tasks share an id or a slot."""
    users = [task.user_id for task in tasks if task.user_id is not None]
    return len({task.id for task in tasks}) == len(tasks) and (
        per_user is None or not users or (per_user == 1 and len(set(users)) == len(users))
    )


def _submit_values(tasks: Sequence[NewTask], per_user: int | None, *, hinted: bool) -> tuple[Value, ...]:
    """Return the parameters of `_SUBMIT`: parties, then tasks as columns.

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
        array([task.user_id for task in tasks if per_user is not None and task.user_id is not None]), int(hinted),
        array([task.id for task in tasks]), array([task.kind for task in tasks]), array(numbers), array(behind),
        array([task.user_id for task in tasks]),
        array([None if per_user is None or task.user_id is None else 0 for task in tasks]),
        array([task.role for task in tasks]), array([task.payload for task in tasks]),
        array([task.fingerprints[0] for task in tasks]), array([task.retries for task in tasks]),
        array([task.retry_delay for task in tasks]), array([task.timeout for task in tasks]),
        array([task.delay for task in tasks]), os.getpid() % _SHARES, int(hinted),
    )  # fmt: skip


def _accepted(task: NewTask, now: float, created: datetime) -> Task:
    """Build the accepted task from its inputs, equal to its row, without reading it back."""
    return Task(
        id=task.id, kind=task.kind, priority=task.priority, status=Status.QUEUED, version=1, user_id=task.user_id,
        role=task.role, attempts=0, retries=task.retries, percent=0.0, message="", error=None, worker=None,
        created_at=created, updated_at=created, run_at=moment(now + task.delay) if task.delay else created,
        started_at=None, ended_at=None, cancelling=False,
    )  # fmt: skip


def _next_values(who: Claimant, queues: Sequence[Priority]) -> tuple[Value, ...]:
    """Return the parameters of `_NEXT`."""
    process = write_owner(who.owner).removesuffix("}")
    return (
        who.worker, process, who.lease / 2, array(who.held), array(who.kinds), array([queue.place for queue in queues]),
        array([queue.value for queue in queues]), *claim_values(who),
    )  # fmt: skip


def _complete_values(successes: Sequence[Success]) -> tuple[Value, ...]:
    """Return the parameters of `_GIVEN` as columns, then this process's share of the minute counters."""
    return (
        array([done.claim.no for done in successes]), array([done.claim.token for done in successes]),
        array([done.result for done in successes]), array([done.message for done in successes]),
        array([done.claim.waited for done in successes]), array([done.seconds for done in successes]),
        os.getpid() % _SHARES,
    )  # fmt: skip


def _completed_before(database: Database, successes: Sequence[Success], known: Iterable[str]) -> dict[str, Task]:
    """Return the tasks that an earlier send of the statement, whose reply was lost, has completed.

    Only this worker has their tokens, so nothing else can have completed them.
    """
    left = [done for done in successes if done.claim.id not in known]
    if not left:
        return {}
    tasks = map(task_of, database.all(_READ_GIVEN, _complete_values(left)[:-1]))
    return {task.id: task for task in tasks if task.status is Status.COMPLETED}


class _Notifications:
    """Listens on its own connection. While it cannot listen, `wait` lasts its whole time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None  # a driver connection, see `Database.own_connection`

    def wait(self, seconds: float, stop: threading.Event) -> None:
        deadline = time.monotonic() + seconds
        try:
            if self._connection is None:
                self._connection = self._database.own_connection()
                with self._database.translated():
                    self._connection.execute("LISTEN headway_tasks")
                return  # the next claim finds the tasks that were submitted before
            while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
                with self._database.translated():
                    if list(self._connection.notifies(timeout=min(left, 0.25), stop_after=1)):
                        return
        except HeadwayError as error:
            log.warning("the worker cannot listen for new tasks; it polls instead", error=str(error))
            self.close()
            stop.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):  # the connection may be broken already
                self._connection.close()
            self._connection = None
