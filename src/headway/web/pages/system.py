"""The pages Projects, States, Performance, Alerts, Activity and About."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidInput
from headway.states import FINISHED
from headway.views.projects import ProjectPage, read_newest_projects
from headway.views.reading import Reader
from headway.views.states import State, States, StatesJobs, masked_states
from headway.views.system.performance import Performance, read_performance
from headway.views.system.records import Settings, read_settings
from headway.web.pages.overview import cure
from headway.web.pages.queues import axis_of
from headway.web.pages.render import Pages

#: Maximum tasks and tags of a matrix. Of larger jobs it shows the tasks with errors, then those with the lowest status.
ROWS, TAGS = 100, 8
#: A matrix of more tasks than this has one line per task, without bars and messages.
COMPACT = 12
LONG_AGO = datetime.fromtimestamp(0, UTC)


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidInput(f"{text[:40]!r} is not a position in this list.", hint="Start again from the first page.")
    return int(text)


async def projects(pages: Pages, request: Request) -> Response:
    """Answer ``/projects``."""
    before = _number(request.query_params.get("before"))

    def look(reader: Reader) -> ProjectPage:
        return read_newest_projects(reader.database, before=before)

    page = await pages.site.view(look, pages.site.reader)
    return pages.answer(request, "projects.html", refresh=10, page=page, before=before)


# ---------------------------------------------------------------------------------------------------------------------
# States


class Row(NamedTuple):
    """One task of the matrix."""

    task: int
    cells: tuple[State | None, ...]
    lowest: int


class Matrix(NamedTuple):
    """Tasks by tags."""

    tags: tuple[str, ...]
    rows: tuple[Row, ...]
    #: Index of the row with the lowest status for each tag; None if all tasks have finished it.
    decides: tuple[int | None, ...]
    left_out: int


def matrix(found: States, first: int | None = None) -> Matrix:
    """Arrange states by task and tag: the tasks with the lowest status, or the page that starts with task ``first``.

    Errors (-1) come before warnings (-2), although their status is higher.
    """
    # Tags are ordered by progress, so that consecutive steps appear in order.
    sums = Counter[str]()
    for state in found.states:
        sums[state.tag] += 100 if state.status == FINISHED else own_progress(state)
    tags = tuple(sorted(sums, key=lambda tag: (-sums[tag], tag)))[:TAGS] or ("",)
    by_task: dict[int, dict[str, State]] = {}
    for state in found.states:
        by_task.setdefault(state.task_id, {})[state.tag] = state
    tasks: Iterable[int]
    if first is not None:
        tasks = range(first, min(found.num_tasks, first + ROWS))
    else:
        tasks = range(found.num_tasks) if found.num_tasks <= ROWS else sorted(by_task)
    rows = []
    for task in tasks:
        own = by_task.get(task, {})
        cells = tuple(own.get(tag) for tag in tags)
        rows.append(Row(task, cells, min((state.status for state in own.values()), default=0)))
    shown = rows
    if first is None:
        shown = sorted(rows, key=_severity)[:ROWS]
    decides = []
    for column in range(len(tags)):
        levels = [(_status(row.cells[column]), place) for place, row in enumerate(shown)]
        lowest = min(levels, default=(FINISHED, 0))
        decides.append(None if lowest[0] == FINISHED else lowest[1])
    return Matrix(tags, tuple(shown), tuple(decides), found.num_tasks - len(shown))


def _severity(row: Row) -> tuple[int, int, int]:
    """Order tasks with errors first, then by their warnings, their lowest status and their number."""
    states = [0 if state is None else state.status for state in row.cells]
    failed = any(status < 0 and status != -2 for status in states)
    return (0 if failed else 1 if -2 in states else 2), sum(min(status, FINISHED) for status in states), row.task


def _status(state: State | None) -> int:
    return 0 if state is None else state.status


async def states(pages: Pages, request: Request) -> Response:
    """Answer ``/states``: the jobs that have states."""

    def look(reader: Reader) -> StatesJobs:
        return reader.states_jobs()

    found = await pages.site.view(look, pages.site.reader)
    jobs = sorted(found.jobs, key=lambda job: job.created_at or LONG_AGO, reverse=True)[:200]
    return pages.answer(request, "states.html", refresh=15, jobs=jobs)


async def states_job(pages: Pages, request: Request) -> Response:
    """Answer ``/states/JOB``: the states of a job by task and tag."""
    id, first = request.path_params["id"], _number(request.query_params.get("from"))

    def look(reader: Reader) -> States:
        return masked_states(reader.states(id))

    found = await pages.site.view(look, pages.site.reader)
    errors = [state for state in found.states if state.status == -1]
    latest = sorted(found.states, key=lambda state: state.timestamp or LONG_AGO, reverse=True)
    return pages.answer(
        request, "states_job.html", refresh=3, found=found, matrix=matrix(found, first), compact=COMPACT,
        errors=errors, latest=latest[:12],
        first=first, following=None if first is None or first + ROWS >= found.num_tasks else first + ROWS,
        finished=FINISHED, own_progress=own_progress, reached=reached,
    )  # fmt: skip


def reached(state: State) -> int:
    """Return the percentage that a task had reached when it failed, if it recorded it."""
    noted = state.payload.get("last_status") if isinstance(state.payload, dict) else None
    return min(100, max(0, noted)) if type(noted) is int else 0


def own_progress(state: State | None) -> int:
    """Return the length of a state's bar in percent. A status from 1 to 99 counts as a percentage."""
    if state is None or state.status <= 0:
        return 0
    return min(100, state.status)


# ---------------------------------------------------------------------------------------------------------------------


async def performance(pages: Pages, request: Request) -> Response:
    """Answer ``/performance``."""
    range = request.query_params.get("range", "24h")
    range = range if range in ("1h", "24h", "7d") else "24h"

    def look(reader: Reader) -> tuple[Performance, ...]:
        return read_performance(reader.database, range)

    found = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "performance.html", refresh=30, found=found, range=range, runs=axis_of(one.run for one in found),
        waits=axis_of(one.wait for one in found),
    )  # fmt: skip


async def activity(pages: Pages, request: Request) -> Response:
    """Answer ``/activity``."""
    params = request.query_params
    job, actor, before = params.get("job", "").strip(), params.get("actor", "").strip(), _number(params.get("before"))
    page = await pages.site.view(pages.site.reader.activity, job=job or None, actor=actor or None, before=before)
    return pages.answer(request, "activity.html", page=page, job=job, actor=actor, before=before)


async def alerts(pages: Pages, request: Request) -> Response:
    """Answer ``/alerts``."""
    found = await pages.site.view(pages.site.reader.alerts, history=20)
    return pages.answer(
        request, "alerts.html", refresh=10, found=found, units={rule.name: rule.unit for rule in found.rules}, cure=cure
    )


async def about(pages: Pages, request: Request) -> Response:
    """Answer ``/about``."""
    site = pages.site

    def look(reader: Reader) -> tuple[Settings, str, int, float]:
        database = reader.database
        began = datetime.now(UTC).timestamp()
        at = database.now()
        return read_settings(site.settings), database.name, database.size(), at - began

    settings, name, size, skew = await site.view(look, site.reader)
    chosen = {key: one for key, one in settings.settings.items() if one.origin != "default"}
    usual = {key: one for key, one in settings.settings.items() if key not in chosen}
    return pages.answer(request, "about.html", chosen=chosen, usual=usual, name=name, size=size, skew=skew)


PAGES = {
    "/projects": projects, "/states": states, "/states/{id}": states_job, "/performance": performance,
    "/activity": activity, "/alerts": alerts, "/about": about,
}  # fmt: skip
