"""The overview, with the issues that need attention, and search."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import quote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headway.core.text import plural
from headway.errors import HeadwayError
from headway.ledger.control import Control
from headway.views.history import read_marks
from headway.views.jobs.job import Cause
from headway.views.jobs.listing import Job
from headway.views.jobs.series import RANGES, Series, read_queue_series, read_series
from headway.views.overview import (
    JobLine,
    Outlook,
    TaskCause,
    Times,
    find_item,
    outlook,
    read_causes,
    read_controls,
    read_death_times,
    read_job_page,
    read_rate,
    read_task_causes,
)
from headway.views.queue import QueueView, WorkerView
from headway.views.reading import Reader
from headway.views.search import LIMIT, LONGEST, Found
from headway.views.shape import Absent
from headway.views.system.alerts import AlertView
from headway.web.pages import draw
from headway.web.pages.jobs import item_path
from headway.web.pages.marks import ChartMarks, marks_for
from headway.web.pages.render import Pages, num, when

#: A cause is new if it was first seen within this time.
NEW = timedelta(hours=1)
#: Minimum wait in seconds of the oldest task before a queue counts as stalled.
LOOKED_AT = 60.0
#: Maximum jobs in progress on the page.
RUNNING = 8
#: Lost workers and runs are shown for this long.
REMEMBERED = timedelta(days=1)
#: More issues of one kind than this are grouped.
GROUPED = 3


class Need(NamedTuple):
    """An issue that needs attention."""

    word: str
    look: str
    text: str
    since: str
    #: The page with the action that resolves it, and the text of the link.
    path: str
    link: str
    #: (rule, subject) of alerts that report the same issue.
    rules: tuple[tuple[str, str], ...] = ()
    #: The open alerts about it, which can be acknowledged.
    alerts: tuple[AlertView, ...] = ()
    #: The lost worker that can be removed from the list.
    worker: str = ""
    #: The number of issues that this row stands for.
    size: int = 1

    @property
    def key(self) -> str:
        """The identity of the row, independent of its text."""
        return f"{self.word} {self.path} {self.alerts[0].no if self.alerts and self.path == '/alerts' else ''}"

    @property
    def open(self) -> tuple[AlertView, ...]:
        """The alerts that are not acknowledged."""
        return tuple(alert for alert in self.alerts if not alert.acknowledged_by)

    @property
    def seen(self) -> str:
        """Who acknowledged it, or that it is snoozed; empty if it needs attention."""
        if not self.alerts or (self.open and not all(alert.muted for alert in self.open)):
            return ""
        names = sorted({alert.acknowledged_by for alert in self.alerts if alert.acknowledged_by})
        return f"acknowledged by {', '.join(names)}" if names else "snoozed"


@dataclass(frozen=True)
class Standing:
    """The state of queues and workers at one moment."""

    at: datetime
    queues: tuple[QueueView, ...]
    flows: dict[str, tuple[Series, tuple[int, ...]]]
    workers: tuple[WorkerView, ...]

    @property
    def outlooks(self) -> dict[str, Outlook]:
        """The forecast of each queue."""
        return {queue.queue: outlook(queue, *self.flows[queue.queue]) for queue in self.queues}

    @property
    def alive(self) -> tuple[WorkerView, ...]:
        """The workers that are online."""
        return tuple(worker for worker in self.workers if worker.state in ("idle", "busy", "draining"))


@dataclass(frozen=True)
class Now(Standing):
    """The content of the overview."""

    #: Jobs in progress, then others that changed recently.
    lines: tuple[JobLine, ...]
    #: Whether more jobs are in progress.
    more: bool
    series: Series
    hour: Series
    #: Items and tasks that succeed per second now.
    rate: float | None
    causes: tuple[Cause, ...]
    times: Times | None
    task_causes: tuple[TaskCause, ...]
    alerts: tuple[AlertView, ...]
    marks: ChartMarks
    #: Requests to runs (pause, stop, scale) by job.
    asked: dict[str, Control]


def read_now(reader: Reader, range: str) -> Now:
    """Read the content of the overview."""
    database = reader.database
    causes = read_causes(database, limit=None)
    running = read_job_page(database, running=True, limit=RUNNING)
    others = [line for line in read_job_page(database, limit=8).lines if not line.job.holder]
    series = read_series(database, range)
    return Now(
        at=datetime.fromtimestamp(database.now(), UTC),
        queues=reader.queues().queues,
        flows=read_queue_series(database),
        workers=reader.workers().workers,
        lines=(*running.lines, *others),
        more=running.more,
        series=series,
        hour=read_series(database, "1h"),
        rate=read_rate(database),
        causes=causes,
        times=read_death_times(database, causes[:5]),
        task_causes=read_task_causes(database, limit=1000),
        alerts=reader.alerts(history=0).alerts,
        marks=marks_for(read_marks(database, series.points[0].minute * 60.0).marks, most=4),
        asked=read_controls(database, [line.job.id for line in running.lines]),
    )


def needs(now: Now) -> list[Need]:
    """Return the issues that need attention, most severe first."""
    seen = [*_lost(now), *_new_causes(now), *_stalled(now), *_queues(now)]
    covered = {key for need in seen for key in need.rules}
    covered |= {(alert.rule, alert.subject) for need in seen for alert in need.alerts}
    lost = sum(need.look == "s-lost bad" for need in seen)
    found = [*seen[:lost], *_alerts(now, covered), *seen[lost:]]
    dead = sum(cause.dead for cause in now.causes) + sum(cause.dead for cause in now.task_causes)
    if dead and not any(need.word == "New error" for need in found):
        newest = max([*(one.last_seen for one in now.causes), *(one.last_seen for one in now.task_causes)])
        causes = plural(distinct(now.causes) + len(now.task_causes), "cause")
        text = f"{plural(dead, 'item')} failed permanently, with {causes}"
        found.append(
            Need(
                "Dead letters",
                "s-dead bad",
                text,
                Markup("last {}").format(when(newest, now.at)),
                "/dead",
                "See causes",
            )
        )
    open_ = {(alert.rule, alert.subject): alert for alert in now.alerts}
    linked = [
        need._replace(alerts=need.alerts or tuple(open_[key] for key in need.rules if key in open_)[:1])
        for need in found
    ]
    return _grouped(linked)


def distinct(causes: Sequence[Cause]) -> int:
    """Count the causes as the page Dead letters groups them, over all jobs."""
    return len({(cause.type, cause.message, cause.frame) for cause in causes})


def _grouped(found: list[Need]) -> list[Need]:
    """Replace more than `GROUPED` issues of one kind by a single row."""
    kinds: dict[tuple[str, bool], list[Need]] = {}
    for need in found:
        kinds.setdefault((need.word, bool(need.seen)), []).append(need)
    grouped = []
    for (word, _), same in kinds.items():
        if len(same) <= GROUPED:
            grouped += same
            continue
        first = same[0]
        path = {"Worker lost": "/workers", "New error": "/dead", "Run lost": "/jobs?state=interrupted"}.get(
            word, "/alerts"
        )
        text = f"{len(same)} issues. The first: {first.text}"
        alerts = tuple(alert for need in same for alert in need.alerts)
        grouped.append(
            first._replace(text=text, path=path, link=f"See all {len(same)}", alerts=alerts, worker="", size=len(same))
        )
    return grouped


#: Where an alert is resolved: rule -> (path with the subject, text of the link).
_CURES = {
    "stalled_job": ("/jobs/{}", "Open the job"),
    "worker_lost": ("/workers#{}", "See the worker"),
    "delay": ("/queues/{}", "Open {}"),
    "backlog": ("/queues/{}", "Open {}"),
    "store_away": ("/about#store", "Check the store"),
    "store_slow": ("/about#store", "Check the store"),
    "redis_memory": ("/about#store", "Check the store"),
    "event_lag": ("/about#store", "Check the relay"),
    "no_handler": ("/workers#start", "Start a worker"),
    "new_cause": ("/dead", "See causes"),
}


def cure(alert: AlertView) -> tuple[str, str]:
    """Return the page with the action that resolves an alert, and the text of the link to it."""
    if alert.rule == "failure_spike":
        kind, _, name = alert.subject.partition(" ")
        return (f"/jobs/{quote(name, safe='')}#causes" if kind == "job" else "/dead#tasks"), "See causes"
    path, link = _CURES.get(alert.rule, ("/alerts", "See alerts"))
    return path.format(quote(alert.subject, safe="")), link.format(alert.subject)


def _alerts(now: Now, covered: set[tuple[str, str]]) -> list[Need]:
    """Return the open alerts that no other issue covers: of new causes those of which nothing failed permanently."""
    return [
        Need(
            alert.label, "s-dead bad" if alert.severity == "critical" else "s-warn warn",
            alert.text.removesuffix("."), _since(alert.opened_at, now), *cure(alert), alerts=(alert,),
        )
        for alert in now.alerts
        if (alert.rule, alert.subject) not in covered and not alert.muted
    ]  # fmt: skip


def _since(at: datetime, now: Now) -> Markup:
    return Markup("since {}").format(when(at, now.at))


def _lost(now: Now) -> list[Need]:
    found = []
    for line in now.lines:
        job, run = line.job, line.run
        if run and run.outcome == "lost" and job.status == "interrupted" and now.at - job.updated_at < REMEMBERED:
            left = job.total - job.done - job.dead
            text = f"{job.id}: its process on {run.host} died; {num(job.done)} items are done, {num(left)} remain"
            since = _since(job.updated_at, now)
            about = (("stalled_job", job.id),)
            found.append(Need("Run lost", "s-lost bad", text, since, _job(job), "Continue it", about))
    for worker in now.workers:
        if worker.state == "lost" and now.at - worker.seen_at < REMEMBERED:
            held = f" while running {worker.task}, which will be reassigned" if worker.task else ""
            text = f"{worker.name} on {worker.host} stopped responding{held}"
            since, path = (
                _since(worker.seen_at, now),
                f"/workers#{quote(worker.name, safe='')}",
            )
            about = (("worker_lost", worker.name),)
            found.append(
                Need("Worker lost", "s-lost bad", text, since, path, f"See {worker.name}", about, worker=worker.name)
            )
    return found


def _new_causes(now: Now) -> list[Need]:
    found = []
    for cause in now.causes:
        if now.at - cause.first_seen < NEW and not isinstance(cause.job, Absent):
            text = f"{cause.type}: {plural(cause.dead, 'item')} failed permanently in {cause.job}"
            path = f"/jobs/{quote(cause.job, safe='')}/items?state=dead&cause={cause.no}"
            found.append(
                Need(
                    "New error",
                    "s-warn warn",
                    text,
                    _since(cause.first_seen, now),
                    path,
                    f"See {plural(cause.dead, 'item')}",
                    alerts=_alerts_of(now, f"New in job {cause.job}: {cause.type}: {cause.message}"),
                )
            )
    new = [one for one in now.task_causes if now.at - one.first_seen < NEW]
    if new:
        names = ", ".join(sorted({one.type for one in new})[:3])
        text = f"{names}: {plural(sum(one.dead for one in new), 'task')} of the queue failed permanently"
        since = _since(min(one.first_seen for one in new), now)
        alerts = tuple(
            alert for one in new for alert in _alerts_of(now, f"New in task {one.kind}: {one.type}: {one.message}")
        )
        found.append(Need("New error", "s-warn warn", text, since, "/dead#tasks", "See causes", alerts=alerts))
    return found


def _alerts_of(now: Now, text: str) -> tuple[AlertView, ...]:
    """Return the alerts about a new cause. Their subject is a hash, so they are found by the start of their text."""
    start = text[:120]
    return tuple(alert for alert in now.alerts if alert.rule == "new_cause" and alert.text.startswith(start))


def _stalled(now: Now) -> list[Need]:
    found = []
    for line in now.lines:
        job = line.job
        asked = now.asked.get(job.id)
        if asked and asked.paused:
            left = plural(job.total - job.done - job.dead, "item")
            text = f"{job.id}: paused by {asked.actor or 'an unnamed user'}; {left} pending"
            found.append(Need("Paused", "s-pause warn", text, "until resumed", _job(job), "Resume it"))
        elif line.stalled:
            text = line.stalled.removesuffix(".")
            since = _since(job.updated_at, now)
            about = (("stalled_job", job.id),)
            found.append(Need("Stalled", "s-warn warn", text, since, _job(job), "Open it", about))
    return found


def _queues(now: Now) -> list[Need]:
    found, looks = list[Need](), now.outlooks
    waiting = sum(queue.waiting for queue in now.queues if not queue.paused)
    if waiting and not now.alive:
        text = f"{plural(waiting, 'task')} waiting, but no worker is online"
        about = tuple((rule, queue.queue) for queue in now.queues for rule in ("backlog", "delay"))
        found.append(Need("No worker", "s-lost bad", text, "now", "/workers#start", "Start a worker", about))
    for queue in now.queues:
        look, path, link = looks[queue.queue], f"/queues/{queue.queue}", f"Open {queue.queue}"
        about = (("backlog", queue.queue), ("delay", queue.queue))
        if queue.paused:
            why = f", “{queue.reason}”" if queue.reason else ""
            by = queue.paused_by or "an unnamed user"
            text = f"{queue.queue}: {plural(queue.waiting, 'task')} waiting; paused by {by}{why}"
            until = (
                Markup("until {}").format(when(queue.paused_until, now.at)) if queue.paused_until else "until resumed"
            )
            found.append(Need("Paused", "s-pause warn", text, until, path, link, about))
        elif look.kind == "unserved" and now.alive:
            text = f"{queue.queue}: {plural(queue.waiting, 'task')} waiting, but no online worker serves this queue"
            found.append(Need("No worker", "s-lost bad", text, "now", f"{path}#start", "Start a worker", about))
        elif look.kind == "stalled" and now.alive and (queue.oldest_wait or 0.0) >= LOOKED_AT:
            text = f"{queue.queue}: {plural(queue.waiting, 'task')} waiting; none finished in the last minutes"
            found.append(Need("Stalled", "s-warn warn", text, "now", path, link, about))
        elif look.kind == "growing" and now.alive:
            text = (
                f"{queue.queue}: arrivals exceed completions; {plural(queue.waiting, 'task')} waiting, will not drain"
            )
            found.append(Need("Backlog", "s-warn warn", text, "now", path, link, about))
    return found


def _job(job: Job) -> str:
    return f"/jobs/{quote(job.id, safe='')}"


def ticks(series: Series) -> list[tuple[float, str]]:
    """Return the labels of a chart's time axis: a quarter of an hour, six hours or a day apart."""
    first, length = series.points[0].minute, (len(series.points) - 2) * series.step
    apart = 15 if length <= 90 else 360 if length <= 2000 else 1440
    form = "%a %d" if apart == 1440 else "%H:%M"
    moments = range(-(-first // apart) * apart, first + length + 1, apart)
    places = [(100 * (minute - first) / max(1, length), minute) for minute in moments]
    return [(at, draw.stamp(minute * 60, form)) for at, minute in places if 4 < at <= 100]


async def overview(pages: Pages, request: Request) -> Response:
    """Answer ``/``."""
    range = request.query_params.get("range", "1h")
    range = range if range in RANGES else "1h"
    now = await pages.site.view(read_now, pages.site.reader, range)
    empty = not now.lines and not any((now.workers, now.task_causes, sum(q.waiting + q.completed for q in now.queues)))
    if empty:
        return pages.answer(request, "empty.html", now=now.at, refresh=5)
    running = [line for line in now.lines if line.job.holder]
    tried, all_ = now.hour.done + now.hour.failed, needs(now)
    unseen = tuple(alert for need in all_ for alert in need.open if not need.seen)
    return pages.answer(
        request, "overview.html", now=now.at, refresh=15, found=now, needs=all_, running=running,
        active=sum(line.job.status == "processing" for line in running),
        open=sum(need.size for need in all_ if not need.seen), unseen=unseen,
        rate=now.rate or 0.0, success=100 * now.hour.done / tried if tried else None,
        ready=max((line.forecast.late for line in running if line.forecast), default=None)
        if all(line.forecast for line in running) else None,
        others=[line for line in now.lines if not line.job.holder], ticks=ticks(now.series), range=range, ranges=tuple(RANGES),
        times=now.times, causes=distinct(now.causes), series=now.series, waiting=sum(queue.waiting for queue in now.queues),
        late=max((queue.oldest_wait for queue in now.queues if queue.oldest_wait is not None), default=None),
        queued=bool(now.workers) or any(any((*queue[1:4], *queue[5:9])) for queue in now.queues),
    )  # fmt: skip


async def find(pages: Pages, request: Request) -> Response:
    """Answer ``/find``: redirect to what has exactly this name or is the only result, else list the results."""
    text = request.query_params.get("q", "").strip()[:512]
    site = pages.site

    def look(reader: Reader) -> str | Found:
        return (_exact(reader, text) if text else "/jobs") or _search(reader, text)

    found = await site.view(look, site.reader)
    if isinstance(found, str):
        return RedirectResponse(site.url(request, found), 303)
    total = sum(len(part) for part in found[1:])
    return pages.answer(request, "found.html", found=found, total=total, item_path=item_path, most=LIMIT)


def _exact(reader: Reader, text: str) -> str | None:
    """Return the path of the job, item or task with exactly this name, or of the tasks of that user."""
    with suppress(HeadwayError):
        return f"/jobs/{quote(reader.ledger.job(text).id, safe='')}"
    if item := find_item(reader.database, text):
        return item_path(*item)
    with suppress(HeadwayError):
        return f"/tasks/{quote(reader.queue.get(text).id, safe='')}"
    return f"/tasks?user_id={quote(text, safe='')}" if reader.tasks(user_id=text, limit=1).tasks else None


def _search(reader: Reader, text: str) -> str | Found:
    """Search for a text; return the path of the only result if it is an item or a cause."""
    found = reader.search(text[:LONGEST])
    if sum(len(part) for part in found[1:]) == 1:
        for item in found.items:
            return item_path(*item)
        for cause in found.causes:
            return (
                f"/tasks?cause={cause.no}"
                if cause.job is None
                else f"/jobs/{quote(cause.job, safe='')}/items?state=dead&cause={cause.no}"
            )
    return found


PAGES = {"/": overview, "/find": find}
