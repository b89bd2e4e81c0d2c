"""Dead letters: what failed for good, by cause, of jobs and of the queue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headway.views.items import read_item
from headway.views.job import Cause
from headway.views.jobs import find_job
from headway.views.overview import TaskCause, read_causes, read_task_causes
from headway.views.reading import Reader
from headway.views.shape import Absent
from headway.web.pages.jobs import Frame, frames
from headway.web.pages.render import Pages

#: Causes whose example is read with its traceback; the others are one click away.
OPENED = 12


class Example(NamedTuple):
    """One item of a cause: what it said, and where."""

    name: str
    error: str
    own: list[Frame]
    library: list[Frame]
    tries: int


class Letters(NamedTuple):
    """All that the page shows."""

    at: datetime
    causes: tuple[tuple[Cause, Example | None], ...]
    tasks: tuple[TaskCause, ...]


def read_letters(reader: Reader) -> Letters:
    causes = read_causes(reader.database)
    shown = [(cause, _example(reader, cause) if place < OPENED else None) for place, cause in enumerate(causes)]
    return Letters(datetime.fromtimestamp(reader.database.now(), UTC), tuple(shown), read_task_causes(reader.database))


def _example(reader: Reader, cause: Cause) -> Example | None:
    if cause.example is None or isinstance(cause.job, Absent):
        return None
    sheet = read_item(find_job(reader.ledger, cause.job), str(cause.example))
    failures = [attempt for attempt in sheet.attempts if attempt.cause == cause.no and attempt.error]
    if not failures:
        return None
    own, library = frames(failures[-1].traceback)
    return Example(
        sheet.item.key or f"item {cause.example}", failures[-1].error or "", own, library, len(sheet.attempts)
    )


async def dead(pages: Pages, request: Request) -> Response:
    found = await pages.site.read(read_letters, pages.site.reader)
    items = sum(cause.dead for cause, _ in found.causes)
    tasks = sum(cause.dead for cause in found.tasks)
    newest = max((cause for cause, _ in found.causes), key=lambda cause: cause.first_seen, default=None)
    return pages.answer(
        request, "dead.html", now=found.at, refresh=15, found=found, items=items, tasks=tasks, newest=newest,
        jobs=sorted({str(cause.job) for cause, _ in found.causes}),
    )  # fmt: skip


PAGES = {"/dead": dead}
