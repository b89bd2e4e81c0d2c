"""Projects of the finish line: how far one is."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.finishline import Progress


class ProjectProgress(NamedTuple):
    """`headway progress`: the counts of one project."""

    project_id: Annotated[str, "the project's id"]
    status: Annotated[str, "INITIALIZING, CRAWLING, PROCESSING, DONE, FAILED; NOT_FOUND when there is no such project"]
    total: Annotated[int, "how many items there are; 0 while that is not known"]
    done: Annotated[int, "items that are through, failed ones included"]
    errors: Annotated[int, "those of them that failed"]
    percent: Annotated[float, "share of `total` that is through, 0 to 100"]
    live: Annotated[bool, "false when the SQL record answers for a project that Redis no longer has"]
    restored: Annotated[datetime | None, "the checkpoint its counts were rebuilt from; later counts may be missing"]

    def as_json(self) -> Json:
        return document(self)


class Projects(NamedTuple):
    """`/api/v1/projects`: the projects that the database has a record of, by id, as of their last checkpoint."""

    projects: Annotated[tuple[ProjectProgress, ...], "the projects"]
    next_after: Annotated[str | None, "`after` of the next page; null on the last"]

    def as_json(self) -> Json:
        return document(self)


class ProjectLine(NamedTuple):
    """A project of the finish line, as SQL has it."""

    project: Annotated[ProjectProgress, "its counts"]
    created_at: Annotated[datetime, "when it was made"]
    checked_at: Annotated[datetime | None, "when its counts were last taken from Redis"]
    completed_at: Annotated[datetime | None, "when it was complete"]
    journaled: Annotated[bool, "whether every count is in SQL before it is acknowledged"]


class ProjectPage(NamedTuple):
    """A page of projects."""

    lines: Annotated[tuple[ProjectLine, ...], "the newest first"]
    next: Annotated[int | None, "`before` of the next page; null on the last"]


def read_projects(database: Database, *, after: str = "", limit: int = 50) -> Projects:
    from headway.finishline.progress import Progress, Status

    rows = database.all(
        "SELECT id, status, total, done, errors, completed_at FROM projects WHERE id > ? ORDER BY id LIMIT ?",
        (after, limit + 1),
    )
    found = [
        (id, Progress(Status.DONE if completed is not None else Status(status), total, done, errors, live=False))
        for id, status, total, done, errors, completed in rows[:limit]
    ]
    page = tuple(project_view(id, progress) for id, progress in found)
    return Projects(page, page[-1].project_id if len(rows) > limit else None)


def read_newest_projects(database: Database, *, before: int | None = None, limit: int = 50) -> ProjectPage:
    from headway.finishline.progress import Progress, Status
    from headway.ledger.values import maybe_utc, utc

    rows = database.all(
        "SELECT no, id, status, total, done, errors, journaled, created_at, checkpoint_at, completed_at FROM projects "
        f"{'' if before is None else 'WHERE no < ? '}ORDER BY no DESC LIMIT ?",
        (*(() if before is None else (before,)), limit + 1),
    )
    lines = []
    for _, id, status, total, done, errors, journaled, created, checked, completed in rows[:limit]:
        word = Status.DONE if completed is not None else Status(status)
        restored = maybe_utc(checked) if completed is None and not journaled else None
        view = project_view(id, Progress(word, total, done, errors, live=False, restored=restored))
        lines.append(ProjectLine(view, utc(created), maybe_utc(checked), maybe_utc(completed), bool(journaled)))
    return ProjectPage(tuple(lines), rows[limit - 1][0] if len(rows) > limit else None)


def project_view(project_id: str, found: Progress) -> ProjectProgress:
    return ProjectProgress(
        project_id=project_id,
        status=found.status.value,
        total=found.total,
        done=found.done,
        errors=found.errors,
        percent=round(found.percent, 2),
        live=found.live,
        restored=found.restored,
    )
