"""Lists for people, newest first, page by page along their keys: who did what, and the projects of the finish line."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from headway.telemetry import redact
from headway.views.items import masked
from headway.views.projects import ProjectProgress
from headway.views.records import AuditEntry

if TYPE_CHECKING:
    from headway._sql import Database, Value

PAGE = 50


class Activity(NamedTuple):
    """A page of the audit trail."""

    entries: Annotated[tuple[AuditEntry, ...], "the newest first"]
    next: Annotated[int | None, "`before` of the next page; null on the last"]


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


def read_activity(
    database: Database, *, job: str = "", actor: str = "", before: int | None = None, limit: int = PAGE
) -> Activity:
    from headway.ledger.values import utc

    where: list[str] = ["true"]
    values: list[Value] = []
    for column, wanted in (("job", job), ("actor", actor)):
        if wanted:
            where.append(f"{column} = ?")
            values.append(wanted)
    if before is not None:
        where.append("seq < ?")
        values.append(before)
    rows = database.all(
        f"SELECT seq, at, actor, action, job, detail FROM audit WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?",
        (*values, limit + 1),
    )
    entries = tuple(
        AuditEntry(utc(at), redact(who), what, name, _detail(detail)) for _, at, who, what, name, detail in rows[:limit]
    )
    return Activity(entries, rows[limit - 1][0] if len(rows) > limit else None)


def _detail(text: str) -> dict[str, Any]:
    try:
        found = masked(json.loads(text))
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {"detail": found}


def read_projects(database: Database, *, before: int | None = None, limit: int = PAGE) -> ProjectPage:
    from headway.finishline.progress import Progress, Status
    from headway.ledger.values import maybe_utc, utc
    from headway.views.projects import project_view

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
