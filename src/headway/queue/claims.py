"""Handing tasks out and writing down what became of them.

A worker claims rows by compare-and-set under a lease; whatever it records afterwards names the token of its claim, so a
worker that was paused past its lease records nothing. A run that did not succeed costs an attempt: then the task waits
for its next try, or it has FAILED. Who ran it and died without a word is found by `lapsed`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from headway._lease import Owner, has_ended, write_owner
from headway._sql import Database, Row, Tx, Value, array, marks
from headway.errors import StaleClaim
from headway.events.sql import SHARE_APPENDING
from headway.failure import Failure, normalise
from headway.queue.limits import Limits
from headway.queue.records import _COLUMNS, NO_TURN, count_minutes, task_of, tell
from headway.queue.values import Claim, Priority, Status, Task
from headway.retry import RetryPolicy
from headway.telemetry import Log

log = Log("queue")

#: Seconds a claim lasts unless it is renewed. With a renewal every third of it, a dead worker's task runs again in 20 s.
LEASE = 12.0
#: Tasks whose wait is over that one statement lets run: it must not take long, whatever the planner thinks of it.
PROMOTED = 500
#: The longest wait between two tries.
RETRY_CAP = 300.0

_SKIP_LOCKED = {"sqlite": "", "postgresql": " FOR UPDATE SKIP LOCKED"}
#: What a worker needs to know of a task that it is to run.
_CLAIMED = (
    "no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, "
    "run_at, hinted_at, place, turn"
)
#: The database's time, the same throughout a statement, so that an index can be asked with it.
_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM statement_timestamp())::double precision",
}
_DUE = (
    "EXISTS (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND run_at <= {now}) OR EXISTS "
    "(SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND attempts > 0 AND run_at > {now} + {cap})"
)
# What a claim must know before it takes anything, in one question: the time, the paused queues, whether there are limits,
# whether somebody's wait is over.
_LOOK = (
    f"SELECT {{now}}, EXISTS (SELECT 1 FROM task_limits), {_DUE}, q.name, q.paused_until "
    "FROM (SELECT 1) AS one LEFT JOIN task_queues q ON q.paused = 1"
)
# PostgreSQL is not told how many rows a batch has: it takes an array that it does not see for ten values and looks each of them
# up. For a hundred it would count on a read of the disk each, and read a table of ten thousand rows from end to end instead.
#: Numbers of rows as one parameter, so that the statement is the same for one and for a hundred.
_AMONG = {
    "sqlite": "no IN (SELECT value FROM json_each(?))",
    "postgresql": "no = ANY (CAST(translate(?, '[]', '{}') AS bigint[]))",
}
_GIVEN = {
    "sqlite": "SELECT json_extract(value, '$[0]') AS given_no, json_extract(value, '$[1]') AS given_token, "
    "json_extract(value, '$[2]') AS given_result, json_extract(value, '$[3]') AS given_message FROM json_each(?)",
    "postgresql": "SELECT * FROM unnest((SELECT CAST(? AS bigint[])), (SELECT CAST(? AS bigint[])), "
    "(SELECT CAST(? AS text[])), (SELECT CAST(? AS text[])), (SELECT CAST(? AS double precision[])), "
    "(SELECT CAST(? AS double precision[]))) "
    "AS g (given_no, given_token, given_result, given_message, given_waited, given_seconds)",
}
_TOLD = "id, kind, queue, status, version, user_id, attempts, error, updated_at"
# The event of each row that was changed, as `records.tell` writes it.
_TELL = (
    "INSERT INTO outbox (id, type, at, source, job, version, data) SELECT id || '-' || version, 'task.' || lower(status), "
    "updated_at, 'headway.queue', id, version, {object}('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, "
    "'attempts', attempts, 'error', error) FROM {rows} ON CONFLICT (id) DO NOTHING"
)
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
    unhinted: bool = False,
) -> list[Claim]:
    """Take up to ``limit`` tasks that may run now: the first queue's first, in each queue by turns.

    With ``unhinted`` only those that RQ was not told of. A queue that is paused gives nothing, from this moment on.
    """
    now, shut, limited, due = _look(tx)
    if due:
        promote(tx, now)
    open_queues = [queue.place for queue in queues if queue not in shut]
    if not open_queues or not who.kinds or limit < 1:
        return []
    where, values = _eligible(who, open_queues, unhinted=unhinted)
    if limited:
        rows = _take_within_limits(tx, who, where, values, limit, now)
    else:
        # The limit stands in the text: PostgreSQL plans a parameter as a tenth of all rows, and would sort what waits.
        # One statement that locks, takes and tells. What another worker has locked is skipped, not waited for.
        picked = (
            f"SELECT no AS picked_no FROM tasks WHERE {where} ORDER BY place, turn, no "
            f"LIMIT {int(limit)}{_SKIP_LOCKED[tx.engine]}"
        )
        rows = _take(tx, who, picked, values)
    return _claims_of(rows)


def claim_next(
    database: Database,
    who: Claimant,
    *,
    queues: Sequence[Priority],
    limit: int,
    unhinted: bool = False,
) -> list[Claim]:
    """`claim` for a worker that holds nothing, on PostgreSQL by one statement in one round trip where nothing is in the way.

    It may be sent again when its answer was lost, because a worker that holds nothing has no running row but those of a
    claim it did not hear of: it is given these, as they are. (Not those whose lease is half over: the sweeper may be about to
    give them to somebody else.) Where there are limits, or a wait is over, or nothing was found, `claim` decides.
    """
    if database.engine == "postgresql" and queues and who.kinds and limit > 0:
        statement, values = _claiming(who, queues, limit, unhinted=unhinted)
        rows = database.write(
            f"WITH {statement}, appending AS MATERIALIZED ({SHARE_APPENDING}), "
            f"told AS ({_telling('taken')}) SELECT {_CLAIMED} FROM taken UNION ALL SELECT * FROM mine",
            values,
            operation="queue.claim",
            idempotent=True,
        )
        if rows:
            return _claims_of(rows)
    return database.run(
        lambda tx: claim(tx, who, queues=queues, limit=limit, unhinted=unhinted), operation="queue.claim"
    )


def _claiming(
    who: Claimant, queues: Sequence[Priority], limit: int, *, unhinted: bool = False, given: str = ""
) -> tuple[str, tuple[Value, ...]]:
    """For a WITH of PostgreSQL: ``taken``, the rows of a claim, or ``mine``, those of one that the worker did not hear of.
    ``given`` names the rows that it settles by the same statement: before that it held them."""
    # The process is part of it: another one by the same name has a predecessor, whose runs the sweeper ends.
    now, process = _NOW["postgresql"], write_owner(who.owner).removesuffix("}")
    where, values = _eligible(who, [queue.place for queue in queues], unhinted=unhinted)
    settling = f" AND no NOT IN (SELECT given_no FROM {given})" if given else ""
    statement = (
        f"mine AS MATERIALIZED (SELECT {_CLAIMED} FROM tasks WHERE status = 'RUNNING' AND worker = ? "
        f"AND starts_with(holder, ?) AND lease_until > {now} + ?{settling}), picked AS MATERIALIZED (SELECT no AS picked_no "
        f"FROM tasks WHERE {where} AND NOT EXISTS (SELECT 1 FROM mine) AND NOT EXISTS (SELECT 1 FROM task_limits) "
        f"AND NOT ({_DUE.format(now=now, cap=RETRY_CAP + 1.0)}) AND queue NOT IN (SELECT name FROM task_queues "
        f"WHERE paused = 1 AND (paused_until IS NULL OR paused_until > {now})) ORDER BY place, turn, no LIMIT {int(limit)} "
        f"FOR UPDATE SKIP LOCKED), taken AS (UPDATE tasks SET {_taking(now)} "
        f"WHERE no = ANY (ARRAY(SELECT picked_no FROM picked)) RETURNING {_CLAIMED}, status, error, updated_at)"
    )
    taking: tuple[Value, ...] = (write_owner(who.owner, who.lease), who.lease, who.worker)
    return statement, (who.worker, process, who.lease / 2, *values, *taking)


def _look(tx: Tx) -> tuple[float, set[Priority], bool, bool]:
    """The time, the queues that are paused, whether there are limits, whether a wait is over."""
    rows = tx.all(_LOOK.format(now=_NOW[tx.engine], cap=RETRY_CAP + 1.0))
    now, limited, due, _, _ = rows[0]
    shut = {Priority(name) for *_, name, until in rows if name is not None and (until is None or until > now)}
    return float(now), shut, bool(limited), bool(due)


def _eligible(who: Claimant, places: Sequence[int], *, unhinted: bool) -> tuple[str, list[Value]]:
    """What may be claimed, as a condition."""
    where = f"status = 'QUEUED' AND ready = 1 AND place IN ({marks(len(places))}) AND kind IN ({marks(len(who.kinds))})"
    values: list[Value] = [*places, *who.kinds]
    if unhinted:
        where += " AND hinted_at IS NULL"
    return where, values


def _take_within_limits(tx: Tx, who: Claimant, where: str, values: list[Value], limit: int, now: float) -> list[Row]:
    """Look at rows, lock them and take those that the limits admit, until there are enough or no more."""
    limits = Limits(tx, now)
    rows: list[Row] = []
    while len(rows) < limit:
        barred, barred_values = limits.barred()
        found = tx.all(
            f"SELECT no, queue, user_id, party, kind FROM tasks WHERE {' AND '.join([where, *barred])} "
            f"ORDER BY place, turn, no LIMIT ?{_SKIP_LOCKED[tx.engine]}",
            (*values, *barred_values, limit - len(rows)),
        )
        numbers = [no for no, queue, user, party, kind in found if limits.admits(queue, user, party, kind)]
        if not numbers:
            break
        picked = f"SELECT no AS picked_no FROM tasks WHERE {_AMONG[tx.engine]}"
        rows += _take(tx, who, picked, (json.dumps(numbers),))
    limits.close()
    return rows


def _take(tx: Tx, who: Claimant, picked: str, values: Sequence[Value]) -> list[Row]:
    taken = (write_owner(who.owner, who.lease), who.lease, who.worker)
    return _change(tx, picked, (*values, *taken), _taking(_NOW[tx.engine]), "no = picked_no", _CLAIMED)


def _taking(now: str) -> str:
    return (
        f"status = 'RUNNING', version = version + 1, token = token + 1, holder = ?, lease_until = {now} + ?, worker = ?, "
        f"started_at = {now}, updated_at = {now}"
    )


def _change(tx: Tx, source: str, values: Sequence[Value], changes: str, match: str, columns: str) -> list[Row]:
    """Change the rows that match those of ``source``, and tell of each; the changed rows."""
    if tx.engine == "postgresql":
        return tx.all(f"WITH {_changing(source, changes, match, columns)}", values)
    rows = tx.all(
        f"WITH source AS MATERIALIZED ({source}) UPDATE tasks SET {changes} FROM source WHERE {match} "
        f"RETURNING {columns}, no",
        values,
    )
    if rows:
        tell = _TELL.format(object="json_object", rows=f"tasks WHERE {_AMONG['sqlite']}")
        tx.execute(tell, (json.dumps([row[-1] for row in rows]),))
    return [row[:-1] for row in rows]


def _changing(source: str, changes: str, match: str, columns: str, more: str = "") -> str:
    """The same as one statement of PostgreSQL, from behind its WITH; ``more`` is done with what was changed.

    ``source`` is evaluated once: inside an IN the planner might evaluate it again, and lock and take more rows than its
    LIMIT. The lock of those who append comes before the first number of the outbox, because the rows that are inserted
    there are those of a join with it.
    """
    return (
        f"source AS MATERIALIZED ({source}), appending AS MATERIALIZED ({SHARE_APPENDING}), changed AS (UPDATE tasks "
        f"SET {changes} FROM source WHERE {match} RETURNING tasks.*), told AS ({_telling('changed')}){more} "
        f"SELECT {columns} FROM changed"
    )


def _telling(rows: str) -> str:
    return _TELL.format(object="json_build_object", rows=f"{rows} CROSS JOIN appending")


def _claims_of(rows: list[Row]) -> list[Claim]:
    """In the order of service; the rows come in any."""
    return [_claim_of(row) for row in sorted(rows, key=lambda row: (row[-2], row[-1], row[0]))]


def _claim_of(row: Row) -> Claim:
    (no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, run_at,
     hinted_at, _, _) = row  # fmt: skip
    return Claim(
        no, id, kind, Priority(queue), token, version, payload, attempts, retries, retry_delay, timeout, user_id, role,
        max(0.0, started_at - run_at), hinted_at is not None,
    )  # fmt: skip


def promote(tx: Tx, now: float) -> int:
    """Tasks whose wait is over may run. No wait is longer than the cap: a clock that was set back holds
    up nobody. At most so many together (`PROMOTED`): whoever comes next finds the others."""
    # Two statements: with an OR neither engine would use its indexes, and look at everything that is delayed.
    due = tx.all(_promoting("run_at <= ?"), (now,))
    return len(due) + len(tx.all(_promoting("attempts > 0 AND run_at > ?"), (now + RETRY_CAP + 1.0,)))


def _promoting(condition: str) -> str:
    """Their turn is given now: while they waited the rounds went on, or began anew. A further try joins the round that is
    served; a task that waits for the first time stands behind its party's others, as if it were submitted now.

    Each row is looked up by its number. What it is asked again, in case another worker was quicker, is written so that no
    partial index answers it: before its first ANALYZE PostgreSQL takes those for empty, and would read one for each row.
    """
    return f"""
        WITH due AS MATERIALIZED (
            SELECT no AS due_no, queue AS in_queue, place AS in_place, party AS of_party, attempts AS tries,
                   row_number() OVER (PARTITION BY queue, party, attempts > 0 ORDER BY run_at, no) - 1 AS behind
            FROM (SELECT no, queue, place, party, attempts, run_at FROM tasks WHERE status = 'QUEUED' AND ready = 0
                  AND {condition} ORDER BY run_at LIMIT {PROMOTED}) AS page
        ), heads AS MATERIALIZED (
            SELECT head_place, coalesce({_head("p.head_place")}, 0) AS head
            FROM (SELECT DISTINCT in_place AS head_place FROM due) AS p
        ), lasts AS MATERIALIZED (
            SELECT last_queue, last_party, coalesce(
                (SELECT t.turn FROM tasks t WHERE t.status = 'QUEUED' AND t.queue = last_queue AND t.party = last_party
                 ORDER BY t.queue DESC, t.party DESC, t.turn DESC LIMIT 1), {NO_TURN}) AS last
            FROM (SELECT DISTINCT in_queue AS last_queue, of_party AS last_party FROM due) AS p
        )
        UPDATE tasks SET ready = 1, hinted_at = NULL,
            turn = CASE WHEN tries > 0 THEN head WHEN last >= head THEN last + 1 + behind ELSE head + behind END
        FROM due JOIN heads ON head_place = in_place JOIN lasts ON last_queue = in_queue AND last_party = of_party
        WHERE no = due_no AND status || '' = 'QUEUED' AND ready + 0 = 0 RETURNING no"""


def _head(place: str) -> str:
    """The round that is served now in a queue, as an expression; none where nothing waits."""
    return (
        f"(SELECT h.turn FROM tasks h WHERE h.status = 'QUEUED' AND h.ready = 1 AND h.place = {place} "
        "ORDER BY h.place, h.turn, h.no LIMIT 1)"
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
    now = _NOW["sqlite"]
    given = json.dumps([[done.claim.no, done.claim.token, done.result, done.message] for done in successes])
    rows = _change(tx, _GIVEN["sqlite"], (given,), _completed(now), _OWN, _COLUMNS)
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
            return set(complete_all(tx, successes)), claim(tx, who, queues=queues, limit=limit)

        return database.run(work, operation="queue.settle")
    claiming, values = _claiming(who, queues, limit, given="source")
    completed = _CLAIMED.replace("no, id,", "NULL, id,").split(", ")[:2] + ["NULL"] * (_CLAIMED.count(",") - 1)
    *given, share = _given(successes)
    rows = database.write(
        f"WITH source AS MATERIALIZED ({_GIVEN['postgresql']}), changed AS (UPDATE tasks SET {_completed(_NOW['postgresql'])} "
        f"FROM source WHERE {_OWN} RETURNING {_TOLD}, no), {claiming}, appending AS MATERIALIZED ({SHARE_APPENDING}), "
        f"told AS ({_telling(f'(SELECT {_TOLD} FROM changed UNION ALL SELECT {_TOLD} FROM taken) AS either')}), {_COUNTED} "
        f"SELECT {_CLAIMED} FROM taken UNION ALL SELECT * FROM mine UNION ALL SELECT {', '.join(completed)} FROM changed",
        (*given, *values, share),
        operation="queue.settle",
        idempotent=True,
    )
    ids = {row[1] for row in rows if row[0] is None}
    if len(ids) < len(successes):
        ids.update(row[0] for row in _completed_before(database, successes, ids))
    return ids, _claims_of([row for row in rows if row[0] is not None])


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
    return _changing(_GIVEN["postgresql"], _completed(_NOW["postgresql"]), _OWN, _COLUMNS, f", {_COUNTED}")


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
    """The run did not succeed. The task waits for its next try, has FAILED, or is CANCELLED if that was asked for.

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
    now = tx.now()
    attempts += 1
    final = cancel_by is not None or not retryable or (attempts > retries and not spare)
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
        failures=[task], failed=[task] if status is Status.FAILED else (),
        cancelled=[task] if status is Status.CANCELLED else (), run_seconds=seconds or 0.0,
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
        f"turn = coalesce({_head('tasks.place')}, 0) + ?, ready = 1, version = version + 1, holder = NULL, lease_until = NULL, "
        f"hinted_at = NULL, run_at = ?, updated_at = ? WHERE no = ? AND token = ? AND status = 'RUNNING' RETURNING {_COLUMNS}",
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
        f"SELECT no, row_number() OVER (PARTITION BY place, party ORDER BY turn, no) - 1 FROM tasks WHERE {_AMONG[tx.engine]}",
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
    """End the runs whose worker is dead or did not renew its lease: each costs an attempt, with its cause.

    A worker that held several had begun one of them, and nobody knows which. So none of these has failed for good the first
    time; a worker runs what was tried before with nothing else in its hands (`Worker._run_here`), and then it is known.
    """
    now = tx.now()
    rows = tx.all(
        "SELECT no, id, kind, queue, token, version, attempts, retries, retry_delay, timeout, user_id, role, holder, "
        f"lease_until, worker FROM tasks WHERE status = 'RUNNING' ORDER BY lease_until LIMIT ?{_SKIP_LOCKED[tx.engine]}",
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
