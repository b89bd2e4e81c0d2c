"""Rows of a job by index, at the cost of those that are looked at, whatever PostgreSQL's planner believes.

A table that was just filled has no statistics until autovacuum comes by, a minute later or more. Until then the planner takes
a job for a two-hundredth of its table and a stretch of it for a two-hundredth of that, and what is cheap for a handful of
rows may take all of a job, for every page anew. So what is read here leaves it no choice that would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway._sql import Database, Row, Tx, array, marks

#: Indices of one stretch, at most.
MOST = 20_000

#: Items that are not done, by the index that has only those. The second half says nothing new: it names more of that index
#: than of the primary key, which a planner without statistics would take for as good, and read all that is done.
OPEN = "status <> 'done' AND status IN ('pending', 'failed')"

#: The next indices of a table. PostgreSQL takes a limit that it is not told for a tenth of the rows, and walks along the
#: index; one that it is told, and that is more than it takes the job for, it would answer by sorting all the rest.
_NEXT = "SELECT idx FROM {table} WHERE job = ? AND idx > ? ORDER BY idx LIMIT (SELECT ?)"

#: NOT IN and not NOT EXISTS: it is looked up in a table of those that were tried, and never a join, of which there are some
#: that compare each row with each.
_UNTRIED = (
    "SELECT i.idx, i.key, i.payload, i.fingerprint FROM input_products i WHERE i.job = ? AND i.idx > ? AND i.idx <= ? "
    "AND i.idx NOT IN (SELECT p.idx FROM progress p WHERE p.job = ? AND p.idx > ? AND p.idx <= ?) ORDER BY i.idx LIMIT ?"
)

Stretch = tuple[int, int]  # its items lie after the first index and up to the second


def stretches(source: Database | Tx, table: str, job: int, after: int, size: int) -> Iterator[Stretch]:
    """The rows of ``table`` after an index as stretches, the first one of ``size`` rows and each next one of twice as many."""
    while (last := last_of(source, table, job, after, size)) is not None:
        yield after, last
        after, size = last, min(2 * size, MOST)


def last_of(source: Database | Tx, table: str, job: int, after: int, size: int) -> int | None:
    """The last index of the next ``size`` rows of ``table`` after an index; None where there are none."""
    row = source.one(f"SELECT max(idx) FROM ({_NEXT.format(table=table)}) AS near", (job, after, size))
    return None if row is None or row[0] is None else int(row[0])


def untried(source: Database | Tx, job: int, near: Stretch, limit: int = MOST) -> list[Row]:
    """(idx, key, payload, fingerprint) of the first items of a stretch that nobody has tried."""
    return source.all(_UNTRIED, (job, *near, job, *near, limit))


def next_untried(source: Database | Tx, job: int, after: int, limit: int) -> tuple[list[Row], int]:
    """The next items that nobody has tried, none if there are no more, and the index up to which there are no others."""
    for near in stretches(source, "input_products", job, after, limit):
        after = near[1]
        if rows := untried(source, job, near, limit):
            return rows, rows[-1][0] if len(rows) == limit else after
    return [], after


def rows_at(tx: Tx, columns: str, job: int, indices: Sequence[int]) -> list[Row]:
    """What stands in ``columns`` of progress at these indices, wherever they lie: each is looked up by its key."""
    if tx.engine == "sqlite":
        return tx.all(
            f"SELECT {columns} FROM progress WHERE job = ? AND idx IN ({marks(len(indices))})", (job, *indices)
        )
    return tx.all(
        f"SELECT p.* FROM unnest(CAST(? AS BIGINT[])) AS wanted (at) CROSS JOIN LATERAL "
        # With its limit the inner question stays one of its own.
        f"(SELECT {columns} FROM progress WHERE job = ? AND idx = wanted.at LIMIT 1) AS p",
        (array(indices), job),
    )
