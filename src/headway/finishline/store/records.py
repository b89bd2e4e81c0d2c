"""Table ``projects``: the SQL record of each project."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headway._sql import Database, Tx, require_open
from headway._sql import Row as SqlRow
from headway.errors import NotFound
from headway.finishline.progress import Progress, Status

#: Projects in one page.
CHUNK = 200
#: Seconds a project lives in Redis after its last write.
LIFE = 604_800

_COLUMNS = (
    "no, id, epoch, status, total, done, errors, crawled, journaled, version, "
    "live_at, checkpoint_at, completed_at, delivered_at"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``projects``."""

    no: int
    id: str
    epoch: str
    status: Status
    total: int
    done: int
    errors: int
    crawled: bool
    journaled: bool
    version: int
    live_at: float | None
    checkpoint_at: float | None
    completed_at: float | None
    delivered_at: float | None

    def progress(self) -> Progress:
        """Return the progress that SQL knows."""
        restored = self.checkpoint_at if self.completed_at is None and not self.journaled else None
        return Progress(
            Status.DONE if self.completed_at is not None else self.status,
            self.total,
            self.done,
            self.errors,
            live=False,
            restored=datetime.fromtimestamp(restored, UTC) if restored is not None else None,
        )

    def as_change(self) -> list[str | int]:
        """Return the arguments of ``change.lua``: version, total, status, crawled, epoch."""
        status = "" if self.status is Status.DONE else self.status.value
        return [self.version, self.total, status, int(self.crawled), self.epoch]


def _row(values: SqlRow) -> Row:
    no, id, epoch, status, total, done, errors, crawled, journaled, version, *times = values
    return Row(no, id, epoch, Status(status), total, done, errors, bool(crawled), bool(journaled), version, *times)


