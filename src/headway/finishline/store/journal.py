"""The journal: every count, committed before it is acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway._sql import Database, Tx, marks
from headway.errors import HeadwayError, Refused
from headway.finishline.store.records import no_project
from headway.telemetry import metrics, redact

#: Rows in one INSERT.
CHUNK = 200
#: Counts that one transaction takes along at most.
GROUP = 5_000


@dataclass(slots=True, eq=False)
class Entry:
    """Counts one caller wants committed, and what became of them."""

    project_id: str
    items: dict[str, tuple[bool, str | None]]  # identity -> failed, error
    settled: bool = False  # not an Event, whose lock an interrupted `set` would keep for ever
    verdicts: dict[str, bool] = field(default_factory=dict)  # identity -> failed, as it stands in the journal
    fresh: int = 0
    epoch: str = ""  # of the project in whose journal they are
    version: int = 0  # of its total and status at that moment
    trouble: BaseException | None = None


class Journal:
    """Counts, committed before they are acknowledged. Callers that arrive while a commit is under way share the
    next one: whoever gets the lock writes for all who wait."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[Entry] = []
        self._writing = threading.Lock()

    def write(self, project_id: str, items: dict[str, tuple[bool, str | None]]) -> Entry:
        """Commit the counts. What each item counts as (an earlier word on it stands), how many were new, and which project
        has them, with which total: it may be deleted and created again before Redis is told, or Redis be behind."""
        entry = Entry(project_id, items)
        self._waiting.append(entry)  # atomic
        while not entry.settled:
            with self._writing:
                if not entry.settled:
                    if entry not in self._waiting:  # whoever took it along was interrupted before it said how it went
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
        except HeadwayError as trouble:  # of the database: it is everybody's
            for entry in group:
                entry.trouble = trouble
        # Any other exception is this caller's own (a signal handler raised it); the others write again.
        for entry in group:
            entry.settled = True


def _write(tx: Tx, group: Sequence[Entry]) -> None:
    """All counts of the group in one transaction. Rows are sorted, so that two processes never lock crosswise."""
    numbers: dict[str, int] = {}
    known: dict[str, tuple[str, int]] = {}
    # Not deleted before this is committed, or its rows would have no project, and fail those of the others with them.
    kept = " FOR KEY SHARE" if tx.engine == "postgresql" else ""
    for entry in group:
        entry.trouble = None
        if entry.project_id not in numbers:
            found = tx.one(
                f"SELECT no, journaled, epoch, version FROM projects WHERE id = ?{kept}", (entry.project_id,)
            )
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


def no_journal(project_id: str) -> HeadwayError:
    return Refused(
        f"Project {project_id!r} was created without a journal.",
        hint="Open the finish line with journal=False for it, or create the project anew with journal=True.",
    )


def cut(error: str | None) -> str | None:
    """An error as it may be kept: without secrets, not too long, and of characters that every database takes. A name of a
    file that is no Unicode must not keep its item, and those of all who share the transaction, from being counted."""
    return None if error is None else redact(error)[:500].encode("utf-8", "replace").decode().replace("\0", "?")
