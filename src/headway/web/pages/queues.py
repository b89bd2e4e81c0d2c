"""The pages Queues, Queue, Workers, Tasks, Task and My work."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headway.core.text import plural, roughly
from headway.errors import HeadwayError, NotFound
from headway.queue.task import PRIORITIES, Status
from headway.views.history import read_marks
from headway.views.jobs.series import RANGES, read_queue_series
from headway.views.overview import TaskCause, count_failed_tasks, read_failed_ids, read_task_causes
from headway.views.queue import QueueView, Tasks, TaskSheet, TaskView, WorkerView
from headway.views.reading import Reader
from headway.views.system.performance import QueueTimes, Times, read_queue_times, read_waiting
from headway.web.pages import draw
from headway.web.pages.jobs import frames, whole
from headway.web.pages.marks import ChartMarks, marks_for
from headway.web.pages.overview import Standing, ticks
from headway.web.pages.render import Pages

#: Phrases for queues that do not drain, by kind of outlook.
STUCK = {"paused": "is paused", "unserved": "has no worker", "stalled": "is stalled", "growing": "will not drain"}
NAMES = tuple(priority.value for priority in PRIORITIES)


def read_standing(reader: Reader, range: str = "1h") -> Standing:
    """Read the current state of queues and workers, with the flow over ``range``."""
    return Standing(
        datetime.fromtimestamp(reader.database.now(), UTC),
        reader.queues().queues,
        read_queue_series(reader.database, range),
        reader.workers().workers,
    )


def headline(found: Standing) -> str:
    """Return the title: whether and when the queues drain."""
    looks = found.outlooks
    waiting = [queue for queue in found.queues if queue.waiting]
    if not waiting:
        return "No tasks waiting"
    bad = [f"{queue.queue} {STUCK[looks[queue.queue].kind]}" for queue in waiting if looks[queue.queue].kind in STUCK]
    clearing = [looks[queue.queue].seconds or 0.0 for queue in waiting if looks[queue.queue].kind == "clears"]
    parts = []
    if clearing:
        latest = max(clearing)
        when = "under a minute" if latest < 60 else f"about {roughly(latest)}"
        parts.append(
            f"{plural(len(clearing), 'queue')} will be empty in {when}"
            if bad or len(clearing) < 4
            else f"All clear in {when}"
        )
    parts += bad
    return ", ".join(parts) if parts else f"{plural(sum(queue.waiting for queue in waiting), 'task')} waiting"


def axis_of(times: Iterable[Times | None]) -> draw.Axis:
    """Return a common axis for the percentiles of all rows."""
    return draw.Axis(seconds for one in times if one for seconds in (one.p50, one.p95))


async def queues(pages: Pages, request: Request) -> Response:
    """Answer ``/queues``."""

    def look(reader: Reader) -> tuple[Standing, dict[str, QueueTimes], dict[str, tuple[tuple[str, int], ...]]]:
        found = read_standing(reader)
        waiting = sum(queue.waiting for queue in found.queues)
        return found, read_queue_times(reader.database), read_waiting(reader.database, waiting)

    found, times, people = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "queues.html", now=found.at, refresh=10, found=found, headline=headline(found), looks=found.outlooks,
        times=times, people=people, users=len({name for parties in people.values() for name, _ in parties}),
        waits=axis_of(one.wait for one in times.values()), runs=axis_of(one.run for one in times.values()),
    )  # fmt: skip


async def queue(pages: Pages, request: Request) -> Response:
    """Answer ``/queues/NAME``."""
    name = request.path_params["name"]
    if name not in NAMES:
        raise NotFound(f"There is no queue {name[:40]!r}.", hint=f"Queues are {', '.join(NAMES)}.")
    range = request.query_params.get("range", "1h")
    range = range if range in RANGES else "1h"

    def look(reader: Reader) -> tuple[Standing, Standing, Tasks, Tasks, dict[str, QueueTimes], ChartMarks]:
        past = read_standing(reader, range)
        since = past.flows[name][0].points[0].minute * 60.0
        return (
            read_standing(reader), past, reader.tasks(queue=name, status="RUNNING", limit=20),
            reader.oldest_tasks(name, limit=20), read_queue_times(reader.database, range),
            marks_for(read_marks(reader.database, since).marks, queue=name),
        )  # fmt: skip

    found, past, running, waiting, times, marks = await pages.site.view(look, pages.site.reader)
    one = next(each for each in found.queues if each.queue == name)
    series, came = past.flows[name]
    return pages.answer(
        request, "queue.html", now=found.at, refresh=10, queue=one, look=found.outlooks[name], series=series, came=came,
        ticks=ticks(series), running=running.tasks, waiting=waiting.tasks, range=range, ranges=tuple(RANGES),
        times=times.get(name), marks=marks, serving=[worker for worker in found.alive if name in worker.queues],
    )  # fmt: skip


def held(reader: Reader, workers: tuple[WorkerView, ...]) -> dict[str, TaskView]:
    """Return the current state of the tasks that lost workers were running."""
    found = {}
    for worker in [one for one in workers if one.state == "lost" and one.task][:50]:
        with suppress(HeadwayError):  # deleted since
            found[worker.name] = reader.task(str(worker.task)).task
    return found


async def workers(pages: Pages, request: Request) -> Response:
    """Answer ``/workers``."""

    def look(reader: Reader) -> tuple[Standing, dict[str, TaskView]]:
        found = read_standing(reader)
        return found, held(reader, found.workers)

    found, tasks = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "workers.html", now=found.at, refresh=10, workers=found.workers, alive=found.alive,
        lost=[worker for worker in found.workers if worker.state == "lost"],
        waiting=sum(queue.waiting for queue in found.queues if not queue.paused), held=tasks,
    )  # fmt: skip


async def tasks(pages: Pages, request: Request) -> Response:
    """Answer ``/tasks``: tasks by state, queue, kind and user, or those that failed by one cause."""
    params = request.query_params
    chosen = {name: params.get(name) or None for name in ("status", "queue", "kind", "user_id", "before")}
    number, after = whole(params.get("cause"), "cause"), whole(params.get("after"), "after")

    def look(reader: Reader) -> tuple[Tasks, TaskCause | None, int | None, dict[str, int]]:
        if number is not None:
            return *_of_cause(reader, number, after or 0), {}
        return (
            reader.tasks(**chosen),  # type: ignore[arg-type]  # the names are those of its parameters
            None, None, _counts(reader),
        )  # fmt: skip

    page, cause, further, counts = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "tasks.html", refresh=15, page=page, chosen=chosen, statuses=[status.value for status in Status],
        names=NAMES, filtered=any(value for name, value in chosen.items() if name != "before"), cause=cause, after=after,
        further=further, counts=counts,
    )  # fmt: skip


def _counts(reader: Reader) -> dict[str, int]:
    """Return the number of tasks by state and by queue, where it is known without reading all ended tasks."""
    queues = reader.queues().queues
    counts = {one.queue: one.waiting + one.delayed + one.running for one in queues}
    counts["QUEUED"] = sum(one.waiting + one.delayed for one in queues)
    counts["RUNNING"] = sum(one.running for one in queues)
    return counts | {"FAILED": count_failed_tasks(reader.database)}


def _of_cause(reader: Reader, number: int, after: int) -> tuple[Tasks, TaskCause, int | None]:
    """Return the tasks that failed permanently by one cause, the same ones that the cause's count includes."""
    cause = next((one for one in read_task_causes(reader.database, limit=1000) if one.no == number), None)
    if cause is None:
        raise NotFound("No failed task has this cause any more.", hint="Dead letters lists the current causes.")
    found, sheets = read_failed_ids(reader.database, cause=number, after=after, limit=51), list[TaskView]()
    for _, id in found[:50]:
        with suppress(NotFound):  # deleted since
            sheets.append(reader.task(id).task)
    return Tasks(tuple(sheets), None), cause, found[49][0] if len(found) > 50 else None


