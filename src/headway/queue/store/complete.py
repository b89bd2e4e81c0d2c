"""Record the outcome of claimed tasks.

Every write is fenced by the claim's token, so a worker that was paused past its lease cannot record anything. A run that
does not succeed costs an attempt: the task is queued for a retry, or becomes FAILED. A run of a cancelled task costs
nothing. `lapsed` ends the runs of dead workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from headway._lease import has_ended
from headway._sql import Database, Tx, listed
from headway.core.failure import Failure, normalise
from headway.core.retry import LaterLimit, RetryPolicy
from headway.core.text import printable
from headway.errors import RetryLater, StaleClaim
from headway.queue.store import task_store
from headway.queue.store.claim import RETRY_CAP, Claimant
from headway.queue.store.limits import hold
from headway.queue.store.tasks import COLUMNS, NO_TURN, count_minutes, task_of
from headway.queue.task import Claim, Priority, Status, Task
from headway.telemetry import Log, redact

log = Log("queue")

#: What a completion writes; ``given`` are the rows of the recorded results.
COMPLETE_VALUES = (
    "status = 'COMPLETED', version = version + 1, percent = 100, result = given_result, error = NULL, "
    "message = coalesce(given_message, message), holder = NULL, lease_until = NULL, "
    "ended_at = {now}, updated_at = {now}"
)
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
    return task_store(tx).complete_in(tx, successes) if successes else {}


def complete_alone(database: Database, successes: Sequence[Success]) -> dict[str, Task]:
    """Run `complete_all` in its own transaction, which may be sent again when its reply was lost."""
    return task_store(database).complete(database, successes)


def complete_and_claim(
    database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
) -> tuple[set[str], list[Claim]]:
    """Complete a worker's claims and claim its next tasks in one transaction, which may be sent again.

    ``successes`` must contain every claim the worker holds. Returns (ids of the completed tasks, next claims). An empty list
    of claims does not mean that the queues are empty: call `claim.claim_next` to find out.
    """
    return task_store(database).complete_and_claim(database, successes, who, queues=queues, limit=limit)


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
    failure, and no cause is recorded. Raises `StaleClaim` if the worker no longer owns the task.

    ``outcome``: failed, timeout, memory or lost. ``spare``: retry once more even if no attempt is left, because the task may
    never have started.
    """
    row = tx.one(
        "SELECT attempts, retries, retry_delay, cancel_by, worker FROM tasks WHERE no = ? AND token = ? "
        f"AND status = 'RUNNING'{tx.for_update}",
        (claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    attempts, retries, retry_delay, cancel_by, worker = row
    if cancel_by is not None:
        cancelled = release(tx, claim)
        assert cancelled is not None  # this transaction holds the row lock
        log.info("a cancelled task has ended", taskID=claim.id, error=failure.text, reason=outcome)
        return cancelled
    now = tx.now()
    attempts += 1
    final = not retryable or (attempts > retries and not spare)
    delay = 0.0 if final else RetryPolicy(retries, retry_delay, cap=RETRY_CAP, jitter=0.2).delay(attempts)
    _record_attempt(tx, claim, failure, outcome=outcome, worker=worker, seconds=seconds, now=now)
    task = _end_run(tx, claim, failure, attempts=attempts, run_at=now + delay, ended_at=now if final else None, now=now)
    count_minutes(tx, now, failures=[task], failed=[task] if final else (), run_seconds=seconds or 0.0)
    log.info("a run of a task did not succeed", taskID=task.id, attempt=attempts, error=failure.text, reason=outcome)
    return task


def postpone(tx: Tx, claim: Claim, later: RetryLater, *, limit: LaterLimit, seconds: float) -> Task:
    """Return a task to its queue until its delay is over, without counting an attempt.

    Beyond ``limit`` it fails, and no retry follows. A task with a cancel request becomes CANCELLED. Raises `StaleClaim` if
    the worker no longer owns the task.
    """
    reason, now = printable(redact(later.reason)), tx.now()
    row = tx.one(f"SELECT cancel_by FROM tasks WHERE no = ? AND token = ? AND status = 'RUNNING'{tx.for_update}",
                 (claim.no, claim.token))  # fmt: skip
    if row is None:
        raise _stale(claim)
    before = tx.one("SELECT times, since FROM task_delays WHERE task = ?", (claim.no,))
    times, since = (before[0] + 1, min(before[1], now)) if before else (1, now)
    if row[0] is not None or limit.exceeded(times, now - since):
        failure = Failure("RetryLater", f"postponed beyond {limit}" + (f": {reason}" if reason else ""))
        return fail(tx, claim, failure, retryable=False, seconds=seconds)
    until = now + later.seconds
    tx.execute(
        "INSERT INTO task_delays (task, times, since, until, reason) VALUES (?, ?, ?, ?, ?) ON CONFLICT (task) DO UPDATE "
        "SET times = excluded.times, since = excluded.since, until = excluded.until, reason = excluded.reason",
        (claim.no, times, since, until, reason),
    )
    if later.scope == "job":
        hold(tx, claim.kind, until, reason)
    postponed = tx.one(
        "UPDATE tasks SET status = 'QUEUED', version = version + 1, ready = 0, run_at = ?, "
        f"turn = {NO_TURN}, holder = NULL, lease_until = NULL, hinted_at = NULL, updated_at = ? "
        f"WHERE no = ? RETURNING {COLUMNS}",
        (until, now, claim.no),
    )
    assert postponed is not None
    task_store(tx).append_events(tx, [claim.id])
    log.info("a task was postponed", taskID=claim.id, kind=claim.kind, seconds=later.seconds, reason=reason)
    return task_of(postponed)


def _record_attempt(
    tx: Tx, claim: Claim, failure: Failure, *, outcome: str, worker: str | None, seconds: float | None, now: float
) -> None:
    """Add the run to the task's attempts and to the count of its cause."""
    cause = tx.one(
        "INSERT INTO task_causes (kind, type, message, frame, count, first_seen, last_seen) VALUES (?, ?, ?, ?, 1, ?, ?) "
        "ON CONFLICT (kind, type, message, frame) DO UPDATE SET count = task_causes.count + 1, "
        "last_seen = excluded.last_seen RETURNING no",
        (claim.kind, failure.type, normalise(failure.message, None), failure.frame, now, now),
    )
    assert cause is not None
    tx.execute(
        "INSERT INTO task_attempts (task, no, outcome, error, detail, cause, worker, at, seconds) "
        "SELECT ?, coalesce(max(no), 0) + 1, ?, ?, ?, ?, ?, ?, ? FROM task_attempts WHERE task = ?",
        (claim.no, outcome, failure.text, failure.detail, cause[0], worker, now, seconds, claim.no),
    )


def _end_run(
    tx: Tx, claim: Claim, failure: Failure, *, attempts: int, run_at: float, ended_at: float | None, now: float
) -> Task:
    """Queue the task for its retry at ``run_at``, or end it at ``ended_at``."""
    status = Status.QUEUED if ended_at is None else Status.FAILED
    row = tx.one(
        "UPDATE tasks SET status = ?, version = version + 1, attempts = ?, ready = 0, run_at = ?, error = ?, "
        f"turn = {NO_TURN}, holder = NULL, lease_until = NULL, hinted_at = NULL, ended_at = ?, updated_at = ? "
        f"WHERE no = ? RETURNING {COLUMNS}",
        (status.value, attempts, run_at, failure.text, ended_at, now, claim.no),
    )
    assert row is not None
    task_store(tx).append_events(tx, [claim.id])
    return task_of(row)


_RELEASE = f"""
UPDATE tasks SET status = CASE WHEN cancel_by IS NULL THEN 'QUEUED' ELSE 'CANCELLED' END,
    ended_at = CASE WHEN cancel_by IS NULL THEN NULL ELSE CAST(? AS DOUBLE PRECISION) END,
    message = CASE WHEN cancel_by IS NULL THEN message ELSE 'cancelled by ' || cancel_by END,
    turn = coalesce((SELECT h.turn FROM tasks h WHERE h.status = 'QUEUED' AND h.ready = 1 AND h.place = tasks.place
                     ORDER BY h.place, h.turn, h.no LIMIT 1), 0) + ?,
    ready = 1, version = version + 1, holder = NULL, lease_until = NULL, hinted_at = NULL, run_at = ?, updated_at = ?
WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING {COLUMNS}
"""


def release(tx: Tx, claim: Claim, *, behind: int = 0) -> Task | None:
    """Return an unfinished task to its queue without counting an attempt (used at shutdown).

    Returns None if the worker no longer owns the task. A task with a cancel request becomes CANCELLED instead.
    ``behind``: how many rounds after the current one the task is served. It keeps the order among tasks of the same
    party that are released together.
    """
    now = tx.now()
    row = tx.one(_RELEASE, (now, behind, now, now, claim.no, claim.token))
    if row is None:
        return None
    task = task_of(row)
    task_store(tx).append_events(tx, [task.id])
    if task.is_final:
        count_minutes(tx, now, cancelled=[task])
    return task


def release_all(tx: Tx, claims: Sequence[Claim]) -> list[Task]:
    """Release all claims of a worker; return the tasks that it still owned."""
    if not claims:
        return []
    among, numbers = listed(tx.engine, [claim.no for claim in claims], "bigint")
    rows = tx.all(
        "SELECT no, row_number() OVER (PARTITION BY place, party ORDER BY turn, no) - 1 FROM tasks "
        f"WHERE no IN ({among})",
        (numbers,),
    )
    behind = {int(no): int(rank) for no, rank in rows}
    released = [release(tx, claim, behind=behind.get(claim.no, 0)) for claim in claims]
    return [task for task in released if task is not None]


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


def progress_all(tx: Tx, reports: Sequence[tuple[Claim, float, str]]) -> None:
    """Record the progress of several runs. Tasks that the worker no longer owns are left out."""
    for claim, percent, message in reports:
        with suppress(StaleClaim):
            progress(tx, claim, percent, message)


def lapsed(tx: Tx, *, limit: int = 100) -> list[Task]:
    """Fail the runs whose worker died or did not renew its lease.

    A worker that held several tasks had started only one of them, and the row does not show which. So a task that was
    lost for the first time from such a batch always gets another try. A worker runs retried tasks alone
    (`Claims.next_inline`), so a second loss is that task's own.
    """
    now = tx.now()
    rows = tx.all(
        "SELECT holder, lease_until, worker, attempts, no, id, kind, queue, token, version FROM tasks "
        f"WHERE status = 'RUNNING' ORDER BY lease_until LIMIT ?{tx.skip_locked}",
        (max(limit, 1000),),
    )
    held = Counter(row[2] for row in rows)
    ended: list[Task] = []
    for holder, until, worker, attempts, no, id, kind, queue, token, version in rows:
        if not has_ended(holder, until, now):
            continue
        claim = Claim(no, id, kind, Priority(queue), token, version, "", attempts, 0, 0.0, None, None, "", 0.0)
        ended.append(fail(tx, claim, LOST, outcome="lost", spare=held[worker] > 1 and attempts == 0))
        if len(ended) == limit:
            break
    return ended


def _stale(claim: Claim) -> StaleClaim:
    return StaleClaim(f"Task {claim.id} was given to another worker, or ended, while this one was not responding.")
