"""Record the outcome of claimed tasks.

Every write is fenced by the claim's token, so a worker that was paused past its lease cannot record anything. A run that
does not succeed costs an attempt: the task is queued for a retry, or becomes FAILED. A run of a cancelled task costs
nothing. `lapsed` ends the runs of dead workers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from headway._lease import has_ended
from headway._sql import Database, Row, Tx, Value, array
from headway.core.failure import Failure, normalise
from headway.core.retry import RetryPolicy
from headway.errors import StaleClaim
from headway.events.store.postgres import SHARE_APPENDING
from headway.queue.store import claim as claims
from headway.queue.store.claim import CLAIMED, RETRY_CAP, Claimant, claiming, claims_of, first_turn
from headway.queue.store.events import AMONG, SKIP_LOCKED, STATEMENT_TIME, TOLD, change, changing, telling
from headway.queue.store.tasks import _COLUMNS, NO_TURN, count_minutes, task_of, tell
from headway.queue.task import Claim, Priority, Status, Task
from headway.telemetry import Log

log = Log("queue")

# The subselects hide the array lengths from PostgreSQL's planner, which then assumes ten elements and uses index lookups.
# If it saw a hundred, it would estimate a disk read for each and scan a table of ten thousand rows instead.
_GIVEN = {
    "sqlite": "SELECT json_extract(value, '$[0]') AS given_no, json_extract(value, '$[1]') AS given_token, "
    "json_extract(value, '$[2]') AS given_result, json_extract(value, '$[3]') AS given_message FROM json_each(?)",
    "postgresql": "SELECT * FROM unnest((SELECT CAST(? AS bigint[])), (SELECT CAST(? AS bigint[])), "
    "(SELECT CAST(? AS text[])), (SELECT CAST(? AS text[])), (SELECT CAST(? AS double precision[])), "
    "(SELECT CAST(? AS double precision[]))) "
    "AS g (given_no, given_token, given_result, given_message, given_waited, given_seconds)",
}
LOST = Failure("WorkerLost", "the worker that ran this task died or lost its lease")


@dataclass(frozen=True, slots=True)
class Success:
    """A run whose handler returned. ``message`` is its last progress message, if not yet written."""

    claim: Claim
    result: str | None
    seconds: float
    message: str | None = None


def complete(tx: Tx, claim: Claim, result: str | None, seconds: float, *, message: str | None = None) -> Task:
    """Record a successful run. Raises `StaleClaim` if the worker no longer owns the task."""
    tasks = complete_all(tx, [Success(claim, result, seconds, message)])
    if not tasks:
        raise _stale(claim)
    return tasks[claim.id]


def complete_all(tx: Tx, successes: Sequence[Success]) -> dict[str, Task]:
    """Record successful runs and return their tasks by id.

    Tasks that the worker no longer owns are left out. Each row is updated only under its own claim's token, so one stale
    claim does not affect the rest of the batch. The number of statements on PostgreSQL does not depend on the batch size.
    """
    if tx.engine == "postgresql":
        return {task.id: task for task in map(task_of, tx.all(f"WITH {_completing()}", _given(successes)))}
    now = STATEMENT_TIME["sqlite"]
    given = json.dumps([[done.claim.no, done.claim.token, done.result, done.message] for done in successes])
    rows = change(tx, _GIVEN["sqlite"], (given,), _completed(now), _OWN, _COLUMNS)
    tasks = {task.id: task for task in map(task_of, rows)}
    counted = sorted(
        (done for done in successes if done.claim.id in tasks), key=lambda done: (done.claim.priority, done.claim.kind)
    )
    for _, group in groupby(counted, key=lambda done: (done.claim.priority, done.claim.kind)):
        same = list(group)
        count_minutes(
            tx, tasks[same[0].claim.id].updated_at.timestamp(),
            completed=[tasks[done.claim.id] for done in same], wait_seconds=sum(done.claim.waited for done in same),
            run_seconds=sum(done.seconds for done in same),
        )  # fmt: skip
    return tasks


def complete_alone(database: Database, successes: Sequence[Success]) -> dict[str, Task]:
    """Run `complete_all` in its own transaction; on PostgreSQL as one statement in one round trip.

    The statement may be sent again when its reply was lost: only this call can have completed a row under that token.
    """
    if database.engine != "postgresql":
        return database.run(lambda tx: complete_all(tx, successes), operation="queue.settle")
    rows = database.write(f"WITH {_completing()}", _given(successes), operation="queue.settle", idempotent=True)
    if len(rows) < len(successes):
        rows += _completed_before(database, successes, {row[0] for row in rows})
    return {task.id: task for task in map(task_of, rows)}


def _completed_before(database: Database, successes: Sequence[Success], known: set[str]) -> list[Row]:
    """Return the remaining rows that an earlier, unacknowledged send of the statement completed.

    This is a separate statement on purpose. As part of the first one it made PostgreSQL scan the whole table, because
    the planner relied on outdated statistics.
    """
    left = [done for done in successes if done.claim.id not in known]
    return database.all(
        f"WITH source AS MATERIALIZED ({_GIVEN['postgresql']}) SELECT {_COLUMNS} FROM source JOIN tasks ON no = given_no "
        "AND token = given_token AND status || '' = 'COMPLETED'",
        _given(left)[:-1],
    )


def complete_and_claim(
    database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
) -> tuple[set[str], list[Claim]]:
    """Complete a worker's claims and claim its next tasks in one transaction.

    ``successes`` must contain every claim the worker holds. Returns (ids of the completed tasks, next claims). On
    PostgreSQL this is one statement that may be sent again, like `complete_alone` and `claim_next`.

    An empty list of claims does not mean that the queues are empty: call `claim_next` to find out.
    """
    if database.engine != "postgresql":

        def work(tx: Tx) -> tuple[set[str], list[Claim]]:
            return set(complete_all(tx, successes)), claims.claim(tx, who, queues=queues, limit=limit)

        return database.run(work, operation="queue.settle")
    next_claim, values = claiming(who, queues, limit, given="source")
    completed = CLAIMED.replace("no, id,", "NULL, id,").split(", ")[:2] + ["NULL"] * (CLAIMED.count(",") - 1)
    *given, share = _given(successes)
    rows = database.write(
        f"WITH source AS MATERIALIZED ({_GIVEN['postgresql']}), changed AS (UPDATE tasks "
        f"SET {_completed(STATEMENT_TIME['postgresql'])} FROM source WHERE {_OWN} RETURNING {TOLD}, no), {next_claim}, "
        f"appending AS MATERIALIZED ({SHARE_APPENDING}), "
        f"told AS ({telling(f'(SELECT {TOLD} FROM changed UNION ALL SELECT {TOLD} FROM taken) AS either')}), {_COUNTED} "
        f"SELECT {CLAIMED} FROM taken UNION ALL SELECT * FROM mine UNION ALL SELECT {', '.join(completed)} FROM changed",
        (*given, *values, share),
        operation="queue.settle",
        idempotent=True,
    )
    ids = {row[1] for row in rows if row[0] is None}
    if len(ids) < len(successes):
        ids.update(row[0] for row in _completed_before(database, successes, ids))
    return ids, claims_of([row for row in rows if row[0] is not None])


# Rows are found by primary key. The expression `status || ''` keeps PostgreSQL from using a partial index on status, which
# would make it read every running task.
_OWN = "no = given_no AND token = given_token AND status || '' = 'RUNNING'"


def _completed(now: str) -> str:
    return (
        "status = 'COMPLETED', version = version + 1, percent = 100, result = given_result, error = NULL, "
        "message = coalesce(given_message, message), holder = NULL, lease_until = NULL, "
        f"ended_at = {now}, updated_at = {now}"
    )


_COUNTED = (
    "counted AS (INSERT INTO task_minutes (minute, queue, kind, share, completed, wait_seconds, run_seconds) "
    "SELECT floor(updated_at / 60)::bigint, queue, kind, ?, count(*), sum(given_waited), sum(given_seconds) "
    "FROM changed JOIN source ON no = given_no GROUP BY 1, 2, 3 ORDER BY 2, 3 "
    "ON CONFLICT (minute, queue, kind, share) DO UPDATE SET completed = task_minutes.completed + excluded.completed, "
    "wait_seconds = task_minutes.wait_seconds + excluded.wait_seconds, "
    "run_seconds = task_minutes.run_seconds + excluded.run_seconds)"
)


@lru_cache(maxsize=1)
def _completing() -> str:
    return changing(_GIVEN["postgresql"], _completed(STATEMENT_TIME["postgresql"]), _OWN, _COLUMNS, f", {_COUNTED}")


def _given(successes: Sequence[Success]) -> tuple[Value, ...]:
    """Return the batch as column arrays, followed by this process's share of the minute counters."""
    return (
        array([done.claim.no for done in successes]), array([done.claim.token for done in successes]),
        array([done.result for done in successes]), array([done.message for done in successes]),
        array([done.claim.waited for done in successes]), array([done.seconds for done in successes]), os.getpid() % 16,
    )  # fmt: skip