async def task(pages: Pages, request: Request) -> Response:
    """Answer ``/tasks/ID``."""
    id, owner = request.path_params["id"], pages.site.user(request).owner

    def look(reader: Reader) -> tuple[TaskSheet, QueueView | None]:
        found = reader.task(id, user_id=owner)  # another user's task is reported as not found
        waits = found.task.status == "QUEUED"
        paused = [one for one in reader.queues().queues if waits and one.paused and one.queue == found.task.queue]
        return found, paused[0] if paused else None

    found, paused = await pages.site.view(look, pages.site.reader)
    return pages.answer(request, "task.html", refresh=5, found=found, task=found.task, paused=paused, frames=frames)


class Own(NamedTuple):
    """One user's tasks, and the paused queues."""

    at: datetime
    tasks: tuple[TaskView, ...]
    paused: dict[str, QueueView]


async def me(pages: Pages, request: Request) -> Response:
    """Answer ``/me``: the tasks of the user who is logged in."""
    name = pages.site.user(request).name

    def look(reader: Reader) -> Own:
        paused = {queue.queue: queue for queue in reader.queues().queues if queue.paused}
        at = datetime.fromtimestamp(reader.database.now(), UTC)
        return Own(at, reader.tasks(user_id=name, limit=20).tasks, paused)

    own = await pages.site.view(look, pages.site.reader)
    running = [one for one in own.tasks if one.status == "RUNNING"]
    queued = [one for one in own.tasks if one.status == "QUEUED"]
    return pages.answer(
        request, "me.html", now=own.at, refresh=5, running=running, queued=queued[::-1], paused=own.paused,
        ended=[one for one in own.tasks if one.status not in ("RUNNING", "QUEUED")][:10], left=left,
    )  # fmt: skip


def left(task: TaskView, now: datetime) -> float | None:
    """Return the seconds that a running task needs at its rate so far; None below 5 %."""
    if task.started_at is None or task.percent < 5:
        return None
    passed = (now - task.started_at).total_seconds()
    return passed * (100 - task.percent) / task.percent if passed > 2 else None


PAGES = {
    "/queues": queues, "/queues/{name}": queue, "/workers": workers, "/tasks": tasks, "/tasks/{id}": task, "/me": me
}  # fmt: skip
