"""Claim tasks for a worker.

A worker claims rows by compare-and-set under a lease and keeps them while it renews the lease. Everything it records
afterwards carries the token of its claim (`headway.queue.store.complete`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway._lease import Owner, read_owner, stride, write_owner
from headway._sql import Database, Row, Tx, Value, marks
from headway.events.store.postgres import SHARE_APPENDING
from headway.queue.store.events import AMONG, SKIP_LOCKED, STATEMENT_TIME, change, telling
from headway.queue.store.limits import Limits
from headway.queue.store.tasks import NO_TURN
from headway.queue.task import Claim, Priority
from headway.telemetry import Log

log = Log("queue")

#: Lease duration in seconds. Workers renew it every third of that, so a dead worker's task runs again within 20 s.
LEASE = 12.0
#: Most delayed tasks that one statement makes ready. It bounds the statement's duration even with a bad query plan.
PROMOTED = 500
#: Longest retry delay in seconds.
RETRY_CAP = 300.0

#: Columns of a claimed task that a worker needs.
CLAIMED = (
    "no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, "
    "run_at, hinted_at, place, turn"
)
_DUE = (
    "EXISTS (SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND run_at <= {now}) OR EXISTS "
    "(SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 0 AND attempts > 0 AND run_at > {now} + {cap})"
)
# Everything a claim checks first, in one query: the time, whether limits exist, whether delayed tasks are due, and the
# paused queues.
_LOOK = (
    f"SELECT {{now}}, EXISTS (SELECT 1 FROM task_limits), {_DUE}, q.name, q.paused_until "
    "FROM (SELECT 1) AS one LEFT JOIN task_queues q ON q.paused = 1"
)


@dataclass(frozen=True, slots=True)
class Claimant:
    """The claiming worker: its name, its process and the kinds it has handlers for."""

    worker: str
    owner: Owner
    kinds: Sequence[str]
    lease: float = LEASE


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
    now, shut, limited, due = _look(tx)
    if due:
        promote(tx, now)
    open_queues = [queue for queue in queues if queue not in shut]
    if not open_queues or not who.kinds or limit < 1:
        return []
    if limited:
        rows = _take_within_limits(tx, who, open_queues, limit, now, unhinted=unhinted)
    else:
        where, values = _eligible(_places(open_queues), who.kinds, unhinted=unhinted)
        # The limit is in the SQL text because PostgreSQL assumes a tenth of all rows for a parameter and would sort the
        # backlog. One statement locks, claims and writes the events. Rows locked by other workers are skipped.
        picked = (
            f"SELECT no AS picked_no FROM tasks WHERE {where} ORDER BY place, turn, no "
            f"LIMIT {int(limit)}{SKIP_LOCKED[tx.engine]}"
        )
        rows = _take(tx, who, picked, values)
    return claims_of(rows)


def claim_next(
    database: Database,
    who: Claimant,
    *,
    queues: Sequence[Priority],
    limit: int,
    unhinted: bool = False,
) -> list[Claim]:
    """Claim tasks for a worker that holds none; on PostgreSQL in one round trip if possible.

    The statement may be sent again when its reply was lost. A worker that holds nothing can only have running rows from
    an unacknowledged claim, and the statement returns those rows unchanged. Rows whose lease is half over are excluded,
    because the sweeper may soon give them to another worker.

    If limits exist, delayed tasks are due or nothing was found, `claim` decides.
    """
    if database.engine == "postgresql" and queues and who.kinds and limit > 0:
        statement, values = claiming(who, queues, limit, unhinted=unhinted)
        rows = database.write(
            f"WITH {statement}, appending AS MATERIALIZED ({SHARE_APPENDING}), "
            f"told AS ({telling('taken')}) SELECT {CLAIMED} FROM taken UNION ALL SELECT * FROM mine",
            values,
            operation="queue.claim",
            idempotent=True,
        )
        if rows:
            return claims_of(rows)
    return database.run(
        lambda tx: claim(tx, who, queues=queues, limit=limit, unhinted=unhinted), operation="queue.claim"
    )


def claiming(
    who: Claimant, queues: Sequence[Priority], limit: int, *, unhinted: bool = False, given: str = ""
) -> tuple[str, tuple[Value, ...]]:
    """Return CTEs for PostgreSQL: ``taken`` (newly claimed rows) and ``mine`` (rows of an unacknowledged claim).

    ``given`` names the CTE of rows that the same statement completes; they are not part of ``mine``.
    """
    # Match the process too: a restarted worker may reuse the name, and the sweeper ends its predecessor's runs.
    now, process = STATEMENT_TIME["postgresql"], write_owner(who.owner).removesuffix("}")
    # Resolve the open queues before scanning tasks, so that the backlog of a paused queue is never read.
    served = ", ".join(f"({queue.place}, '{queue.value}')" for queue in queues)
    open_places = (
        f"= ANY (ARRAY(SELECT at FROM (VALUES {served}) AS served (at, name) WHERE name NOT IN (SELECT q.name "
        f"FROM task_queues q WHERE q.paused = 1 AND (q.paused_until IS NULL OR q.paused_until > {now}))))"
    )
    where, values = _eligible(open_places, who.kinds, unhinted=unhinted)
    settling = f" AND no NOT IN (SELECT given_no FROM {given})" if given else ""
    statement = (
        f"mine AS MATERIALIZED (SELECT {CLAIMED} FROM tasks WHERE status = 'RUNNING' AND worker = ? "
        f"AND starts_with(holder, ?) AND lease_until > {now} + ?{settling}), picked AS MATERIALIZED (SELECT no AS picked_no "
        f"FROM tasks WHERE {where} AND NOT EXISTS (SELECT 1 FROM mine) AND NOT EXISTS (SELECT 1 FROM task_limits) "
        f"AND NOT ({_DUE.format(now=now, cap=RETRY_CAP + 1.0)}) ORDER BY place, turn, no LIMIT {int(limit)} "
        f"FOR UPDATE SKIP LOCKED), taken AS (UPDATE tasks SET {_taking(now)} "
        f"WHERE no = ANY (ARRAY(SELECT picked_no FROM picked)) RETURNING {CLAIMED}, status, error, updated_at)"
    )
    return statement, (who.worker, process, who.lease / 2, *values, *_taken(who))


def _look(tx: Tx) -> tuple[float, set[Priority], bool, bool]:
    """Return the time, the paused queues, whether limits exist and whether delayed tasks are due."""
    rows = tx.all(_LOOK.format(now=STATEMENT_TIME[tx.engine], cap=RETRY_CAP + 1.0))
    now, limited, due, _, _ = rows[0]
    shut = {Priority(name) for *_, name, until in rows if name is not None and (until is None or until > now)}
    return float(now), shut, bool(limited), bool(due)


def _places(queues: Sequence[Priority]) -> str:
    """Return a condition on the place column. The numbers are ours, so they can be part of the SQL text."""
    return f"IN ({', '.join(str(queue.place) for queue in queues)})"


def _eligible(places: str, kinds: Sequence[str], *, unhinted: bool) -> tuple[str, list[Value]]:
    """Return the SQL condition, and its parameters, for claimable tasks."""
    where = f"status = 'QUEUED' AND ready = 1 AND place {places} AND kind IN ({marks(len(kinds))})"
    if unhinted:
        where += " AND hinted_at IS NULL"
    return where, list(kinds)


def _take_within_limits(
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
        where, values = _eligible(_places(open_queues), kinds, unhinted=unhinted)
        barred, barred_values = limits.barred()
        found = tx.all(
            f"SELECT no, queue, user_id, party, kind FROM tasks WHERE {' AND '.join([where, *barred])} "
            f"ORDER BY place, turn, no LIMIT ?{SKIP_LOCKED[tx.engine]}",
            (*values, *barred_values, limit - len(rows)),
        )
        numbers = [no for no, queue, user, party, kind in found if limits.admits(queue, user, party, kind)]
        if not numbers:
            break
        picked = f"SELECT no AS picked_no FROM tasks WHERE {AMONG[tx.engine]}"
        rows += _take(tx, who, picked, (json.dumps(numbers),))
    limits.close()
    return rows


def _take(tx: Tx, who: Claimant, picked: str, values: Sequence[Value]) -> list[Row]:
    return change(tx, picked, (*values, *_taken(who)), _taking(STATEMENT_TIME[tx.engine]), "no = picked_no", CLAIMED)


def _taking(now: str) -> str:
    return (
        f"status = 'RUNNING', version = version + 1, token = token + ?, holder = ?, lease_until = {now} + ?, worker = ?, "
        f"started_at = {now}, updated_at = {now}"
    )


def _taken(who: Claimant) -> tuple[Value, ...]:
    """Return the parameters of `_taking`."""
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
    due = tx.all(_promoting("run_at <= ?"), (now,))
    return len(due) + len(tx.all(_promoting("attempts > 0 AND run_at > ?"), (now + RETRY_CAP + 1.0,)))


def _promoting(condition: str) -> str:
    """Return the statement that makes the delayed tasks matching ``condition`` ready.

    It assigns the turn now, because rounds advanced or restarted during the delay. A retry joins the current round. A
    task delayed for the first time is placed after its party's waiting tasks, as if it were submitted now.

    The final WHERE repeats the status check in case another worker promoted the row first. Its expressions keep
    PostgreSQL off the partial indexes. Before the first ANALYZE it assumes those are empty and would scan one per row.
    """
    return f"""
        WITH due AS MATERIALIZED (
            SELECT no AS due_no, queue AS in_queue, place AS in_place, party AS of_party, attempts AS tries,
                   row_number() OVER (PARTITION BY queue, party, attempts > 0 ORDER BY run_at, no) - 1 AS behind
            FROM (SELECT no, queue, place, party, attempts, run_at FROM tasks WHERE status = 'QUEUED' AND ready = 0
                  AND {condition} ORDER BY run_at LIMIT {PROMOTED}) AS page
        ), heads AS MATERIALIZED (
            SELECT head_place, coalesce({first_turn("p.head_place")}, 0) AS head
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


def first_turn(place: str) -> str:
    """Return an SQL expression for the current round of a queue; NULL if no task is ready."""
    return (
        f"(SELECT h.turn FROM tasks h WHERE h.status = 'QUEUED' AND h.ready = 1 AND h.place = {place} "
        "ORDER BY h.place, h.turn, h.no LIMIT 1)"
    )


def begin_leases_anew(tx: Tx) -> None:
    """Restart the lease of every running task because the recorded expiry times are unreliable.

    Live workers renew their leases; those of dead workers expire. The holder's own expiry by the machine's clock is
    cleared until the next renewal, because a sweeper on the same machine would rely on it.
    """
    # A locked row is being renewed or is ending.
    rows = tx.all(f"SELECT no, holder FROM tasks WHERE status = 'RUNNING'{SKIP_LOCKED[tx.engine]}")
    tx.executemany(
        f"UPDATE tasks SET lease_until = {STATEMENT_TIME[tx.engine]} + {LEASE}, holder = ? WHERE no = ?",
        [(_uncounted(holder), no) for no, holder in rows],
    )


def _uncounted(holder: str | None) -> str | None:
    found = read_owner(holder)
    return holder if found is None else write_owner(found.owner, LEASE, is_counted=False)


def paused(tx: Tx, now: float) -> set[Priority]:
    """Return the queues that are paused at ``now``."""
    rows = tx.all(
        "SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)", (now,)
    )
    return {Priority(name) for (name,) in rows}


def renew(tx: Tx, who: Claimant, tokens: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """Renew a worker's claims (number -> token); return (numbers it no longer owns, numbers to cancel)."""
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
