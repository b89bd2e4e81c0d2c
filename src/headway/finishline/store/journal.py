"""Table ``project_counts``, the journal: every count is committed before it is acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway._sql import Database, Engine, Tx, marks
from headway.errors import HeadwayError, Refused
from headway.finishline.store.records import no_project
from headway.telemetry import metrics, redact

#: Find a project. It must not be deleted before the commit: its counts would fail, and those of the group with them.
#: On SQLite the transaction holds the write lock.
_FIND: dict[Engine, str] = {
    "sqlite": "SELECT no, journaled, epoch, version FROM projects WHERE id = ?",
    "postgresql": "SELECT no, journaled, epoch, version FROM projects WHERE id = ? FOR KEY SHARE",
}

#: Rows in one INSERT.
CHUNK = 200
#: Counts of one transaction.
GROUP = 5_000


@dataclass(slots=True, eq=False)
class Entry:
    """Counts of one caller, and the result of their commit."""

    project_id: str
    items: dict[str, tuple[bool, str | None]]  # identity -> failed, error
    settled: bool = False  # a plain flag: an interrupted Event.set would leave its lock held
    verdicts: dict[str, bool] = field(default_factory=dict)  # identity -> failed, as recorded in the journal
    fresh: int = 0  # items that are new
    epoch: str = ""  # of the project that has the counts
    version: int = 0  # of its total and status
    trouble: BaseException | None = None


class Journal:
    """Commits counts in groups: callers that arrive during a commit share the next one.

    The caller that gets the lock writes the entries of all waiting callers.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[Entry] = []
        self._writing = threading.Lock()

    def write(self, project_id: str, items: dict[str, tuple[bool, str | None]]) -> Entry:
        """Commit the counts and return the entry with their verdicts: an earlier verdict on an item stands.

        The entry names epoch and version of the project. Redis compares them: the project may be recreated, or Redis behind.
        """
        entry = Entry(project_id, items)
        self._waiting.append(entry)  # atomic
        while not entry.settled:
            with self._writing:
                if not entry.settled:
                    if entry not in self._waiting:  # its writer was interrupted before it recorded the result
                        self._waiting.append(entry)
                    self._commit()
        if entry.trouble is not None:
            raise entry.trouble
        return entry

    def _commit(self) -> None:
        group: list[Entry] = []
        size = 0
        while self._waiting and size < GROUP:
            group.append(self._waiting.pop(0))
            size += len(group[-1].items)
        try:
            self._database.run(lambda tx: _write(tx, group), operation="project.journal")
            metrics.observe("headway_journal_group", len(group))
        except HeadwayError as trouble:  # an error of the database fails all entries
            for entry in group:
                entry.trouble = trouble
        # Any other exception belongs to this caller (a signal handler raised it); the other callers write again.
        for entry in group:
            entry.settled = True


def _write(tx: Tx, group: Sequence[Entry]) -> None:
    """Write the counts of a group in one transaction. Rows are sorted, so that two processes cannot deadlock."""
    numbers: dict[str, int] = {}
    known: dict[str, tuple[str, int]] = {}
    for entry in group:
        entry.trouble = None
        if entry.project_id not in numbers:
            found = tx.one(_FIND[tx.engine], (entry.project_id,))
            if found is None or not found[1]:
                entry.trouble = no_journal(entry.project_id) if found else no_project(entry.project_id)
                continue
            numbers[entry.project_id], known[entry.project_id] = found[0], (found[2], found[3])
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
            entry.epoch, entry.version = known[entry.project_id]
            keys = {item: (numbers[entry.project_id], item) for item in entry.items}
            entry.verdicts = {item: current[key] if key in current else wanted[key][0] for item, key in keys.items()}
            entry.fresh = sum(key in fresh for key in keys.values())
            fresh -= set(keys.values())  # of two callers with the same item only the first counted it


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


def no_journal(project_id: str) -> HeadwayError:
    """Return the error for a project that has no journal."""
    return Refused(
        f"Project {project_id!r} was created without a journal.",
        hint="Open the finish line with journal=False, or delete the project and create it with journal=True.",
    )


def cut(error: str | None) -> str | None:
    """Return an error message as it is stored: redacted, at most 500 characters, encodable by every database.

    A file name that is not valid Unicode would otherwise fail the transaction of the whole group.
    """
    return None if error is None else redact(error)[:500].encode("utf-8", "replace").decode().replace("\0", "?")
