"""Handing tasks out and writing down what became of them.

A worker claims rows by compare-and-set under a lease; whatever it records afterwards names the token of its claim, so a
worker that was paused past its lease records nothing. A run that did not succeed costs an attempt: then the task waits
for its next try, or it has FAILED. Who ran it and died without a word is found by `lapsed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway._lease import Owner, has_ended, write_owner
from headway._sql import Row, Tx, Value, marks
from headway.errors import StaleClaim
from headway.failure import Failure, normalise
from headway.queue.limits import Limits
from headway.queue.records import _COLUMNS, count_minutes, pages, task_of, tell
from headway.queue.values import PRIORITIES, Claim, Priority, Status, Task
from headway.retry import RetryPolicy
from headway.telemetry import Log

log = Log("queue")

#: Seconds a claim lasts unless it is renewed. With a renewal every third of it, a dead worker's task runs again in 20 s.
LEASE = 12.0
#: The longest wait between two tries.
RETRY_CAP = 300.0

_SKIP_LOCKED = {"sqlite": "", "postgresql": " FOR UPDATE SKIP LOCKED"}
_CLAIMED = "no, token, payload, retry_delay, timeout, place, turn, run_at"
LOST = Failure("WorkerLost", "the worker that ran this task died or lost its lease")


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims: the worker's name, its process, the kinds it has handlers for."""

    worker: str
    owner: Owner
    kinds: Sequence[str]
    lease: float = LEASE


# ---------------------------------------------------------------------------------------------------------------------
# Claiming


def claim(
    tx: Tx,
    who: Claimant,
    *,
    queues: Sequence[Priority],
    limit: int = 1,
    ids: Sequence[str] | None = None,
    unhinted: bool = False,
) -> list[Claim]:
    """Take up to ``limit`` tasks that may run now: the first queue's first, in each queue by turns.

    With ``ids`` only these, as far as they still wait; with ``unhinted`` only those that RQ was not told of. A queue that
    is paused gives nothing, from this moment on.
    """
    now = tx.now()
    promote(tx, now)
    open_queues = [queue.place for queue in queues if queue not in paused(tx, now)]
    if not open_queues or not who.kinds or limit < 1 or (ids is not None and not ids):
        return []
    limits = Limits(tx, now)
    rows: list[Row] = []
    while len(rows) < limit:
        numbers = _pick(tx, who, open_queues, limit - len(rows), ids, limits, unhinted=unhinted)
        if not numbers:
            break
        rows += _take(tx, who, numbers, now)
    limits.close()
    rows.sort(key=lambda row: (row[-3], row[-2], row[-8]))
    claims = [_claim_of(row, now) for row in rows]
    for row in rows:
        tell(tx, task_of(row[:-8]), now)
    return claims


def _pick(
    tx: Tx,
    who: Claimant,
    places: Sequence[int],
    count: int,
    ids: Sequence[str] | None,
    limits: Limits,
    *,
    unhinted: bool,
) -> list[int]:
    """Rows that may run, locked. Under limits some of those looked at may not: then the caller asks for more."""
    where = [f"place IN ({marks(len(places))})", f"kind IN ({marks(len(who.kinds))})"]
    values: list[Value] = [*places, *who.kinds]
    if ids is not None:
        where.append(f"id IN ({marks(len(ids))})")
        values += ids
    if unhinted:
        where.append("hinted_at IS NULL")
    barred, barred_values = limits.barred()
    where += barred
    values += barred_values
    columns = "no, queue, user_id, party, kind"
    rows = tx.all(
        f"SELECT {columns} FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND {' AND '.join(where)} "
        f"ORDER BY place, turn, no LIMIT ?{_SKIP_LOCKED[tx.engine]}",
        (*values, count),
    )
    return [no for no, queue, user, party, kind in rows if limits.admits(queue, user, party, kind)]


def _take(tx: Tx, who: Claimant, numbers: Sequence[int], now: float) -> list[Row]:
    return tx.all(
        "UPDATE tasks SET status = 'RUNNING', version = version + 1, token = token + 1, holder = ?, lease_until = ?, "
        "worker = ?, started_at = ?, updated_at = ?, hinted_at = NULL "
        f"WHERE no IN ({marks(len(numbers))}) RETURNING {_COLUMNS}, {_CLAIMED}",
        (write_owner(who.owner, who.lease), now + who.lease, who.worker, now, now, *numbers),
    )


def _claim_of(row: Row, now: float) -> Claim:
    task = task_of(row[:-8])
    no, token, payload, retry_delay, timeout, _, _, run_at = row[-8:]
    return Claim(
        no=no, id=task.id, kind=task.kind, priority=task.priority, token=token, version=task.version, payload=payload,
        attempts=task.attempts, retries=task.retries, retry_delay=retry_delay, timeout=timeout, user_id=task.user_id,
        role=task.role, waited=max(0.0, now - run_at),
    )  # fmt: skip


