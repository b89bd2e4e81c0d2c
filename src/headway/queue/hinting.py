"""Which tasks RQ was told of: the mark on each row by which the sweeper knows what it still has to hint.

A hint is a wake-up. A row whose mark says too little is hinted again, one whose mark says too much is found by its age.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway._sql import Row, Tx, marks
from headway.queue.claims import paused
from headway.queue.limits import Limits
from headway.queue.records import pages
from headway.queue.values import PRIORITIES, Priority, Status


def unhinted(tx: Tx, *, limit: int) -> list[tuple[str, Priority]]:
    """Tasks that may run and of which RQ was not told, in the order of service; none of a paused queue, none whose id RQ
    does not take (one with a dot)."""
    now = tx.now()
    shut, limits = paused(tx, now), Limits(tx, now)
    open_queues = [queue for queue in PRIORITIES if queue not in shut and not limits.is_full("queue", queue)]
    barred, values = limits.barred()
    where = "".join(f" AND {condition}" for condition in barred)
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND hinted_at IS NULL "
        f"AND id NOT LIKE '%.%' AND place IN ({marks(len(open_queues))}){where} ORDER BY place, turn, no LIMIT ?",
        (*(queue.place for queue in open_queues), *values, limit),
    )
    return [(id, Priority(queue)) for id, queue in rows]


def doubtful(tx: Tx, *, older_than: float, limit: int) -> list[tuple[str, Priority]]:
    """Tasks whose hint is so old that it may be lost, or of a time to come: since it was given, the clock was set back."""
    now = tx.now()
    rows: list[Row] = []
    # Two statements: with an OR neither engine would use the index.
    for condition, bound in (("<", now - older_than), (">", now + 60.0)):
        rows += tx.all(
            f"SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND hinted_at IS NOT NULL AND hinted_at {condition} ? "
            "ORDER BY hinted_at LIMIT (SELECT ?)",  # not told to the planner: see `Sweeper.purge`
            (bound, limit - len(rows)),
        )
    return [(id, Priority(queue)) for id, queue in rows]


def all_hinted(tx: Tx) -> list[tuple[str, Priority]]:
    """Every task that waits and of which RQ was told, the oldest hint first. They are as many as RQ's queues may hold."""
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND hinted_at IS NOT NULL ORDER BY hinted_at, no"
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


def statuses(tx: Tx, ids: Sequence[str]) -> dict[str, Status]:
    """The status of each of ``ids`` that is a task."""
    found: dict[str, Status] = {}
    for page in pages(ids):
        rows = tx.all(f"SELECT id, status FROM tasks WHERE id IN ({marks(len(page))})", page)
        found |= {id: Status(status) for id, status in rows}
    return found