class Records:
    """Reads and writes the records of projects."""

    def __init__(self, database: Database) -> None:
        self._database = require_open(database)
        self._id: str | None = None

    def create(self, project_id: str, *, total: int, journaled: bool, live: bool) -> tuple[Row, bool]:
        """Insert the project unless it exists. Return its row and whether it is new. ``live``: Redis is about to get it."""
        epoch = uuid.uuid4().hex[:12]

        def work(tx: Tx) -> tuple[Row, bool]:
            now = tx.now()
            new = tx.execute(
                "INSERT INTO projects (id, epoch, status, total, journaled, created_at, live_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                (project_id, epoch, Status.INITIALIZING, total, int(journaled), now, now if live else None),
            )
            row = _find(tx, project_id)
            assert row is not None
            return row, bool(new) or row.epoch == epoch  # the same epoch: our own commit whose reply was lost

        return self._database.run(work, operation="project.create")

    def database(self) -> str:
        """Return the id of this database. A project in Redis names the database that has its record."""
        if self._id is None:
            found = self._database.one("SELECT value FROM meta WHERE name = 'database'")
            self._id = str(found[0]) if found else ""
        return self._id

    def find(self, project_id: str) -> Row | None:
        """Return the record of a project, or None."""
        found = self._database.one(f"SELECT {_COLUMNS} FROM projects WHERE id = ?", (project_id,))
        return _row(found) if found else None

    def not_live(self, row: Row) -> None:
        """Record that Redis never had the project, so no counts can be lost."""
        self._database.run(
            lambda tx: tx.execute("UPDATE projects SET live_at = NULL WHERE id = ? AND epoch = ?", (row.id, row.epoch)),
            operation="project.not_live",
        )

    def live(self, row: Row) -> None:
        """Record that Redis has the project."""
        self._database.run(
            lambda tx: tx.execute(
                "UPDATE projects SET live_at = ? WHERE id = ? AND epoch = ? AND live_at IS NULL",
                (tx.now(), row.id, row.epoch),
            ),
            operation="project.live",
        )

    def change(self, project_id: str, *, total: int | None, status: Status | None, crawled: bool | None) -> Row | None:
        """Set the given values and return the row. A completed project does not change.

        The new version is the time in milliseconds, or the old one plus 1. So it grows, and a database restored to an
        earlier moment does not repeat versions that Redis has seen.
        """

        def work(tx: Tx) -> Row | None:
            now = f"CAST({tx.clock} * 1000 AS BIGINT)"
            tx.execute(
                "UPDATE projects SET total = coalesce(?, total), status = coalesce(?, status), "
                f"crawled = coalesce(?, crawled), version = CASE WHEN version < {now} THEN {now} ELSE version + 1 END "
                "WHERE id = ? AND completed_at IS NULL",
                (total, status, None if crawled is None else int(crawled), project_id),
            )
            return _find(tx, project_id)

        return self._database.run(work, operation="project.change")

    def delete(self, project_id: str, epoch: str) -> None:
        """Delete the project of this epoch."""
        self._database.run(
            lambda tx: tx.execute("DELETE FROM projects WHERE id = ? AND epoch = ?", (project_id, epoch)),
            operation="project.delete",
        )

    def claim_completion(self, project_id: str, epoch: str, by: str) -> bool:
        """Return whether ``by`` is the first call that claims to have completed the project.

        Several calls claim it only if Redis lost its answer to the first one.
        """
        found = self._database.run(
            lambda tx: tx.one(
                "UPDATE projects SET completed_by = coalesce(completed_by, ?) WHERE id = ? AND epoch = ? "
                "RETURNING completed_by",
                (by, project_id, epoch),
            ),
            operation="project.claim_completion",
        )
        return found is None or found[0] == by

    def completed(self, project_id: str, epoch: str, state: Progress) -> None:
        """Record that the project is DONE with these counts. Repeating it changes nothing."""
        self._close(project_id, epoch, state, delivered=False)

    def delivered(self, project_id: str, epoch: str, data: Mapping[str, object]) -> None:
        """Record that every sink took the event, whose ``data`` has the final counts."""
        total, succeeded, failed = (_number(data.get(name)) for name in ("total", "succeeded", "failed"))
        self._close(project_id, epoch, Progress(Status.DONE, total, succeeded + failed, failed), delivered=True)

    def _close(self, project_id: str, epoch: str, state: Progress, *, delivered: bool) -> None:
        def work(tx: Tx) -> None:
            tx.execute(
                "UPDATE projects SET status = 'DONE', total = CASE WHEN completed_at IS NULL THEN ? ELSE total END, "
                "done = CASE WHEN done > ? THEN done ELSE ? END, "
                "errors = CASE WHEN errors > ? THEN errors ELSE ? END, "
                "completed_at = coalesce(completed_at, ?), "
                "delivered_at = CASE WHEN ? = 1 THEN coalesce(delivered_at, ?) ELSE delivered_at END "
                "WHERE id = ? AND epoch = ?",
                (state.total, state.done, state.done, state.errors, state.errors, now := tx.now(),
                 int(delivered), now, project_id, epoch),
            )  # fmt: skip
            if delivered:
                tx.execute(
                    "DELETE FROM project_deliveries WHERE project IN (SELECT no FROM projects WHERE id = ? AND epoch = ?)",
                    (project_id, epoch),
                )

        self._database.run(work, operation="project.completed")

    def checkpoint(self, states: Sequence[tuple[Row, Progress]]) -> None:
        """Record the counts of Redis for projects without a journal. A checkpoint never lowers a count.

        The epoch is compared: after a deletion SQLite may give the same number to the next project of this name.
        """

        def work(tx: Tx) -> None:
            now = tx.now()
            for row, state in states:
                tx.execute(
                    "UPDATE projects SET done = ?, errors = ?, checkpoint_at = ? "
                    "WHERE id = ? AND epoch = ? AND done <= ? AND journaled = 0 AND completed_at IS NULL",
                    (state.done, state.errors, now, row.id, row.epoch, state.done),
                )

        self._database.run(work, operation="project.checkpoint")

    def recent(self, *, delivered: bool) -> Iterator[list[Row]]:
        """Yield pages of the projects that Redis should have: not completed, or completed within the last 7 days.

        ``delivered`` includes those whose event was delivered.
        """
        after = 0
        now = self._database.now()
        which = "" if delivered else "AND delivered_at IS NULL "
        while True:
            rows = self._database.all(
                f"SELECT {_COLUMNS} FROM projects WHERE no > ? {which}"
                "AND (completed_at IS NULL OR completed_at > ?) ORDER BY no LIMIT ?",
                (after, now - LIFE, CHUNK),
            )
            if rows:
                yield [_row(values) for values in rows]
            if len(rows) < CHUNK:
                return
            after = rows[-1][0]

    def is_over(self, row: Row) -> bool:
        """Return whether the event needs no further announcement: it was delivered, or Redis expired the project since."""
        if row.completed_at is None:
            return False
        return row.delivered_at is not None or row.completed_at < self._database.now() - LIFE

    def counts(self, row: Row) -> Iterator[list[tuple[str, bool]]]:
        """Yield the journal of a project in pages.

        A count that is committed meanwhile may be missing. Its caller sends it to Redis afterwards.
        """
        after = ""
        while True:
            page = self._database.all(
                "SELECT item, failed FROM project_counts WHERE project = ? AND item > ? ORDER BY item LIMIT 5000",
                (row.no, after),
            )
            if page:
                yield [(item, bool(failed)) for item, failed in page]
            if len(page) < 5000:
                return
            after = page[-1][0]


def _find(tx: Tx, project_id: str) -> Row | None:
    found = tx.one(f"SELECT {_COLUMNS} FROM projects WHERE id = ?", (project_id,))
    return _row(found) if found else None


def _number(value: object) -> int:
    """Return a count of an event. Invalid values (any program may append to the stream) become 0, which changes nothing."""
    return value if type(value) is int and 0 <= value < 2**53 else 0


def no_project(project_id: str) -> NotFound:
    """Return the error for an unknown project."""
    return NotFound(
        f"There is no project {project_id!r}: it was never created, was deleted, or has expired.",
        hint=f"Create it: headway project create {project_id}",
    )
