"""Payloads of items, and the items that are done or dead, read page by page."""

from __future__ import annotations

from collections.abc import Iterator

from headway.ledger.job import Job

#: Rows per query.
_PAGE = 5000
_DONE = (
    "SELECT idx FROM progress WHERE job = ? AND idx > ? AND status = 'done' ORDER BY idx LIMIT (SELECT ?)"
    # The subquery hides the limit from the planner: see `headway.ledger.store.items`.
)
_DEAD = "SELECT idx FROM dead_letters WHERE job = ? AND idx > ? ORDER BY idx LIMIT (SELECT ?)"


def done(job: Job) -> Iterator[int]:
    """Yield the indices of done items in order."""
    return _indices(job, _DONE)


def dead(job: Job) -> Iterator[int]:
    """Yield the indices of dead items in order."""
    return _indices(job, _DEAD)


def _indices(job: Job, query: str) -> Iterator[int]:
    after = -1
    while rows := job.database.all(query, (job.no, after, _PAGE)):
        yield from (idx for (idx,) in rows)
        after = rows[-1][0]


def payloads(job: Job, after: int, last: int) -> list[tuple[int, str | None]]:
    """Return (index, payload) of the items with an index above ``after``, up to ``last``."""
    rows = job.database.all(
        "SELECT idx, payload FROM input_products WHERE job = ? AND idx > ? AND idx <= ?", (job.no, after, last)
    )
    return [(idx, payload) for idx, payload in rows]