def promote(tx: Tx, now: float) -> int:
    """Tasks whose wait is over may run. No wait is longer than the cap: a clock that was set back holds up nobody."""
    return tx.execute(
        "UPDATE tasks SET ready = 1, hinted_at = NULL WHERE status = 'QUEUED' AND ready = 0 AND (run_at <= ? "
        "OR (attempts > 0 AND run_at > ?))",
        (now, now + RETRY_CAP + 1.0),
    )


def paused(tx: Tx, now: float) -> set[Priority]:
    rows = tx.all(
        "SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)", (now,)
    )
    return {Priority(name) for (name,) in rows}


def renew(tx: Tx, who: Claimant, tokens: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """Prolong the claims (number -> token) of a worker: (those that are not its own any more, those to be cancelled)."""
    if not tokens:
        return set(), set()
    now = tx.now()
    kept: dict[int, bool] = {}
    numbers = sorted(tokens)
    for start in range(0, len(numbers), 500):
        page = numbers[start : start + 500]
        rows = tx.all(
            f"UPDATE tasks SET lease_until = ?, holder = ? WHERE no IN ({marks(len(page))}) AND status = 'RUNNING' "
            "AND worker = ? RETURNING no, token, cancel_by",
            (now + who.lease, write_owner(who.owner, who.lease), *page, who.worker),
        )
        kept |= {no: cancel_by is not None for no, token, cancel_by in rows if token == tokens[no]}
    return tokens.keys() - kept.keys(), {no for no, cancelling in kept.items() if cancelling}


# ---------------------------------------------------------------------------------------------------------------------
# Settling


def complete(tx: Tx, claim: Claim, result: str | None, seconds: float, *, message: str | None = None) -> Task:
    """The handler returned; ``message`` is what it said last, if that is not written yet.

    Raises `StaleClaim` when the task is somebody else's by now.
    """
    now = tx.now()
    row = tx.one(
        "UPDATE tasks SET status = 'COMPLETED', version = version + 1, percent = 100, result = ?, error = NULL, "
        "message = coalesce(?, message), holder = NULL, lease_until = NULL, ended_at = ?, updated_at = ? "
        f"WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING {_COLUMNS}",
        (result, message, now, now, claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    task = task_of(row)
    tell(tx, task, now)
    count_minutes(tx, now, completed=[task], wait_seconds=claim.waited, run_seconds=seconds)
    return task


def fail(
    tx: Tx,
    claim: Claim,
    failure: Failure,
    *,
    outcome: str = "failed",
    retryable: bool = True,
    seconds: float | None = None,
) -> Task:
    """The run did not succeed. The task waits for its next try, has FAILED, or is CANCELLED if that was asked for."""
    row = tx.one(
        "SELECT attempts, retries, retry_delay, cancel_by, worker FROM tasks WHERE no = ? AND token = ? "
        f"AND status = 'RUNNING'{' FOR UPDATE' if tx.engine == 'postgresql' else ''}",
        (claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    attempts, retries, retry_delay, cancel_by, worker = row
    now = tx.now()
    attempts += 1
    final = cancel_by is not None or not retryable or attempts > retries
    policy = RetryPolicy(retries, retry_delay, cap=RETRY_CAP, jitter=0.2)
    status = Status.CANCELLED if cancel_by is not None else Status.FAILED if final else Status.QUEUED
    cause = _cause(tx, claim.kind, failure, now)
    tx.execute(
        "INSERT INTO task_attempts (task, no, outcome, error, detail, cause, worker, at, seconds) "
        "SELECT ?, coalesce(max(no), 0) + 1, ?, ?, ?, ?, ?, ?, ? FROM task_attempts WHERE task = ?",
        (claim.no, outcome, failure.text, failure.detail, cause, worker, now, seconds, claim.no),
    )
    changed = tx.one(
        "UPDATE tasks SET status = ?, version = version + 1, attempts = ?, ready = 0, run_at = ?, error = ?, "
        "holder = NULL, lease_until = NULL, hinted_at = NULL, ended_at = ?, updated_at = ? "
        f"WHERE no = ? RETURNING {_COLUMNS}",
        (status.value, attempts, now if final else now + policy.delay(attempts), failure.text,
         now if final else None, now, claim.no),
    )  # fmt: skip
    assert changed is not None
    task = task_of(changed)
    tell(tx, task, now)
    count_minutes(
        tx, now,
        failures=[task], failed=[task] if status is Status.FAILED else (),
        cancelled=[task] if status is Status.CANCELLED else (), run_seconds=seconds or 0.0,
    )  # fmt: skip
    log.info("a run of a task did not succeed", taskID=task.id, attempt=attempts, error=failure.text, reason=outcome)
    return task


def cancelled(tx: Tx, claim: Claim) -> Task:
    """The worker ended a run because somebody asked for it."""
    now = tx.now()
    row = tx.one(
        "UPDATE tasks SET status = 'CANCELLED', version = version + 1, holder = NULL, lease_until = NULL, ended_at = ?, "
        "updated_at = ?, message = 'cancelled by ' || cancel_by "
        f"WHERE no = ? AND token = ? AND status = 'RUNNING' AND cancel_by IS NOT NULL RETURNING {_COLUMNS}",
        (now, now, claim.no, claim.token),
    )
    if row is None:
        raise _stale(claim)
    task = task_of(row)
    tell(tx, task, now)
    count_minutes(tx, now, cancelled=[task])
    return task


def give_back(tx: Tx, claim: Claim) -> Task | None:
    """Return a task that was not run to its end (a shutdown): no attempt is counted. None if it is not ours any more."""
    now = tx.now()
    row = tx.one(
        "UPDATE tasks SET status = 'QUEUED', ready = 1, version = version + 1, holder = NULL, lease_until = NULL, "
        f"hinted_at = NULL, run_at = ?, updated_at = ? WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING {_COLUMNS}",
        (now, now, claim.no, claim.token),
    )
    if row is None:
        return None
    task = task_of(row)
    tell(tx, task, now)
    return task


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
    """End the runs whose worker is dead or did not renew its lease: each costs an attempt, with its cause."""
    now = tx.now()
    rows = tx.all(
        "SELECT no, id, kind, queue, token, version, attempts, retries, retry_delay, timeout, user_id, role, holder, "
        f"lease_until FROM tasks WHERE status = 'RUNNING' ORDER BY lease_until LIMIT ?{_SKIP_LOCKED[tx.engine]}",
        (max(limit, 1000),),
    )
    ended = []
    for no, id, kind, queue, token, version, attempts, retries, delay, timeout, user, role, holder, until in rows:
        if not has_ended(holder, until, now):
            continue
        claim = Claim(
            no, id, kind, Priority(queue), token, version, "", attempts, retries, delay, timeout, user, role, 0.0
        )
        ended.append(fail(tx, claim, LOST, outcome="lost"))
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


# ---------------------------------------------------------------------------------------------------------------------
# Hints: which ids RQ should know


def unhinted(tx: Tx, *, limit: int) -> list[tuple[str, Priority]]:
    """Tasks that may run and of which RQ was not told, in the order of service; none of a paused queue."""
    now = tx.now()
    open_queues = [queue.place for queue in PRIORITIES if queue not in paused(tx, now)]
    barred, values = Limits(tx, now).barred()
    where = "".join(f" AND {condition}" for condition in barred)
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND hinted_at IS NULL "
        f"AND place IN ({marks(len(open_queues))}){where} ORDER BY place, turn, no LIMIT ?",
        (*open_queues, *values, limit),
    )
    return [(id, Priority(queue)) for id, queue in rows]


def doubtful(tx: Tx, *, older_than: float, limit: int) -> list[tuple[str, Priority]]:
    """Tasks whose hint is so old that it may be lost."""
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND hinted_at IS NOT NULL AND hinted_at < ? "
        "ORDER BY hinted_at LIMIT ?",
        (tx.now() - older_than, limit),
    )
    return [(id, Priority(queue)) for id, queue in rows]


def hinted(tx: Tx, ids: Sequence[str]) -> None:
    """RQ was told of these just now."""
    now = tx.now()
    for page in pages(ids):
        tx.execute(
            f"UPDATE tasks SET hinted_at = ? WHERE id IN ({marks(len(page))}) AND status = 'QUEUED'", (now, *page)
        )


def unhint(tx: Tx, ids: Iterable[str]) -> None:
    """RQ does not know of these (any more)."""
    for page in pages(sorted(ids)):
        tx.execute(f"UPDATE tasks SET hinted_at = NULL WHERE id IN ({marks(len(page))}) AND status = 'QUEUED'", page)


def known(tx: Tx, ids: Sequence[str]) -> tuple[set[str], set[str]]:
    """(those of ``ids`` that are tasks, those of them that wait)."""
    found: dict[str, str] = {}
    for page in pages(ids):
        found |= dict(tx.all(f"SELECT id, status FROM tasks WHERE id IN ({marks(len(page))})", page))
    return set(found), {id for id, status in found.items() if status == Status.QUEUED}
