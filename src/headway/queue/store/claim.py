"""Claim tasks for a worker.

A worker claims rows by compare-and-set under a lease and keeps them while it renews the lease. Everything it records
afterwards carries the token of its claim (`headway.queue.store.complete`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway._lease import Owner, read_owner, stride, write_owner
from headway._sql import Database, Row, Tx, Value, listed, marks
from headway.queue.store import ClaimCheck, task_store
from headway.queue.store.limits import Limits, held_kinds
from headway.queue.store.tasks import NO_TURN
from headway.queue.task import Claim, Priority

#: Lease duration in seconds. Workers renew it every third of that, so a dead worker's task runs again within 20 s.
LEASE = 12.0
#: Maximum delayed tasks that one statement makes ready. It bounds the statement's duration even with a bad query plan.
PROMOTED = 500
#: Longest retry delay in seconds.
RETRY_CAP = 300.0

#: Columns of a claimed task that a worker needs.
CLAIMED = (
    "no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, "
    "run_at, hinted_at, place, turn"
)
#: What a claim writes; `claim_values` are its parameters.
CLAIM_VALUES = (
    "status = 'RUNNING', version = version + 1, token = token + ?, holder = ?, lease_until = {now} + ?, worker = ?, "
    "started_at = {now}, updated_at = {now}"
)
#: Condition that excludes tasks that `RetryLater` postponed: their delay may exceed the cap.
NOT_POSTPONED = " AND NOT EXISTS (SELECT 1 FROM task_delays d WHERE d.task = tasks.no AND d.until = tasks.run_at)"
#: Condition for delayed tasks that have become ready. A retry whose delay exceeds the cap is ready too: see `promote`.
DELAYED_DUE = (
    "EXISTS (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND run_at <= {now}) OR EXISTS "
    "(SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND attempts > 0 "
    f"AND run_at > {{now}} + {RETRY_CAP + 1.0}{NOT_POSTPONED})"
)


@dataclass(frozen=True, slots=True)
class Claimant:
    """The claiming worker: its name, its process and the kinds it has handlers for.

    ``held``: numbers of the tasks it has already, which a claim does not return again.
    """

    worker: str
    owner: Owner
    kinds: Sequence[str]
    lease: float = LEASE
    held: Sequence[int] = ()


def claim(
    tx: Tx,
    who: Claimant,
    *,
    queues: Sequence[Priority],
    limit: int = 1,
    unhinted: bool = False,
) -> list[Claim]:
    """Claim up to ``limit`` ready tasks of ``queues``, by priority and then by turn.

    With ``unhinted``, only tasks without an RQ hint. Paused queues are skipped.
    """
    store = task_store(tx)
    check = store.check_claim(tx)
    if check.is_due:
        promote(tx, check.now)
    if check.is_held:
        held = held_kinds(tx, check.now)
        who = replace(who, kinds=[kind for kind in who.kinds if kind not in held])
    open_queues = [queue for queue in queues if queue not in check.paused]
    if not open_queues or not who.kinds or limit < 1:
        return []
    if check.is_limited:
        return claims_of(_claim_within_limits(tx, who, open_queues, limit, check.now, unhinted=unhinted))
    return claims_of(store.claim_ready(tx, who, queues=open_queues, limit=limit, unhinted=unhinted))


def claim_next(
    database: Database,
    who: Claimant,
    *,
    queues: Sequence[Priority],
    limit: int,
    unhinted: bool = False,
) -> list[Claim]:
    """Claim tasks in one transaction that may be sent again when its reply was lost.

    Running rows of the worker that it does not hold are from an unacknowledged claim; they are returned unchanged.
    """
    return task_store(database).claim(database, who, queues=queues, limit=limit, unhinted=unhinted)


def _claim_within_limits(
    tx: Tx, who: Claimant, queues: Sequence[Priority], limit: int, now: float, *, unhinted: bool
) -> list[Row]:
    """Lock candidate rows and claim those that the limits admit, until there are enough or no more."""
    limits = Limits(tx, now)
    rows: list[Row] = []
    while len(rows) < limit:
        # Full queues and kinds are excluded from the query, so their backlog is not read.
        open_queues = [queue for queue in queues if not limits.is_full("queue", queue)]
        kinds = [kind for kind in who.kinds if not limits.is_full("kind", kind)]
        if not open_queues or not kinds:
            break
        excluded, values = limits.excluded()
        found = tx.all(
            "SELECT no, queue, user_id, party, kind FROM tasks WHERE status = 'QUEUED' AND ready = 1 "
            f"AND place IN ({', '.join(str(queue.place) for queue in open_queues)}) AND kind IN ({marks(len(kinds))})"
            f"{' AND hinted_at IS NULL' if unhinted else ''}{excluded} ORDER BY place, turn, no LIMIT ?{tx.skip_locked}",
            (*kinds, *values, limit - len(rows)),
        )
        numbers = [no for no, queue, user, party, kind in found if limits.admits(queue, user, party, kind)]
        if not numbers:
            break
        rows += task_store(tx).claim_numbers(tx, who, numbers)
    limits.close()
    return rows


def claim_check(rows: Sequence[Row]) -> ClaimCheck:
    """Convert the rows of an engine's check to its values: one row per paused queue, or one row without."""
    now, limited, due, held, _, _ = rows[0]
    paused = {Priority(name) for *_, name, until in rows if name is not None and (until is None or until > now)}
    return ClaimCheck(float(now), paused, bool(limited), bool(due), bool(held))


