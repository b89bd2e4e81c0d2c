"""The items' tables: registering, claiming, releasing, recording successes, deleting.

Every function runs in the caller's transaction. An item has a row in ``input_products`` from its registration on, one in
``progress`` from its first run or claim on, and one in ``dead_letters`` while it has no retries left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headway._lease import shorten
from headway._sql import Database, Row, Tx, Value, listed
from headway.ledger.store.contract import item_store
from headway.ledger.values import MAX_INDEX, NOTED, Done, Item, Later, NewItem

#: Items that are not done, by the partial index on them. The second condition is redundant, but it matches more of that
#: index than of the primary key. Without statistics the planner would rate both equal and might read every done item.
OPEN = "status <> 'done' AND status IN ('pending', 'failed')"
#: The tables with rows per item, in deletion order: the item itself is deleted last.
TABLES = ("progress", "results", "printed", "dead_letters", "item_delays", "attempts", "input_products")
#: Items deleted per transaction, so that the write-ahead log stays small.
CHUNK = 5000

#: Registers an index without a payload.
REGISTER = "INSERT INTO input_products (job, idx) VALUES (?, ?) ON CONFLICT (job, idx) DO NOTHING"

#: Matches items whose wait is over, or whose failure lies in the future because the clock was set back.
_DUE = "(p.next_attempt_at <= ? OR (p.updated_at > ? AND p.lease_until IS NULL AND p.next_attempt_at IS NOT NULL))"
#: Makes an unfinished item available again at once. A dead letter that was not run in its last pass stays a dead
#: letter.
_RELEASE = (
    "UPDATE progress SET lease_until = NULL, holder = NULL, next_attempt_at = CASE WHEN EXISTS (SELECT 1 FROM dead_letters d "
    "WHERE d.job = progress.job AND d.idx = progress.idx) THEN NULL ELSE CAST(? AS DOUBLE PRECISION) END"
)
#: Matches an item's claim while the claimant still holds it.
_CLAIM = "WHERE job = ? AND idx = ? AND token = ? AND status <> 'done' AND lease_until IS NOT NULL"

_CLAIMABLE = (
    "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, coalesce(p.token, 0), p.lease_until, p.worker, p.holder "
    f"FROM progress p JOIN input_products i ON i.job = p.job AND i.idx = p.idx WHERE p.job = ? AND {OPEN}"
)

# ---- index ranges ------------------------------------------------------------------------------------------------------

# A newly filled table has no statistics until autovacuum runs, a minute later or more. Until then the planner assumes
# that a job is 1/200 of its table, and a range of it 1/200 of that. A plan that is cheap for a handful of rows may then
# read the whole job for every page. The statements here leave the planner no such choice.
#
# Measured with 200,000 items and no statistics, a page of 2,000 rows of ``progress`` takes 0.3 ms with ``LIMIT (SELECT ?)``
# and 25 ms with ``LIMIT ?``. After ANALYZE both take 0.3 ms, but a running job fills ``progress`` row by row.
# ``tests/ledger/test_query_plans.py`` counts the rows that every statement reads, and fails without these forms.

#: Maximum number of rows in one range.
MOST = 20_000

#: The next indices of a table. With a limit it does not know, PostgreSQL expects a tenth of the rows and walks the
#: index. With a known limit above its estimate of the job's size, it would sort all remaining rows.
_NEXT = "SELECT idx FROM {table} WHERE job = ? AND idx > ? ORDER BY idx LIMIT (SELECT ?)"

#: NOT IN instead of NOT EXISTS: PostgreSQL evaluates it by a hashed subplan, never by a nested-loop join.
_UNTRIED = (
    "SELECT i.idx, i.key, i.payload, i.fingerprint FROM input_products i WHERE i.job = ? AND i.idx > ? AND i.idx <= ? "
    "AND i.idx NOT IN (SELECT p.idx FROM progress p WHERE p.job = ? AND p.idx > ? AND p.idx <= ?) ORDER BY i.idx LIMIT ?"
)

Stretch = tuple[int, int]  # exclusive lower and inclusive upper index


def stretches(source: Database | Tx, table: str, job: int, after: int, size: int) -> Iterator[Stretch]:
    """Yield the rows of ``table`` after an index as ranges. The first has ``size`` rows, each next one twice as many."""
    while (last := last_of(source, table, job, after, size)) is not None:
        yield after, last
        after, size = last, min(2 * size, MOST)


def last_of(source: Database | Tx, table: str, job: int, after: int, size: int) -> int | None:
    """Return the last index of the next ``size`` rows of ``table``, or None if there are none."""
    row = source.one(f"SELECT max(idx) FROM ({_NEXT.format(table=table)}) AS near", (job, after, size))
    return None if row is None or row[0] is None else int(row[0])


def untried(source: Database | Tx, job: int, near: Stretch, limit: int = MOST) -> list[Row]:
    """Return (idx, key, payload, fingerprint) of the first untried items of a range."""
    return source.all(_UNTRIED, (job, *near, job, *near, limit))


def next_untried(source: Database | Tx, job: int, after: int, limit: int) -> tuple[list[Row], int]:
    """Return the next untried items, and the index up to which there are no others."""
    for near in stretches(source, "input_products", job, after, limit):
        after = near[1]
        if rows := untried(source, job, near, limit):
            return rows, rows[-1][0] if len(rows) == limit else after
    return [], after


def rows_at(tx: Tx, columns: str, job: int, indices: Sequence[int]) -> list[Row]:
    """Return ``columns`` of the progress rows at these indices. Each is found by its key."""
    return item_store(tx.engine).progress_at(tx, columns, job, indices)


# ---- content -----------------------------------------------------------------------------------------------------------


def replace(tx: Tx, job: int, new: Sequence[NewItem]) -> None:
    """Replace the content of items and make them pending again. Their history is kept."""
    tx.executemany(
        # The progress row is the only record of a successful run and is deleted below: copy it to the attempts.
        "INSERT INTO attempts (job, idx, no, outcome, error, worker, at, seconds) SELECT p.job, p.idx, "
        "coalesce((SELECT max(a.no) FROM attempts a WHERE a.job = p.job AND a.idx = p.idx), 0) + 1, "
        "'done', '', p.worker, p.updated_at, p.seconds FROM progress p "
        "WHERE p.job = ? AND p.idx = ? AND p.status = 'done'",
        [(job, item.idx) for item in new],
    )
    tx.executemany(
        "UPDATE input_products SET key = ?, payload = ?, fingerprint = ? WHERE job = ? AND idx = ?",
        [(item.key, item.payload, item.fingerprint, job, item.idx) for item in new],
    )
    _delete(tx, job, [item.idx for item in new], ("progress", "dead_letters", "item_delays", "results", "printed"))


def delete(tx: Tx, job: int, indices: Sequence[int]) -> None:
    """Delete items with everything recorded about them."""
    _delete(tx, job, indices, TABLES)


def _delete(tx: Tx, job: int, indices: Sequence[int], tables: Iterable[str]) -> None:
    for table in tables:
        tx.executemany(f"DELETE FROM {table} WHERE job = ? AND idx = ?", [(job, idx) for idx in indices])


def delete_chunk(tx: Tx, job: int) -> bool:
    """Delete the first items of a job. Return whether there may be more."""
    last = last_of(tx, "input_products", job, -1, CHUNK)
    for table in TABLES:
        tx.execute(f"DELETE FROM {table} WHERE job = ? AND idx <= ?", (job, MAX_INDEX if last is None else last))
    return last is not None


def not_done(database: Database, job: int, after: int, upto: int) -> list[int]:
    """Return the indices of a range that are neither done nor dead."""
    rows = database.all(
        "SELECT idx FROM input_products WHERE job = ? AND idx > ? AND idx <= ? AND idx NOT IN "
        "(SELECT p.idx FROM progress p WHERE p.job = ? AND p.idx > ? AND p.idx <= ? AND p.status = 'done') "
        "AND idx NOT IN (SELECT d.idx FROM dead_letters d WHERE d.job = ? AND d.idx > ? AND d.idx <= ?) ORDER BY idx",
        (job, after, upto) * 3,
    )
    return [idx for (idx,) in rows]


# ---- successes ---------------------------------------------------------------------------------------------------------


def put_done(tx: Tx, job: int, now: float, outcomes: Sequence[Done]) -> None:
    """Write successes, of tried or untried items."""
    tx.insert(
        "INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker, unkept) "
        "VALUES (?, ?, 'done', ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET status = 'done', meta = excluded.meta, "
        "updated_at = excluded.updated_at, seconds = excluded.seconds, worker = excluded.worker, "
        "next_attempt_at = NULL, lease_until = NULL, holder = NULL, unkept = excluded.unkept",
        [(job, o.idx, o.meta, now, o.seconds, o.worker, 1 if o.unkept else None) for o in outcomes],
    )
    if results := [(job, o.idx, o.result) for o in outcomes if o.result is not None]:
        tx.insert(
            "INSERT INTO results (job, idx, result) VALUES (?, ?, ?) "
            "ON CONFLICT (job, idx) DO UPDATE SET result = excluded.result",
            results,
        )
    if printed := [(job, o.idx, o.printed) for o in outcomes if o.printed is not None]:
        tx.insert(
            "INSERT INTO printed (job, idx, text) VALUES (?, ?, ?) "
            "ON CONFLICT (job, idx) DO UPDATE SET text = excluded.text",
            printed,
        )


def put_null_results(tx: Tx, job: int) -> None:
    """Give every done item that returned nothing the result ``null``, so that result files list it."""
    tx.execute(
        "INSERT INTO results (job, idx, result) SELECT p.job, p.idx, 'null' FROM progress p "
        "WHERE p.job = ? AND p.status = 'done' AND p.unkept IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM results r WHERE r.job = p.job AND r.idx = p.idx) ORDER BY p.idx",
        (job,),
    )


# ---- waiting items -----------------------------------------------------------------------------------------------------


def due(tx: Tx, job: int, now: float, within: float, limit: int) -> list[Row]:
    """Return items whose wait ends within ``within`` seconds, soonest first.

    Columns: idx, key, payload, fingerprint, attempts, next_attempt_at, updated_at.
    """
    return tx.all(
        "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, p.next_attempt_at, p.updated_at "
        "FROM progress p JOIN input_products i ON i.job = p.job AND i.idx = p.idx "
        f"WHERE p.job = ? AND {OPEN} AND {_DUE} ORDER BY p.next_attempt_at, p.idx LIMIT ?",
        (job, now + within, now, limit),
    )


def is_due(tx: Tx, job: int, at: float) -> bool:
    """Return whether an item's wait has ended by ``at``."""
    sql = f"SELECT 1 FROM progress WHERE job = ? AND {OPEN} AND next_attempt_at <= ? LIMIT 1"
    return tx.one(sql, (job, at)) is not None


