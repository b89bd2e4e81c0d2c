"""The SQL side: what is known of each project when Redis is not asked, and the journal of counts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headway._sql import Database, Tx, marks
from headway._sql import Row as SqlRow
from headway.errors import HeadwayError, NotFound, Refused
from headway.finishline.progress import Progress, Status
from headway.telemetry import metrics, redact

#: Rows in one INSERT, and projects in one page.
CHUNK = 200
#: Counts that one transaction takes along at most.
GROUP = 5_000

_COLUMNS = (
    "no, id, epoch, status, total, done, errors, crawled, journaled, version, "
    "live_at, checkpoint_at, completed_at, delivered_at"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A project as SQL knows it."""

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
        restored = self.checkpoint_at if self.completed_at is None and not self.journaled else None
        return Progress(
            Status.DONE if self.completed_at is not None else self.status,
            self.total,
            self.done,
            self.errors,
            live=False,
            restored=datetime.fromtimestamp(restored, UTC) if restored is not None else None,
        )


def _row(values: SqlRow) -> Row:
    no, id, epoch, status, total, done, errors, crawled, journaled, version, *times = values
    return Row(no, id, epoch, Status(status), total, done, errors, bool(crawled), bool(journaled), version, *times)


class Record:
    """The table ``projects``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, project_id: str, *, total: int, journaled: bool, live: bool) -> tuple[Row, bool]:
        """The project's row and whether it is new. ``live``: Redis is about to hold it."""
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
            return row, bool(new) or row.epoch == epoch  # the same epoch: our own COMMIT whose answer was lost

        return self._database.run(work, operation="project.create")

    def find(self, project_id: str) -> Row | None:
        found = self._database.one(f"SELECT {_COLUMNS} FROM projects WHERE id = ?", (project_id,))
        return _row(found) if found else None

    def not_live(self, row: Row) -> None:
        """Redis could not take it: so far nothing has been counted there."""
        self._database.run(
            lambda tx: tx.execute("UPDATE projects SET live_at = NULL WHERE no = ?", (row.no,)),
            operation="project.not_live",
        )

    def live(self, row: Row) -> None:
        self._database.run(
            lambda tx: tx.execute(
                "UPDATE projects SET live_at = ? WHERE no = ? AND live_at IS NULL", (tx.now(), row.no)
            ),
            operation="project.live",
        )

    def change(self, project_id: str, *, total: int | None, status: Status | None, crawled: bool | None) -> Row | None:
        """Set what is given. A completed project stays as it is."""

        def work(tx: Tx) -> Row | None:
            tx.execute(
                "UPDATE projects SET total = coalesce(?, total), status = coalesce(?, status), "
                "crawled = coalesce(?, crawled), version = version + 1 WHERE id = ? AND completed_at IS NULL",
                (total, status, None if crawled is None else int(crawled), project_id),
            )
            return _find(tx, project_id)

        return self._database.run(work, operation="project.change")

    def delete(self, project_id: str) -> bool:
        return bool(
            self._database.run(
                lambda tx: tx.execute("DELETE FROM projects WHERE id = ?", (project_id,)),
                operation="project.delete",
            )
        )

    def completed(self, project_id: str, epoch: str, state: Progress, *, delivered: bool = False) -> None:
        """It is DONE with these counts; said again, nothing changes but ``delivered``."""
        self._database.run(
            lambda tx: tx.execute(
                "UPDATE projects SET status = 'DONE', total = ?, "
                "done = CASE WHEN done > ? THEN done ELSE ? END, "
                "errors = CASE WHEN errors > ? THEN errors ELSE ? END, "
                "completed_at = coalesce(completed_at, ?), "
                "delivered_at = CASE WHEN ? = 1 THEN coalesce(delivered_at, ?) ELSE delivered_at END "
                "WHERE id = ? AND epoch = ?",
                (state.total, state.done, state.done, state.errors, state.errors, now := tx.now(),
                 int(delivered), now, project_id, epoch),
            ),
            operation="project.completed",
        )  # fmt: skip

    def checkpoint(self, states: Sequence[tuple[Row, Progress]]) -> None:
        """Note how far Redis is, for projects without a journal. A checkpoint never goes back."""

        def work(tx: Tx) -> None:
            now = tx.now()
            for row, state in states:
                tx.execute(
                    "UPDATE projects SET done = ?, errors = ?, checkpoint_at = ? "
                    "WHERE no = ? AND done <= ? AND journaled = 0 AND completed_at IS NULL",
                    (state.done, state.errors, now, row.no, state.done),
                )

        self._database.run(work, operation="project.checkpoint")

    def open(self) -> Iterator[Row]:
        """Every project that is not over: not completed, or completed within the last 7 days and not delivered."""
        after = 0
        now = self._database.now()
        while True:
            rows = self._database.all(
                f"SELECT {_COLUMNS} FROM projects WHERE delivered_at IS NULL AND no > ? "
                "AND (completed_at IS NULL OR completed_at > ?) ORDER BY no LIMIT ?",
                (after, now - 604_800, CHUNK),
            )
            for values in rows:
                yield _row(values)
            if len(rows) < CHUNK:
                return
            after = rows[-1][0]

    def counts(self, row: Row) -> Iterator[list[tuple[str, bool]]]:
        """The journal of a project in pages. A count committed meanwhile may be missing: its caller, who has yet
        to tell Redis, does that himself."""
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