def claim_values(who: Claimant) -> tuple[Value, ...]:
    """Return the parameters of `CLAIM_VALUES`."""
    return stride(), write_owner(who.owner, who.lease), who.lease, who.worker


def claims_of(rows: list[Row]) -> list[Claim]:
    """Convert rows to claims, sorted by order of service."""
    return [_claim_of(row) for row in sorted(rows, key=lambda row: (row[-2], row[-1], row[0]))]


def _claim_of(row: Row) -> Claim:
    (no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, run_at,
     hinted_at, _, _) = row  # fmt: skip
    return Claim(
        no, id, kind, Priority(queue), token, version, payload, attempts, retries, retry_delay, timeout, user_id, role,
        max(0.0, started_at - run_at), hinted_at is not None,
    )  # fmt: skip


def promote(tx: Tx, now: float) -> int:
    """Make delayed tasks ready when their delay is over; return how many.

    A retry whose delay exceeds the cap is ready too: its time was set before the clock was set back. Each of the two
    statements handles up to `PROMOTED` tasks; the next caller promotes the rest.
    """
    # Two statements: with an OR neither engine uses its index, and both scan all delayed tasks.
    due = tx.all(_PROMOTE_DUE, (now,))
    return len(due) + len(tx.all(_PROMOTE_OVERLONG, (now + RETRY_CAP + 1.0,)))


# The turn is assigned when a task becomes ready, because rounds advanced or restarted during the delay. A retry joins the
# current round. A task delayed for the first time is placed after its party's waiting tasks, as if it were submitted now.
#
# The final WHERE is true for delayed tasks only. It is checked again on the current row, because another worker may have
# promoted the task, or a user may have cancelled it.
_PROMOTE = f"""
WITH due AS MATERIALIZED (
    SELECT no AS due_no, queue AS in_queue, place AS in_place, party AS of_party, attempts AS tries,
           row_number() OVER (PARTITION BY queue, party, attempts > 0 ORDER BY run_at, no) - 1 AS behind
    FROM (SELECT no, queue, place, party, attempts, run_at FROM tasks WHERE status = 'QUEUED' AND ready = 0
          AND {{condition}} ORDER BY run_at LIMIT {PROMOTED}) AS page
), heads AS MATERIALIZED (
    SELECT head_place, coalesce((SELECT h.turn FROM tasks h WHERE h.status = 'QUEUED' AND h.ready = 1
                                 AND h.place = p.head_place ORDER BY h.place, h.turn, h.no LIMIT 1), 0) AS head
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
WHERE no = due_no AND turn = {NO_TURN} AND ended_at IS NULL RETURNING no
"""
_PROMOTE_DUE = _PROMOTE.format(condition="run_at <= ?")
_PROMOTE_OVERLONG = _PROMOTE.format(condition=f"attempts > 0 AND run_at > ?{NOT_POSTPONED}")


def restart_leases(tx: Tx) -> None:
    """Restart the lease of every running task because the recorded expiry times are unreliable.

    Live workers renew their leases; those of dead workers expire. The holder's own expiry by the machine's clock is
    cleared until the next renewal, because a sweeper on the same machine would rely on it.
    """
    # A locked row is being renewed or is ending.
    rows = tx.all(f"SELECT no, holder FROM tasks WHERE status = 'RUNNING'{tx.skip_locked}")
    task_store(tx).restart_leases(tx, [(_without_expiry(holder), no) for no, holder in rows], LEASE)


def _without_expiry(holder: str | None) -> str | None:
    found = read_owner(holder)
    return holder if found is None else write_owner(found.owner, LEASE, is_counted=False)


def renew(tx: Tx, who: Claimant, tokens: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """Renew a worker's claims (number -> token); return (numbers it no longer owns, numbers to cancel)."""
    if not tokens:
        return set(), set()
    among, numbers = listed(tx.engine, sorted(tokens), "bigint")
    rows = tx.all(
        f"UPDATE tasks SET lease_until = ?, holder = ? WHERE no IN ({among}) AND status = 'RUNNING' AND worker = ? "
        "RETURNING no, token, cancel_by",
        (tx.now() + who.lease, write_owner(who.owner, who.lease), numbers, who.worker),
    )
    owned = {no: cancel_by is not None for no, token, cancel_by in rows if token == tokens[no]}
    return tokens.keys() - owned.keys(), {no for no, cancelling in owned.items() if cancelling}