# ---- postponed items ---------------------------------------------------------------------------------------------------


def delays_of(tx: Tx, job: int, indices: Sequence[int]) -> dict[int, tuple[int, float, int]]:
    """Return (times, since, report) of the items that were postponed before."""
    among, numbers = listed(tx.engine, list(indices), "bigint")
    rows = tx.all(
        f"SELECT idx, times, since, report FROM item_delays WHERE job = ? AND idx IN ({among})", (job, numbers)
    )
    return {idx: (times, since, report) for idx, times, since, report in rows}


def postpone(
    tx: Tx, job: int, now: float, items: Sequence[tuple[Later, int, float, bool]], attempts: Mapping[int, int]
) -> None:
    """Write postponements: (outcome, times, since, was dead). ``attempts`` has the items' failures, which stay."""
    tx.executemany(
        "INSERT INTO progress (job, idx, status, attempts, updated_at, seconds, worker, next_attempt_at) "
        "VALUES (?, ?, 'failed', ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET status = 'failed', "
        "updated_at = excluded.updated_at, seconds = excluded.seconds, worker = excluded.worker, "
        "next_attempt_at = excluded.next_attempt_at, lease_until = NULL, holder = NULL",
        [(job, o.idx, attempts[o.idx], now, o.seconds, o.worker, now + o.delay) for o, _, _, _ in items],
    )
    tx.executemany(
        "INSERT INTO item_delays (job, idx, times, since, until, reason, report, last_pass) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET times = excluded.times, "
        "since = excluded.since, until = excluded.until, reason = excluded.reason, report = excluded.report, "
        "last_pass = CASE WHEN excluded.last_pass = 1 THEN 1 ELSE item_delays.last_pass END",
        [(job, o.idx, n, since, now + o.delay, o.reason, o.report, int(dead)) for o, n, since, dead in items],
    )


