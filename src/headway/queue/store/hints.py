"""Track which tasks were hinted to RQ, in a column of each row.

A hint is only a wake-up. A row without the mark is hinted again. A marked row whose hint was lost is found by its age.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway._sql import Row, Tx, marks
from headway.queue.store.administration import paused_queues
from headway.queue.store.limits import Limits
from headway.queue.store.tasks import pages
from headway.queue.task import PRIORITIES, Priority, Status


def unhinted(tx: Tx, *, limit: int) -> list[tuple[str, Priority]]:
    """Return ready tasks without an RQ hint, in order of service.

    Tasks of paused queues, of held kinds and at a limit are excluded, as are ids with a dot, which RQ does not accept.
    """
    now = tx.now()
    paused, limits = paused_queues(tx, now), Limits(tx, now)
    open_queues = [queue for queue in PRIORITIES if queue not in paused and not limits.is_full("queue", queue)]
    excluded, values = limits.excluded()
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND hinted_at IS NULL "
        "AND id NOT LIKE '%.%' AND kind NOT IN (SELECT kind FROM task_holds WHERE until > ?) "
        f"AND place IN ({marks(len(open_queues))}){excluded} ORDER BY place, turn, no LIMIT ?",
        (now, *(queue.place for queue in open_queues), *values, limit),
    )
    return [(id, Priority(queue)) for id, queue in rows]


def doubtful(tx: Tx, *, older_than: float, limit: int) -> list[tuple[str, Priority]]:
    """Return tasks whose hint is old enough to be lost, or is dated in the future because the clock was set back."""
    now = tx.now()
    rows: list[Row] = []
    # Two statements, because with an OR neither engine uses the index.
    for condition, bound in (("<", now - older_than), (">", now + 60.0)):
        rows += tx.all(
            f"SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND hinted_at IS NOT NULL AND hinted_at {condition} ? "
            "ORDER BY hinted_at LIMIT (SELECT ?)",  # hidden from the planner: see `_DELETE_ENDED`
            (bound, limit - len(rows)),
        )
    return [(id, Priority(queue)) for id, queue in rows]


def all_hinted(tx: Tx) -> list[tuple[str, Priority]]:
    """Return every waiting task that was hinted, oldest hint first. There are no more than RQ's queues may hold."""
    rows = tx.all(
        "SELECT id, queue FROM tasks WHERE status = 'QUEUED' AND hinted_at IS NOT NULL ORDER BY hinted_at, no"
    )
    return [(id, Priority(queue)) for id, queue in rows]


def hinted(tx: Tx, ids: Sequence[str]) -> None:
    """Mark these tasks as hinted now."""
    now = tx.now()
    for page in pages(ids):
        tx.execute(
            f"UPDATE tasks SET hinted_at = ? WHERE id IN ({marks(len(page))}) AND status = 'QUEUED'", (now, *page)
        )


def unhint(tx: Tx, ids: Iterable[str]) -> None:
    """Mark these tasks as not hinted."""
    for page in pages(sorted(ids)):
        tx.execute(f"UPDATE tasks SET hinted_at = NULL WHERE id IN ({marks(len(page))}) AND status = 'QUEUED'", page)


def count_ready(tx: Tx, *, is_hinted: bool) -> int:
    """Count the ready tasks that were, or were not, hinted."""
    condition = "IS NOT NULL" if is_hinted else "IS NULL"
    row = tx.one(f"SELECT count(*) FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND hinted_at {condition}")
    return int(row[0]) if row else 0


def statuses(tx: Tx, ids: Sequence[str]) -> dict[str, Status]:
    """Return the status of each id that is a task."""
    found: dict[str, Status] = {}
    for page in pages(ids):
        rows = tx.all(f"SELECT id, status FROM tasks WHERE id IN ({marks(len(page))})", page)
        found |= {id: Status(status) for id, status in rows}
    return found
