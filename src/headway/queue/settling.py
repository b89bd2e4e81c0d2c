"""Writing down what became of claimed tasks.

Every record names the token of its claim, so a worker that was paused past its lease records nothing. A run that did not
succeed costs an attempt: then the task waits for its next try, or it has FAILED. A run of a task that was cancelled costs
nothing. `lapsed` ends the runs of workers that died.
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
from headway.errors import StaleClaim
from headway.events.sql import SHARE_APPENDING
from headway.failure import Failure, normalise
from headway.queue import claims
from headway.queue.changing import AMONG, SKIP_LOCKED, STATEMENT_TIME, TOLD, change, changing, telling
from headway.queue.claims import CLAIMED, RETRY_CAP, Claimant, claiming, claims_of, first_turn
from headway.queue.records import _COLUMNS, NO_TURN, count_minutes, task_of, tell
from headway.queue.values import Claim, Priority, Status, Task
from headway.retry import RetryPolicy
from headway.telemetry import Log

log = Log("queue")

# PostgreSQL is not told how many rows a batch has: it takes an array that it does not see for ten values and looks each of them
# up. For a hundred it would count on a read of the disk each, and read a table of ten thousand rows from end to end instead.
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
    """A run whose handler returned. ``message`` is what it said last, if that is not written yet."""

    claim: Claim
    result: str | None
    seconds: float
    message: str | None = None


def complete(tx: Tx, claim: Claim, result: str | None, seconds: float, *, message: str | None = None) -> Task:
    """The handler returned. Raises `StaleClaim` when the task is somebody else's by now."""
    tasks = complete_all(tx, [Success(claim, result, seconds, message)])
    if not tasks:
        raise _stale(claim)
    return tasks[claim.id]


def complete_all(tx: Tx, successes: Sequence[Success]) -> dict[str, Task]:
    """Handlers returned: their tasks by id, those left out that are somebody else's by now. A batch costs what one costs:
    each row is changed only under the token of its own claim, whatever becomes of its neighbours."""
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
    """`complete_all` in a transaction of its own, on PostgreSQL by one statement in one round trip. It may be sent again when
    its answer was lost: a row that is completed under a claim's own token was completed by this very call."""
    if database.engine != "postgresql":
        return database.run(lambda tx: complete_all(tx, successes), operation="queue.settle")
    rows = database.write(f"WITH {_completing()}", _given(successes), operation="queue.settle", idempotent=True)
    if len(rows) < len(successes):
        rows += _completed_before(database, successes, {row[0] for row in rows})
    return {task.id: task for task in map(task_of, rows)}


def _completed_before(database: Database, successes: Sequence[Success], known: set[str]) -> list[Row]:
    """Those of the others that are completed under the token of their claim: the answer to it was lost. A statement of its own:
    as part of the first it cost each record a look at the whole table, because PostgreSQL plans for what it saw of it last."""
    left = [done for done in successes if done.claim.id not in known]
    return database.all(
        f"WITH source AS MATERIALIZED ({_GIVEN['postgresql']}) SELECT {_COLUMNS} FROM source JOIN tasks ON no = given_no "
        "AND token = given_token AND status || '' = 'COMPLETED'",
        _given(left)[:-1],
    )


def complete_and_claim(
    database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
) -> tuple[set[str], list[Claim]]:
    """`complete_alone` for all that a worker holds, and the first look of `claim_next`, as one transaction: (the ids of those
    that are completed, what it may run next). On PostgreSQL it is one statement, which may be sent again as each of them.

    Nothing found does not mean that nothing waits: then `claim_next` decides.
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


# What waits for a record is found by its number. Status is asked so that no partial index answers it: PostgreSQL would read
# through everything that runs.
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
    """The batch column by column, and whose share of the minute it is counted in."""
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

    A task that was asked to cancel is CANCELLED however its run ended. That run counts neither as an attempt nor as a failure
    and has no cause.

    ``spare``: it is tried once more even if no try is left, because it may not have been run at all.
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
        assert cancelled is not None  # this transaction holds the row
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
    """Return a task that was not run to its end (a shutdown): no attempt is counted. None if it is not ours any more.

    It joins the round that is served now, or one so many rounds ``behind``: those of its party that are given back with it
    stand one behind the other, as they did. One that somebody asked to cancel is cancelled: it waits for nobody.
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
    """`give_back` for what a worker held; those that were still its own."""
    rows = tx.all(
        f"SELECT no, row_number() OVER (PARTITION BY place, party ORDER BY turn, no) - 1 FROM tasks WHERE {AMONG[tx.engine]}",
        (json.dumps([claim.no for claim in claims]),),
    )
    behind = {int(no): int(rank) for no, rank in rows}
    back = [give_back(tx, claim, behind=behind.get(claim.no, 0)) for claim in claims]
    return [task for task in back if task is not None]


def progress(tx: Tx, claim: Claim, percent: float, message: str) -> bool:
    """Note how far a run is; whether somebody asked for it to be cancelled."""
    row = tx.one(
        "UPDATE tasks SET percent = ?, message = ?, version = version + 1, updated_at = ? "
        "WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING cancel_by",
        (percent, message, tx.now(), claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    return row[0] is not None


def lapsed(tx: Tx, *, limit: int = 100) -> list[Task]:
    """End the runs whose worker is dead or did not renew its lease, as `fail` does.

    A worker that held several had begun one of them, and nobody knows which. So none of these has failed for good the first
    time; a worker runs what was tried before with nothing else in its hands (`Worker._run_here`), and then it is known.
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