def forget_delays(tx: Tx, job: int, indices: Sequence[int]) -> None:
    """Delete the postponements of items: their next one counts as the first."""
    tx.executemany("DELETE FROM item_delays WHERE job = ? AND idx = ?", [(job, idx) for idx in indices])


# ---- dead letters ------------------------------------------------------------------------------------------------------


def last_pass(source: Database | Tx, job: int, limit: int, *, unclaimed: bool = False) -> list[Row]:
    """Return dead letters that have not had their last pass. ``unclaimed`` excludes those that run now.

    Columns: idx, key, payload, fingerprint, attempts, token.
    """
    return source.all(
        "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, coalesce(p.token, 0) FROM dead_letters d "
        "JOIN input_products i ON i.job = d.job AND i.idx = d.idx JOIN progress p ON p.job = d.job AND p.idx = d.idx "
        "WHERE d.job = ? AND d.last_pass = 0 AND (p.lease_until IS NULL OR ? = 0) ORDER BY d.idx LIMIT ?",
        (job, int(unclaimed), limit),
    )


def awaits_last_pass(tx: Tx, job: int) -> bool:
    """Return whether a dead letter has not had its last pass."""
    return tx.one("SELECT 1 FROM dead_letters WHERE job = ? AND last_pass = 0 LIMIT 1", (job,)) is not None


