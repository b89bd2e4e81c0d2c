"""Handing tasks out. A worker claims rows by compare-and-set under a lease; it keeps them as long as it renews it, and
whatever it records afterwards names the token of its claim (`headway.queue.settling`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway._lease import Owner, read_owner, stride, write_owner
from headway._sql import Database, Row, Tx, Value, marks
from headway.events.sql import SHARE_APPENDING
from headway.queue.changing import AMONG, SKIP_LOCKED, STATEMENT_TIME, change, telling
from headway.queue.limits import Limits
from headway.queue.records import NO_TURN
from headway.queue.values import Claim, Priority
from headway.telemetry import Log

log = Log("queue")

#: Seconds a claim lasts unless it is renewed. With a renewal every third of it, a dead worker's task runs again in 20 s.
LEASE = 12.0
#: Tasks whose wait is over that one statement lets run: it must not take long, whatever the planner thinks of it.
PROMOTED = 500
#: The longest wait between two tries.
RETRY_CAP = 300.0

#: What a worker needs to know of a task that it is to run.
CLAIMED = (
    "no, id, kind, queue, token, version, payload, attempts, retries, retry_delay, timeout, user_id, role, started_at, "
    "run_at, hinted_at, place, turn"
)
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


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims: the worker's name, its process, the kinds it has handlers for."""

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
    """Take up to ``limit`` tasks that may run now: the first queue's first, in each queue by turns.

    With ``unhinted`` only those that RQ was not told of. A queue that is paused gives nothing, from this moment on.
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
        # The limit stands in the text: PostgreSQL plans a parameter as a tenth of all rows, and would sort what waits.
        # One statement that locks, takes and tells. What another worker has locked is skipped, not waited for.
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
    """`claim` for a worker that holds nothing, on PostgreSQL by one statement in one round trip where nothing is in the way.

    It may be sent again when its answer was lost, because a worker that holds nothing has no running row but those of a
    claim it did not hear of: it is given these, as they are. (Not those whose lease is half over: the sweeper may be about to
    give them to somebody else.) Where there are limits, or a wait is over, or nothing was found, `claim` decides.
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
    """For a WITH of PostgreSQL: ``taken``, the rows of a claim, or ``mine``, those of one that the worker did not hear of.
    ``given`` names the rows that it settles by the same statement: before that it held them."""
    # The process is part of it: another one by the same name has a predecessor, whose runs the sweeper ends.
    now, process = STATEMENT_TIME["postgresql"], write_owner(who.owner).removesuffix("}")
    # Which places are open is known before the first row is looked at: of a paused queue none is, however many wait in it.
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
    """The time, the queues that are paused, whether there are limits, whether a wait is over."""
    rows = tx.all(_LOOK.format(now=STATEMENT_TIME[tx.engine], cap=RETRY_CAP + 1.0))
    now, limited, due, _, _ = rows[0]
    shut = {Priority(name) for *_, name, until in rows if name is not None and (until is None or until > now)}
    return float(now), shut, bool(limited), bool(due)


def _places(queues: Sequence[Priority]) -> str:
    """Numbers of our own, so they stand in the text."""
    return f"IN ({', '.join(str(queue.place) for queue in queues)})"


def _eligible(places: str, kinds: Sequence[str], *, unhinted: bool) -> tuple[str, list[Value]]:
    """What may be claimed, as a condition."""
    where = f"status = 'QUEUED' AND ready = 1 AND place {places} AND kind IN ({marks(len(kinds))})"
    if unhinted:
        where += " AND hinted_at IS NULL"
    return where, list(kinds)


def _take_within_limits(
    tx: Tx, who: Claimant, queues: Sequence[Priority], limit: int, now: float, *, unhinted: bool
) -> list[Row]:
    """Look at rows, lock them and take those that the limits admit, until there are enough or no more."""
    limits = Limits(tx, now)
    rows: list[Row] = []
    while len(rows) < limit:
        # A queue or a kind that is full is not asked for: its rows are not looked at, however many they are.
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
    """The values of `_taking`."""
    return stride(), write_owner(who.owner, who.lease), who.lease, who.worker


def claims_of(rows: list[Row]) -> list[Claim]:
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
    """The round that is served now in a queue, as an expression; none where nothing waits."""
    return (
        f"(SELECT h.turn FROM tasks h WHERE h.status = 'QUEUED' AND h.ready = 1 AND h.place = {place} "
        "ORDER BY h.place, h.turn, h.no LIMIT 1)"
    )


def begin_leases_anew(tx: Tx) -> None:
    """What is known of leases is not to be believed. Each is given its time from now on: whoever lives renews it, and that of a
    dead worker ends. Also its owner's text says no more when it ends by the machine's own clock, until it is renewed: a sweeper
    of the same machine would believe that."""
    # What is locked is being renewed, or ends.
    rows = tx.all(f"SELECT no, holder FROM tasks WHERE status = 'RUNNING'{SKIP_LOCKED[tx.engine]}")
    tx.executemany(
        f"UPDATE tasks SET lease_until = {STATEMENT_TIME[tx.engine]} + {LEASE}, holder = ? WHERE no = ?",
        [(_uncounted(holder), no) for no, holder in rows],
    )


def _uncounted(holder: str | None) -> str | None:
    found = read_owner(holder)
    return holder if found is None else write_owner(found.owner, LEASE, is_counted=False)


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
