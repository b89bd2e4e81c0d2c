"""The slots of fleets as tasks of the queue: how many there are, are missing or are surplus. PostgreSQL only."""

from __future__ import annotations

from headway._sql import Database, Tx


def count_workers(database: Database) -> int:
    """Return how many workers are online."""
    row = database.one("SELECT count(*) FROM task_workers WHERE ended_at IS NULL")
    return int(row[0]) if row else 0


def lock(tx: Tx, job: int, run: int) -> bool:
    """Lock the fleet's row until the transaction ends. Return False if the fleet no longer runs the job."""
    return tx.one("SELECT 1 FROM fleets WHERE job = ? AND run = ? FOR UPDATE", (job, run)) is not None


def bring_forward(tx: Tx, kind: str, party: str, latest: float) -> None:
    """Let the delayed slots of a fleet start at ``latest``, if they would start later."""
    tx.execute(
        "UPDATE tasks SET run_at = ?, version = version + 1 WHERE status = 'QUEUED' AND ready = 0 AND run_at > ? "
        "AND kind = ? AND party = ?",
        (latest, latest, kind, party),
    )


def count(tx: Tx, kind: str, party: str, queue: str) -> int:
    """Return how many slots of a fleet are queued or running."""
    row = tx.one(
        "SELECT (SELECT count(*) FROM tasks WHERE status = 'QUEUED' AND queue = ? AND party = ?) + "
        "(SELECT count(*) FROM tasks WHERE status = 'RUNNING' AND kind = ? AND party = ?)",
        (queue, party, kind, party),
    )
    return int(row[0]) if row else 0


def count_older(database: Database, kind: str, party: str, task: str) -> int:
    """Return how many running slots of a fleet are older than ``task``."""
    row = database.one(
        "SELECT count(*) FROM tasks WHERE status = 'RUNNING' AND kind = ? AND party = ? "
        "AND no < (SELECT no FROM tasks WHERE id = ?)",
        (kind, party, task),
    )
    return int(row[0]) if row else 0


def others_wait(database: Database, party: str, task: str) -> bool:
    """Return whether tasks outside the fleet wait in queues at least as urgent as that of ``task``."""
    row = database.one(
        "SELECT 1 FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND place <= (SELECT place FROM tasks WHERE id = ?) "
        "AND party <> ? LIMIT 1",
        (task, party),
    )
    return row is not None
