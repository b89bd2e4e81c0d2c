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
