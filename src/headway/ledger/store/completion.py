"""Decides that a job is finished, and appends the event. Runs in the transaction that has the job's row locked."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headway.events import Event, append
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.ledger.store.recorder import JobRow

log = Log("ledger")


def is_complete(row: JobRow) -> bool:
    """Return whether every item is done or dead, and the item list is complete."""
    return bool(row.sealed) and row.done + row.dead >= row.total


def update_completion(row: JobRow, *, settle: bool) -> bool:
    """Finish a complete job if ``settle`` is set, or reopen a finished one that has open items again.

    Returns whether this call finished it. The caller saves the row.
    """
    if settle and is_complete(row) and row.finished_at is None:
        row.finished_at = row.now
        append(row.tx, _event(row))
        log.info("job completed", job=row.id, total=row.total, done=row.done, dead=row.dead)
        return True
    if row.finished_at is not None and row.done + row.dead < row.total:
        row.finished_at = None
        row.generation += 1  # its next completion is a new event
    return False


def _event(row: JobRow) -> Event:
    return Event(
        id=f"{row.origin}-{row.no}-{row.generation}-completed",
        type="job.completed",
        at=datetime.fromtimestamp(row.now, UTC),
        source="headway.ledger",
        job=row.id,
        version=row.version + 1,
        data={"total": row.total, "succeeded": row.done, "failed": row.dead},
    )