def delete_dead_letter(tx: Tx, job: int, idx: int) -> None:
    """Delete an item's dead letter."""
    tx.execute("DELETE FROM dead_letters WHERE job = ? AND idx = ?", (job, idx))


def revive(tx: Tx, job: int, now: float, *, cause: int | None, indices: Sequence[int] | None) -> int:
    """Make dead letters pending, with no attempts counted. Return how many."""
    where, parameters = "job = ?", list[Value]([job])
    if cause is not None:
        where, parameters = f"{where} AND cause = ?", [*parameters, cause]
    if indices is not None:
        among, numbers = listed(tx.engine, list(indices), "bigint")
        where, parameters = f"{where} AND idx IN ({among})", [*parameters, numbers]
    dead = tx.returned(f"DELETE FROM dead_letters WHERE {where} RETURNING idx", parameters)
    if dead:
        tx.executemany(
            "UPDATE progress SET status = 'pending', attempts = 0, next_attempt_at = ?, lease_until = NULL, "
            "holder = NULL, updated_at = ? WHERE job = ? AND idx = ?",
            [(now, now, job, idx) for (idx,) in dead],
        )
        forget_delays(tx, job, [idx for (idx,) in dead])
    return len(dead)


# ---- claims ------------------------------------------------------------------------------------------------------------


def claimable(tx: Tx, job: int, now: float, limit: int) -> list[Row]:
    """Return items whose wait or claim has ended by the database's clock, soonest first.

    Columns: idx, key, payload, fingerprint, attempts, token, lease_until, worker, holder.
    """
    return tx.all(f"{_CLAIMABLE} AND {_DUE} ORDER BY p.next_attempt_at, p.idx LIMIT ?", (job, now, now, limit))


def claimed(tx: Tx, job: int) -> list[Row]:
    """Return the claimed items, with the columns of `claimable`."""
    return tx.all(
        f"{_CLAIMABLE} AND p.holder IS NOT NULL AND p.lease_until IS NOT NULL ORDER BY p.next_attempt_at, p.idx", (job,)
    )


def claimants(tx: Tx, job: int) -> list[Row]:
    """Return (holder, latest expiry) of each claimant of an item."""
    return tx.all(
        f"SELECT holder, max(lease_until) FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL "
        "AND holder IS NOT NULL GROUP BY holder",
        (job,),
    )


def is_any_claimed(tx: Tx, job: int) -> bool:
    """Return whether an item is claimed or noted as running, by a live process or a dead one."""
    sql = f"SELECT 1 FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL LIMIT 1"
    return tx.one(sql, (job,)) is not None


def claim(tx: Tx, job: int, items: Sequence[Item], worker: str | None, holder: str, now: float, until: float) -> None:
    """Write the claims of ``worker``. Each item has the token of its claim."""
    tx.executemany(
        "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, token, lease_until, holder) "
        "VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET "
        "worker = excluded.worker, next_attempt_at = excluded.next_attempt_at, token = excluded.token, "
        "lease_until = excluded.lease_until, holder = excluded.holder",
        # The item may be claimed again at the moment its lease expires.
        [(job, item.idx, now, worker, until, item.token, until, holder) for item in items],
    )


def claim_untried(
    tx: Tx, job: int, items: Sequence[tuple[int, str, int]], holder: str, now: float, until: float
) -> None:
    """Write claims (idx, worker, token) of items without a progress row."""
    tx.executemany(
        "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, token, lease_until, holder) "
        "VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO NOTHING",
        [(job, idx, now, worker, until, token, until, holder) for idx, worker, token in items],
    )


def renew_claims(tx: Tx, job: int, items: Sequence[Item], holder: str, until: float) -> int:
    """Renew claims. Return how many are still valid."""
    return tx.executemany(
        f"UPDATE progress SET lease_until = ?, next_attempt_at = ?, holder = ? {_CLAIM}",
        [(until, until, holder, job, item.idx, item.token) for item in items],
    )


