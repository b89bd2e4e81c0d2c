"""Table ``project_deliveries``: which sinks took ``job.completed`` of a project."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway._sql import Database, Tx, marks
from headway.errors import InvalidInput
from headway.events import Event
from headway.finishline.progress import checked_project
from headway.finishline.store.records import CHUNK, Records
from headway.telemetry import Log

log = Log("finishline")


class Deliveries:
    """Records deliveries in SQL, so that a loss of Redis repeats none of them."""

    def __init__(self, database: Database, records: Records) -> None:
        self._database, self._records = database, records

    def settled(self, events: Sequence[Event]) -> None:
        """Record that every sink took these events."""
        for event in events:
            if event.type != "job.completed":
                continue  # appended by another program
            found = _project(event)
            if found is None:
                log.warning("a delivered event belongs to no project in SQL", eventID=event.id)
            else:
                self._records.delivered(*found, event.data)

    def note(self, sink: str, events: Sequence[Event]) -> None:
        """Record that one sink took these events while other sinks did not yet."""

        def work(tx: Tx) -> None:
            for projects, epochs in _pages(events):
                tx.execute(
                    "INSERT INTO project_deliveries (project, sink) SELECT no, ? FROM projects "
                    f"WHERE delivered_at IS NULL AND id IN ({marks(len(projects))}) AND epoch IN ({marks(len(epochs))}) "
                    "ON CONFLICT (project, sink) DO NOTHING",
                    (sink, *projects, *epochs),
                )

        self._database.run(work, operation="project.note_delivery")

    def taken(self, sink: str, events: Sequence[Event]) -> set[str]:
        """Return the ids of those events that the sink took before."""
        known: set[tuple[str, str]] = set()
        for projects, epochs in _pages(events):
            rows = self._database.all(
                f"SELECT id, epoch FROM projects WHERE id IN ({marks(len(projects))}) AND epoch IN ({marks(len(epochs))}) "
                "AND (delivered_at IS NOT NULL "
                "OR EXISTS (SELECT 1 FROM project_deliveries WHERE project = projects.no AND sink = ?))",
                (*projects, *epochs, sink),
            )
            known.update((id, epoch) for id, epoch in rows)
        return {event.id for event in events if _project(event) in known}


def _pages(events: Sequence[Event]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield ids and epochs of the projects. An epoch is random, so each one belongs to one project."""
    found = [project for event in events if event.type == "job.completed" and (project := _project(event))]
    for start in range(0, len(found), CHUNK):
        page = found[start : start + CHUNK]
        yield [id for id, _ in page], [epoch for _, epoch in page]


def _project(event: Event) -> tuple[str, str] | None:
    """Return id and epoch of the event's project; None when no project can have this name."""
    epoch = event.id.rpartition(":")[2]
    try:
        return (checked_project(event.job), epoch) if epoch.isalnum() else None
    except InvalidInput:
        return None