# ----------------------------------------------------------------------------------------------------------
# The journal


@dataclass(slots=True)
class _Entry:
    """Counts one caller wants committed, and what became of them."""

    project_id: str
    items: dict[str, tuple[bool, str | None]]  # identity -> failed, error
    settled: threading.Event = field(default_factory=threading.Event)
    verdicts: dict[str, bool] = field(default_factory=dict)  # identity -> failed, as it stands in the journal
    fresh: int = 0
    trouble: BaseException | None = None


class Journal:
    """Counts, committed before they are acknowledged. Callers that arrive while a commit is under way share the
    next one: whoever gets the pen writes for all who wait."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Entry] = []
        self._writing = threading.Lock()

    def write(self, project_id: str, items: dict[str, tuple[bool, str | None]]) -> tuple[dict[str, bool], int]:
        """Commit the counts. What each item counts as (an earlier word on it stands), and how many were new."""
        entry = _Entry(project_id, items)
        self._waiting.append(entry)  # atomic
        while not entry.settled.is_set():
            with self._writing:
                if not entry.settled.is_set():
                    self._commit()
        if entry.trouble is not None:
            raise entry.trouble
        return entry.verdicts, entry.fresh

    def _commit(self) -> None:
        group: list[_Entry] = []
        size = 0
        while self._waiting and size < GROUP:
            group.append(self._waiting.pop(0))
            size += len(group[-1].items)
        try:
            self._database.run(lambda tx: _write(tx, group), operation="project.journal")
            metrics.observe("headway_journal_group", len(group))
        except BaseException as trouble:
            for entry in group:
                entry.trouble = trouble
            raise
        finally:
            for entry in group:
                entry.settled.set()


def _write(tx: Tx, group: Sequence[_Entry]) -> None:
    """All counts of the group in one transaction. Rows are sorted, so that two processes never lock crosswise."""
    numbers: dict[str, int] = {}
    for entry in group:
        entry.trouble = None
        if entry.project_id not in numbers:
            found = tx.one("SELECT no, journaled FROM projects WHERE id = ?", (entry.project_id,))
            if found is None or not found[1]:
                entry.trouble = no_journal(entry.project_id) if found else no_project(entry.project_id)
                continue
            numbers[entry.project_id] = found[0]
    wanted: dict[tuple[int, str], tuple[bool, str | None]] = {}
    for entry in group:
        if entry.trouble is None:
            for item, verdict in entry.items.items():
                wanted.setdefault((numbers[entry.project_id], item), verdict)
    fresh = _insert(tx, wanted)
    current = _current(tx, [key for key in wanted if key not in fresh])
    for number in sorted({number for number, _ in fresh}):
        mine = [wanted[key][0] for key in fresh if key[0] == number]
        tx.execute(
            "UPDATE projects SET done = done + ?, errors = errors + ? WHERE no = ?", (len(mine), sum(mine), number)
        )
    for entry in group:
        if entry.trouble is None:
            keys = {item: (numbers[entry.project_id], item) for item in entry.items}
            entry.verdicts = {item: current[key] if key in current else wanted[key][0] for item, key in keys.items()}
            entry.fresh = sum(key in fresh for key in keys.values())
            fresh -= set(keys.values())  # two callers with one item: it was new for one of them


def _insert(tx: Tx, wanted: dict[tuple[int, str], tuple[bool, str | None]]) -> set[tuple[int, str]]:
    fresh: set[tuple[int, str]] = set()
    keys = sorted(wanted)
    for start in range(0, len(keys), CHUNK):
        part = keys[start : start + CHUNK]
        values = ",".join(["(?, ?, ?, ?)"] * len(part))
        rows = tx.all(
            f"INSERT INTO project_counts (project, item, failed, error) VALUES {values} "
            "ON CONFLICT (project, item) DO NOTHING RETURNING project, item",
            [value for key in part for value in (*key, int(wanted[key][0]), wanted[key][1])],
        )
        fresh.update((number, item) for number, item in rows)
    return fresh


def _current(tx: Tx, keys: Sequence[tuple[int, str]]) -> dict[tuple[int, str], bool]:
    current: dict[tuple[int, str], bool] = {}
    for number in {number for number, _ in keys}:
        items = [item for other, item in keys if other == number]
        for start in range(0, len(items), CHUNK):
            part = items[start : start + CHUNK]
            rows = tx.all(
                f"SELECT item, failed FROM project_counts WHERE project = ? AND item IN ({marks(len(part))})",
                (number, *part),
            )
            current.update({(number, item): bool(failed) for item, failed in rows})
    return current


def no_project(project_id: str) -> NotFound:
    return NotFound(
        f"There is no project {project_id!r}: it was never created, was deleted, or has expired.",
        hint=f"Create it: headway project create {project_id}",
    )


def no_journal(project_id: str) -> HeadwayError:
    return Refused(
        f"Project {project_id!r} was created without a journal.",
        hint="Open the finish line with journal=False for it, or create the project anew with journal=True.",
    )


def cut(error: str | None) -> str | None:
    """An error as it may be kept: without secrets, and not too long."""
    return None if error is None else redact(error)[:500]