def name_workers(tx: Tx, job: int, claims: Iterable[tuple[int, int, str | None]]) -> None:
    """Set the worker of claims (idx, token, worker)."""
    tx.executemany(
        f"UPDATE progress SET worker = ? {_CLAIM}", [(worker, job, idx, token) for idx, token, worker in claims]
    )


def release_claims(tx: Tx, job: int, claims: Sequence[tuple[int, int]], now: float) -> None:
    """End claims (idx, token) without an outcome."""
    tx.executemany(f"{_RELEASE} {_CLAIM}", [(now, job, idx, token) for idx, token in claims])


def release(tx: Tx, job: int, indices: Sequence[int], now: float) -> None:
    """End the notes and claims on these items without an outcome."""
    tx.executemany(
        f"{_RELEASE} WHERE job = ? AND idx = ? AND status <> 'done' AND lease_until IS NOT NULL",
        [(now, job, idx) for idx in indices],
    )


def release_all(tx: Tx, job: int, now: float) -> None:
    """End every note and claim of a job without an outcome."""
    tx.execute(f"{_RELEASE} WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL", (now, job))


def shorten_claims(tx: Tx, job: int) -> None:
    """Restart claims that were written before the database's clock was set back (`headway._lease.shorten`)."""
    shorten(tx, "progress", f"job = ? AND {OPEN}", (job,), ends=("lease_until", "next_attempt_at"))


# ---- notes on running items ----------------------------------------------------------------------------------------------


def note_running(tx: Tx, job: int, items: Sequence[tuple[int, str]], now: float, until: float) -> None:
    """Note items (idx, worker) that run under a hold."""
    tx.executemany(
        "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, lease_until) "
        "VALUES (?, ?, 'pending', ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET worker = excluded.worker, "
        "next_attempt_at = excluded.next_attempt_at, lease_until = excluded.lease_until, holder = NULL "
        "WHERE progress.status <> 'done'",
        [(job, idx, now, worker, until, until) for idx, worker in items],
    )


def renew_notes(tx: Tx, job: int, mark: str, indices: Sequence[int], until: float) -> None:
    """Renew the notes of the run ``mark`` on these items."""
    among, numbers = listed(tx.engine, indices, "bigint")
    tx.execute(
        "UPDATE progress SET lease_until = ?, next_attempt_at = ? "
        f"WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL AND worker LIKE ? AND idx IN ({among})",
        (until, until, job, f"{mark} %", numbers),
    )


def noted(tx: Tx, job: int) -> list[Row]:
    """Return (idx, worker) of the items that any run has noted as running."""
    return tx.all(
        f"SELECT idx, worker FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL AND worker LIKE ?",
        (job, f"{NOTED}%"),
    )


# ---- corrections of rows that were edited from outside -------------------------------------------------------------------


def correct_unknown_status(tx: Tx, job: int, now: float) -> list[Row]:
    """Make items with an unknown status pending. Return (idx, status) of each."""
    unknown = tx.all(
        "SELECT idx, status FROM progress WHERE job = ? AND status NOT IN ('pending', 'done', 'failed')", (job,)
    )
    tx.executemany(
        "UPDATE progress SET status = 'pending', next_attempt_at = ? WHERE job = ? AND idx = ?",
        [(now, job, idx) for idx, _ in unknown],
    )
    return unknown


def correct_done_and_dead(tx: Tx, job: int) -> list[int]:
    """Delete the dead letters of done items. Return the items."""
    both = tx.all(
        "SELECT d.idx FROM dead_letters d JOIN progress p ON p.job = d.job AND p.idx = d.idx "
        "WHERE d.job = ? AND p.status = 'done'",
        (job,),
    )
    for (idx,) in both:
        delete_dead_letter(tx, job, idx)
    return [idx for (idx,) in both]


def correct_missing_time(tx: Tx, job: int, now: float) -> int:
    """Make items without a time of their next attempt due now. Return how many."""
    return tx.execute(
        f"UPDATE progress SET next_attempt_at = ? WHERE job = ? AND {OPEN} AND next_attempt_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.job = progress.job AND d.idx = progress.idx)",
        (now, job),
    )


def dead_without_failure(tx: Tx, job: int) -> tuple[int, int | None]:
    """Return the number of dead letters without a progress row, and the first of them."""
    row = tx.one(
        "SELECT count(*), min(d.idx) FROM dead_letters d WHERE d.job = ? AND NOT EXISTS "
        "(SELECT 1 FROM progress p WHERE p.job = d.job AND p.idx = d.idx)",
        (job,),
    )
    assert row is not None
    return row[0], row[1]