def fail(
    tx: Tx,
    claim: Claim,
    failure: Failure,
    *,
    outcome: str = "failed",
    retryable: bool = True,
    seconds: float | None = None,
    spare: bool = False,
) -> Task:
    """Record a run that did not succeed: the task is retried, FAILED or CANCELLED.

    A task with a cancel request becomes CANCELLED however its run ended. Its run counts neither as an attempt nor as a
    failure, and no cause is recorded.

    ``spare``: retry once more even if no attempt is left, because the task may never have started.
    """
    row = tx.one(
        "SELECT attempts, retries, retry_delay, cancel_by, worker FROM tasks WHERE no = ? AND token = ? "
        f"AND status = 'RUNNING'{' FOR UPDATE' if tx.engine == 'postgresql' else ''}",
        (claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    attempts, retries, retry_delay, cancel_by, worker = row
    if cancel_by is not None:
        cancelled = give_back(tx, claim)
        assert cancelled is not None  # this transaction holds the row lock
        log.info("a cancelled task has ended", taskID=claim.id, error=failure.text, reason=outcome)
        return cancelled
    now = tx.now()
    attempts += 1
    final = not retryable or (attempts > retries and not spare)
    policy = RetryPolicy(retries, retry_delay, cap=RETRY_CAP, jitter=0.2)
    status = Status.FAILED if final else Status.QUEUED
    cause = _cause(tx, claim.kind, failure, now)
    tx.execute(
        "INSERT INTO task_attempts (task, no, outcome, error, detail, cause, worker, at, seconds) "
        "SELECT ?, coalesce(max(no), 0) + 1, ?, ?, ?, ?, ?, ?, ? FROM task_attempts WHERE task = ?",
        (claim.no, outcome, failure.text, failure.detail, cause, worker, now, seconds, claim.no),
    )
    changed = tx.one(
        "UPDATE tasks SET status = ?, version = version + 1, attempts = ?, ready = 0, run_at = ?, error = ?, "
        f"turn = {NO_TURN}, holder = NULL, lease_until = NULL, hinted_at = NULL, ended_at = ?, updated_at = ? "
        f"WHERE no = ? RETURNING {_COLUMNS}",
        (status.value, attempts, now if final else now + policy.delay(attempts), failure.text,
         now if final else None, now, claim.no),
    )  # fmt: skip
    assert changed is not None
    task = task_of(changed)
    tell(tx, task, now)
    count_minutes(
        tx, now,
        failures=[task], failed=[task] if status is Status.FAILED else (), run_seconds=seconds or 0.0,
    )  # fmt: skip
    log.info("a run of a task did not succeed", taskID=task.id, attempt=attempts, error=failure.text, reason=outcome)
    return task


def give_back(tx: Tx, claim: Claim, *, behind: int = 0) -> Task | None:
    """Return an unfinished task to its queue without counting an attempt (used at shutdown).

    Returns None if the worker no longer owns the task. A task with a cancel request becomes CANCELLED instead.
    ``behind``: how many rounds after the current one the task is served. It keeps the order among tasks of the same
    party that are given back together.
    """
    now = tx.now()
    row = tx.one(
        "UPDATE tasks SET status = CASE WHEN cancel_by IS NULL THEN 'QUEUED' ELSE 'CANCELLED' END, "
        "ended_at = CASE WHEN cancel_by IS NULL THEN NULL ELSE CAST(? AS DOUBLE PRECISION) END, "
        "message = CASE WHEN cancel_by IS NULL THEN message ELSE 'cancelled by ' || cancel_by END, "
        f"turn = coalesce({first_turn('tasks.place')}, 0) + ?, ready = 1, version = version + 1, holder = NULL, "
        "lease_until = NULL, hinted_at = NULL, run_at = ?, updated_at = ? WHERE no = ? AND token = ? AND status = 'RUNNING' "
        f"RETURNING {_COLUMNS}",
        (now, behind, now, now, claim.no, claim.token),
    )
    if row is None:
        return None
    task = task_of(row)
    tell(tx, task, now)
    if task.is_final:
        count_minutes(tx, now, cancelled=[task])
    return task


def give_back_all(tx: Tx, claims: Sequence[Claim]) -> list[Task]:
    """Give back all claims of a worker; return the tasks that it still owned."""
    rows = tx.all(
        f"SELECT no, row_number() OVER (PARTITION BY place, party ORDER BY turn, no) - 1 FROM tasks WHERE {AMONG[tx.engine]}",
        (json.dumps([claim.no for claim in claims]),),
    )
    behind = {int(no): int(rank) for no, rank in rows}
    back = [give_back(tx, claim, behind=behind.get(claim.no, 0)) for claim in claims]
    return [task for task in back if task is not None]


def progress(tx: Tx, claim: Claim, percent: float, message: str) -> bool:
    """Record the progress of a run; return whether cancellation was requested."""
    row = tx.one(
        "UPDATE tasks SET percent = ?, message = ?, version = version + 1, updated_at = ? "
        "WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING cancel_by",
        (percent, message, tx.now(), claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    return row[0] is not None


def lapsed(tx: Tx, *, limit: int = 100) -> list[Task]:
    """Fail the runs whose worker died or did not renew its lease.

    A worker that held several tasks had started only one of them, and the row does not show which. So a task that was
    lost for the first time from such a batch always gets another try. A worker runs retried tasks alone
    (`Worker._run_here`), so a second loss is that task's own.
    """
    now = tx.now()
    rows = tx.all(
        "SELECT no, id, kind, queue, token, version, attempts, retries, retry_delay, timeout, user_id, role, holder, "
        f"lease_until, worker FROM tasks WHERE status = 'RUNNING' ORDER BY lease_until LIMIT ?{SKIP_LOCKED[tx.engine]}",
        (max(limit, 1000),),
    )
    ended = []
    held = Counter(worker for *_, worker in rows)
    for (
        no,
        id,
        kind,
        queue,
        token,
        version,
        attempts,
        retries,
        delay,
        timeout,
        user,
        role,
        holder,
        until,
        worker,
    ) in rows:
        if not has_ended(holder, until, now):
            continue
        claim = Claim(
            no, id, kind, Priority(queue), token, version, "", attempts, retries, delay, timeout, user, role, 0.0
        )
        ended.append(fail(tx, claim, LOST, outcome="lost", spare=held[worker] > 1 and attempts == 0))
        if len(ended) == limit:
            break
    return ended


def _cause(tx: Tx, kind: str, failure: Failure, now: float) -> int:
    row = tx.one(
        "INSERT INTO task_causes (kind, type, message, frame, count, first_seen, last_seen) VALUES (?, ?, ?, ?, 1, ?, ?) "
        "ON CONFLICT (kind, type, message, frame) DO UPDATE SET count = task_causes.count + 1, "
        "last_seen = excluded.last_seen RETURNING no",
        (kind, failure.type, normalise(failure.message, None), failure.frame, now, now),
    )
    assert row is not None
    return int(row[0])


def _stale(claim: Claim) -> StaleClaim:
    return StaleClaim(f"Task {claim.id} was given to another worker, or ended, while this one was not responding.")
