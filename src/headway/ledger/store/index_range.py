"""Reads a job's rows in index ranges, at a cost bounded by the rows read, whatever PostgreSQL's planner assumes.

A newly filled table has no statistics until autovacuum runs, a minute later or more. Until then the planner assumes
that a job is 1/200 of its table, and a range of it 1/200 of that. A plan that is cheap for a handful of rows may then
read the whole job for every page. The statements here leave the planner no such choice.

Measured with 200,000 items and no statistics, a page of 2,000 rows of ``progress`` takes 0.3 ms with ``LIMIT (SELECT ?)``
and 25 ms with ``LIMIT ?``. After ANALYZE both take 0.3 ms, but a running job fills ``progress`` row by row.
``tests/ledger/test_query_plans.py`` counts the rows that every statement reads, and fails without these forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway._sql import Database, Row, Tx
from headway.ledger.store.contract import item_store

#: Maximum number of rows in one range.
MOST = 20_000

#: Items that are not done, by the partial index on them. The second condition is redundant, but it matches more of that
#: index than of the primary key. Without statistics the planner would rate both equal and might read every done item.
OPEN = "status <> 'done' AND status IN ('pending', 'failed')"

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
