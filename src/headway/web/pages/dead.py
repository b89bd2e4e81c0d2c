"""Dead letters: permanent failures by cause, of jobs, of the queue and of the RQ deployment that the watcher follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headway.errors import HeadwayError, NotFound
from headway.views.jobs.items import read_item
from headway.views.jobs.job import Cause
from headway.views.jobs.listing import find_job
from headway.views.overview import (
    TaskCause,
    Times,
    read_causes,
    read_death_times,
    read_failed_ids,
    read_task_causes,
)
from headway.views.queue import TaskSheet
from headway.views.reading import Reader
from headway.views.search import FailuresByHost
from headway.views.shape import Absent, plain
from headway.watcher.failures import FailedJobs, followed, read_failures
from headway.web.api.problems import Forbidden
from headway.web.pages.jobs import Frame, frames, whole
from headway.web.pages.render import HEADERS, Pages

#: Maximum causes on the page, and those whose example is read with its traceback.
SHOWN = 100
OPENED = 12


class Example(NamedTuple):
    """One item of a cause, with its error and frames."""

    name: str
    error: str
    own: list[Frame]
    library: list[Frame]
    tries: int


class Group(NamedTuple):
    """One cause in its jobs, those with the most dead letters first, with an example."""

    causes: tuple[Cause, ...]
    example: Example | None

    @property
    def dead(self) -> int:
        return sum(cause.dead for cause in self.causes)

    @property
    def failures(self) -> int:
        return sum(cause.failures for cause in self.causes)

    @property
    def first_seen(self) -> datetime:
        return min(cause.first_seen for cause in self.causes)

    @property
    def last_seen(self) -> datetime:
        return max(cause.last_seen for cause in self.causes)


class Letters(NamedTuple):
    """The content of the dead letters page."""

    at: datetime
    groups: tuple[Group, ...]
    #: Dead letters by job, in all jobs.
    jobs: dict[str, int]
    times: Times | None
    tasks: tuple[TaskCause, ...]
    hosts: FailuresByHost


class Foreign(NamedTuple):
    """The failures of the RQ deployment that the watcher follows, or why they are unknown."""

    queues: tuple[str, ...]
    failed: FailedJobs | None
    error: str = ""


def read_letters(reader: Reader, job: str | None = None) -> Letters:
    """Read the dead letters of jobs, or of one, and of the queue."""
    every = read_causes(reader.database, limit=None)
    jobs: dict[str, int] = {}
    groups: dict[tuple[str, str, str], list[Cause]] = {}
    for cause in every:
        jobs[str(cause.job)] = jobs.get(str(cause.job), 0) + cause.dead
        if job in (None, cause.job):
            groups.setdefault((cause.type, cause.message, cause.frame), []).append(cause)
    ordered = sorted(groups.values(), key=lambda group: -sum(cause.dead for cause in group))
    shown = ordered[:SHOWN]
    first = [group[0] for group in shown[:OPENED]]
    examples = [_example(reader, cause) for cause in first]
    return Letters(
        datetime.fromtimestamp(reader.database.now(), UTC),
        tuple(Group(tuple(group), examples[i] if i < OPENED else None) for i, group in enumerate(ordered)), jobs,
        read_death_times(reader.database, first), read_task_causes(reader.database, limit=1000),
        reader.failures_by_host(),
    )  # fmt: skip


def read_foreign(reader: Reader) -> Foreign | None:
    """Read the failures in RQ; None without a deployment. An unreachable Redis is reported in `Foreign.error`."""
    deployment = followed(reader.config, reader.database)
    if deployment is None:
        return None
    try:
        return Foreign(deployment.queues, read_failures(deployment))
    except HeadwayError as error:
        return Foreign(deployment.queues, None, str(error))


def _example(reader: Reader, cause: Cause) -> Example | None:
    if cause.example is None or isinstance(cause.job, Absent):
        return None
    sheet = read_item(find_job(reader.ledger, cause.job), cause.example)
    failures = [attempt for attempt in sheet.attempts if attempt.cause == cause.no and attempt.error]
    if not failures:
        return None
    own, library = frames(failures[-1].traceback)
    return Example(
        sheet.item.key or f"item {cause.example}", failures[-1].error or "", own, library, len(sheet.attempts)
    )


async def dead(pages: Pages, request: Request) -> Response:
    """Answer ``/dead``: causes of permanent failures, with their retry actions."""
    site, job = pages.site, request.query_params.get("job") or None
    found, foreign = await asyncio.gather(
        site.view(read_letters, site.reader, job), site.view(read_foreign, site.reader)
    )
    items = sum(group.dead for group in found.groups)
    tasks = 0 if job else sum(cause.dead for cause in found.tasks)
    newest = max(found.groups, key=lambda group: group.first_seen, default=None)
    failed = foreign.failed if foreign and foreign.failed else None
    return pages.answer(
        request, "dead.html", now=found.at, refresh=15, found=found, items=items, tasks=tasks, newest=newest, job=job,
        jobs=sorted({str(cause.job) for group in found.groups for cause in group.causes}),
        foreign=None if job else foreign, failed=None if job else failed, most=SHOWN,
        reasons=len(found.groups) + (0 if job else len(found.tasks) + (len(failed.causes) if failed else 0)),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Export


async def export(pages: Pages, request: Request) -> Response:
    """Stream dead letters as JSON lines, like ``headway dead export``: of a job, a cause, all jobs, or the queue.

    Payloads are included only with ``payload=1``, which needs the right ``export``. Letters are read page by page.
    """
    params = request.query_params
    cause = whole(params.get("cause"), "cause")
    payload = bool(params.get("payload"))
    if payload and not pages.site.user(request).may("export"):
        raise Forbidden("Your role may not export payloads.", hint="Export without payload, or ask an admin.")
    reader = pages.site.reader
    if params.get("tasks"):
        return _lines(_failed_tasks(pages, cause), "failed-tasks.jsonl")
    if job := params.get("job"):
        await pages.site.view(find_job, reader.ledger, job)
        return _lines(_letters_of(pages, [job], cause, payload=payload), "dead-letters.jsonl")
    found = await pages.site.view(read_causes, reader.database)
    return _lines(
        _letters_of(pages, sorted({str(one.job) for one in found}), None, payload=payload), "dead-letters.jsonl"
    )


async def _letters_of(pages: Pages, jobs: list[str], cause: int | None, *, payload: bool) -> AsyncIterator[str]:
    site = pages.site
    for job in jobs:
        after: int | None = -1
        while after is not None:
            page = await site.view(site.reader.dead_letters, job, cause=cause, payload=payload, after=after, limit=500)
            yield "".join(f"{json.dumps(plain(letter))}\n" for letter in page.letters)
            after = page.next_after


async def _failed_tasks(pages: Pages, cause: int | None) -> AsyncIterator[str]:
    site, after = pages.site, 0
    while True:
        numbers, sheets = await site.view(_tasks_page, site.reader, cause, after)
        if not numbers:
            return
        yield "".join(f"{json.dumps(plain(sheet))}\n" for sheet in sheets)
        after = numbers[-1]


def _tasks_page(reader: Reader, cause: int | None, after: int) -> tuple[list[int], list[TaskSheet]]:
    found = read_failed_ids(reader.database, cause=cause, after=after, limit=100)
    sheets = []
    for _, id in found:
        with suppress(NotFound):  # deleted since
            sheets.append(reader.task(id))
    return [no for no, _ in found], sheets


def _lines(content: AsyncIterator[str], name: str) -> Response:
    headers = {**HEADERS, "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(content, headers=headers, media_type="application/x-ndjson")


PAGES = {"/dead": dead, "/dead/export": export}
