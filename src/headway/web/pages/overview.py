"""Overview: whether anybody has to do anything, then what runs. And finding something by its name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headway.core.text import duration, plural
from headway.errors import HeadwayError
from headway.ledger.control import Control
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
    read_task_causes,
)
from headway.views.queue import QueueView, WorkerView
from headway.views.reading import Reader
from headway.views.shape import Absent
from headway.views.system.alerts import AlertView
from headway.web.pages.jobs import item_path
from headway.web.pages.render import Pages, num, when

#: A cause that came for the first time within this is new, and said first.
NEW = timedelta(hours=1)
#: A run from which nothing came for so long is stalled.
STALLED = timedelta(minutes=5)
#: Tasks that wait for less have not been looked at yet.
LOOKED_AT = 60.0
#: Jobs in progress that are shown; the rest is on the page of jobs.
RUNNING = 8
#: Lost workers and runs are said for so long.
REMEMBERED = timedelta(days=1)


class Need(NamedTuple):
    """Something that needs somebody."""

    word: str
    look: str
    text: str
    since: str
    path: str
    link: str
    #: Rules of alerts that would say the same, each with whom they would say it of.
    rules: tuple[tuple[str, str], ...] = ()
    #: The open alert about it, which somebody can acknowledge.
    alert: AlertView | None = None
    #: The lost worker that somebody can take off the list.
    worker: str = ""

    @property
    def key(self) -> str:
        """What it is about, whatever its text says at the moment."""
        return f"{self.word} {self.path} {self.alert.no if self.alert and self.path == '/alerts' else ''}"

    @property
    def seen(self) -> str:
        """Who sees to it, or that nobody wants to hear of it for a while; empty: it is for whoever looks."""
        if self.alert is None:
            return ""
        return (
            f"{self.alert.acknowledged_by} sees to it" if self.alert.acknowledged_by else "snoozed" * self.alert.muted
        )


@dataclass(frozen=True)
class Standing:
    """The queues as they stand at one moment."""

    at: datetime
    queues: tuple[QueueView, ...]
    flows: dict[str, tuple[Series, tuple[int, ...]]]
    workers: tuple[WorkerView, ...]

    @property
    def outlooks(self) -> dict[str, Outlook]:
        return {queue.queue: outlook(queue, *self.flows[queue.queue]) for queue in self.queues}

    @property
    def alive(self) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.workers if worker.state in ("idle", "busy", "draining"))


@dataclass(frozen=True)
class Now(Standing):
    """Everything on the page."""

    #: Those in progress, then others that changed lately.
    lines: tuple[JobLine, ...]
    #: Whether more are in progress.
    more: bool
    series: Series
    hour: Series
    causes: tuple[Cause, ...]
    times: Times | None
    task_causes: tuple[TaskCause, ...]
    alerts: tuple[AlertView, ...]
    #: What is asked of the runs that listen to somebody.
    asked: dict[str, Control]


def read_now(reader: Reader, range: str) -> Now:
    """Everything on the page, in one call off the loop."""
    database = reader.database
    causes = read_causes(database, limit=20)
    running = read_job_page(database, running=True, limit=RUNNING)
    others = [line for line in read_job_page(database, limit=8).lines if not line.job.holder]
    return Now(
        at=datetime.fromtimestamp(database.now(), UTC),
        queues=reader.queues().queues,
        flows=read_queue_series(database),
        workers=reader.workers().workers,
        lines=(*running.lines, *others),
        more=running.more,
        series=read_series(database, range),
        hour=read_series(database, "1h"),
        causes=causes,
        times=read_death_times(database, causes[:5]),
        task_causes=read_task_causes(database, limit=10),
        alerts=reader.alerts(history=0).alerts,
        asked=read_controls(database, [line.job.id for line in running.lines]),
    )


def needs(now: Now) -> list[Need]:
    """What needs somebody, the worst first. Each says what is the matter, since when, and where to look."""
    seen = [*_lost(now), *_new_causes(now), *_stalled(now), *_queues(now)]
    covered = {key for need in seen for key in need.rules}
    lost = sum(need.look == "s-lost bad" for need in seen)
    found = [*seen[:lost], *_alerts(now, covered), *seen[lost:]]
    dead = sum(cause.dead for cause in now.causes) + sum(cause.dead for cause in now.task_causes)
    if dead and not any(need.word == "New error" for need in found):
        newest = max([*(one.last_seen for one in now.causes), *(one.last_seen for one in now.task_causes)])
        reasons = plural(len(now.causes) + len(now.task_causes), "reason")
        text = f"{plural(dead, 'item')} failed for good, for {reasons}; nobody retried them"
        found.append(Need("Dead letters", "s-dead bad", text, f"last {when(newest, now.at)}", "/dead", "See why"))
    open_ = {(alert.rule, alert.subject): alert for alert in now.alerts}
    return [need._replace(alert=next((open_[key] for key in need.rules if key in open_), need.alert)) for need in found]


def _alerts(now: Now, covered: set[tuple[str, str]]) -> list[Need]:
    """Open alerts, without what the page says by itself. A new cause it always does."""
    return [
        Need(
            alert.rule.replace("_", " ").capitalize(), "s-dead bad" if alert.severity == "critical" else "s-warn warn",
            alert.text.removesuffix("."), f"since {when(alert.opened_at, now.at)}", "/alerts", "See alerts", alert=alert,
        )
        for alert in now.alerts
        if alert.rule != "new_cause" and (alert.rule, alert.subject) not in covered and not alert.muted
    ]  # fmt: skip


def _lost(now: Now) -> list[Need]:
    found = []
    for line in now.lines:
        job, run = line.job, line.run
        if run and run.outcome == "lost" and job.status == "interrupted" and now.at - job.updated_at < REMEMBERED:
            left = job.total - job.done - job.dead
            text = f"{job.id}: its process on {run.host} died; {num(job.done)} items are safe, {num(left)} wait"
            since = f"since {when(job.updated_at, now.at)}"
            about = (("stalled_job", job.id),)
            found.append(Need("Run lost", "s-lost bad", text, since, _job(job), "Continue it", about))
    for worker in now.workers:
        if worker.state == "lost" and now.at - worker.seen_at < REMEMBERED:
            held = f" while running {worker.task}; another worker is given it" if worker.task else "; it ran nothing"
            text = f"{worker.name} on {worker.host} stopped answering{held}"
            since, path = f"since {when(worker.seen_at, now.at)}", f"/workers#{quote(worker.name, safe='')}"
            about = (("worker_lost", worker.name),)
            found.append(
                Need("Worker lost", "s-lost bad", text, since, path, f"See {worker.name}", about, worker=worker.name)
            )
    return found


def _new_causes(now: Now) -> list[Need]:
    found = []
    for cause in now.causes:
        if now.at - cause.first_seen < NEW and not isinstance(cause.job, Absent):
            text = f"{cause.type}: {plural(cause.dead, 'item')} of {cause.job} gave up"
            path = f"/jobs/{quote(cause.job, safe='')}/items?state=dead&cause={cause.no}"
            found.append(
                Need(
                    "New error",
                    "s-dead bad",
                    text,
                    f"since {when(cause.first_seen, now.at)}",
                    path,
                    f"See {plural(cause.dead, 'item')}",
                )
            )
    new = [one for one in now.task_causes if now.at - one.first_seen < NEW]
    if new:
        names = ", ".join(sorted({one.type for one in new})[:3])
        text = f"{names}: {plural(sum(one.dead for one in new), 'task')} of the queue failed for good"
        began = min(one.first_seen for one in new)
        found.append(Need("New error", "s-dead bad", text, f"since {when(began, now.at)}", "/dead#tasks", "See why"))
    return found[:5]


def _stalled(now: Now) -> list[Need]:
    found = []
    for line in now.lines:
        job, run = line.job, line.run
        quiet = now.at - max(job.updated_at, run.started_at if run else job.updated_at)
        asked = now.asked.get(job.id)
        if asked and asked.paused:
            left = plural(job.total - job.done - job.dead, "item")
            text = f"{job.id}: {asked.actor or 'somebody'} asked its run to pause; {left} wait"
            found.append(Need("Paused", "s-pause warn", text, "until resumed", _job(job), "Open it"))
        elif job.holder and job.total > job.done + job.dead and quiet > STALLED:
            text = f"{job.id}: nothing was finished for {duration(quiet.total_seconds())}, and its process lives"
            since = f"since {when(job.updated_at, now.at)}"
            about = (("stalled_job", job.id),)
            found.append(Need("Stalled", "s-warn warn", text, since, _job(job), "Open it", about))
    return found


def _queues(now: Now) -> list[Need]:
    found, looks = list[Need](), now.outlooks
    waiting = sum(queue.waiting for queue in now.queues if not queue.paused)
    if waiting and not now.alive:
        text = f"{plural(waiting, 'task')} wait and nobody works on them. Start one: headway worker"
        about = tuple((rule, queue.queue) for queue in now.queues for rule in ("backlog", "delay"))
        found.append(Need("No worker", "s-lost bad", text, "now", "/workers", "See workers", about))
    for queue in now.queues:
        look, path, link = looks[queue.queue], f"/queues/{queue.queue}", f"Open {queue.queue}"
        about = (("backlog", queue.queue), ("delay", queue.queue))
        if queue.paused:
            why = f", “{queue.reason}”" if queue.reason else ""
            text = (
                f"{queue.queue}: {plural(queue.waiting, 'task')} wait; paused by {queue.paused_by or 'somebody'}{why}"
            )
            until = f"until {when(queue.paused_until, now.at)}" if queue.paused_until else "until resumed"
            found.append(Need("Paused", "s-pause warn", text, until, path, link, about))
        elif look.kind == "stalled" and now.alive and (queue.oldest_wait or 0.0) >= LOOKED_AT:
            text = f"{queue.queue}: {plural(queue.waiting, 'task')} wait, and none was finished in the last minutes"
            found.append(Need("Stalled", "s-warn warn", text, "now", path, link, about))
        elif look.kind == "growing" and now.alive:
            text = f"{queue.queue}: more comes than is done; {plural(queue.waiting, 'task')} wait and it will not drain"
            found.append(Need("Backlog", "s-warn warn", text, "now", path, link, about))
    return found


def _job(job: Job) -> str:
    return f"/jobs/{quote(job.id, safe='')}"


def moving(hour: Series, at: datetime) -> float:
    """Items per second over the last five minutes that are over; of work that began after that, since it did."""
    past, now = [point.done for point in hour.points[:-1]], hour.points[-1].done
    if not any(past[-5:]):
        return now / max(1.0, at.timestamp() % 60)
    minutes = 5 if any(past[:-5]) else next(left for left in range(5, 0, -1) if past[-left])
    return sum(past[-minutes:]) / (60 * minutes)


def ticks(series: Series) -> list[tuple[float, str]]:
    """The time axis of a line from its first point to its last that is over: moments that people name, a quarter of an
    hour, six hours or a day apart, and none so near an end that its words would be cut."""
    first, length = series.points[0].minute, (len(series.points) - 2) * series.step
    apart = 15 if length <= 90 else 360 if length <= 2000 else 1440
    form = "%a %d" if apart == 1440 else "%H:%M"
    moments = range(-(-first // apart) * apart, first + length + 1, apart)
    places = [(100 * (minute - first) / max(1, length), minute) for minute in moments]
    return [(at, f"{datetime.fromtimestamp(minute * 60, UTC):{form}}") for at, minute in places if 4 < at <= 100]


async def overview(pages: Pages, request: Request) -> Response:
    range = request.query_params.get("range", "1h")
    range = range if range in RANGES else "1h"
    now = await pages.site.view(read_now, pages.site.reader, range)
    empty = not now.lines and not any((now.workers, now.task_causes, sum(q.waiting + q.completed for q in now.queues)))
    if empty:
        return pages.answer(request, "empty.html", now=now.at, refresh=5)
    running = [line for line in now.lines if line.job.holder]
    tried, all_ = now.hour.done + now.hour.failed, needs(now)
    return pages.answer(
        request, "overview.html", now=now.at, refresh=15, found=now, needs=all_, running=running,
        open=sum(not need.seen for need in all_),
        rate=moving(now.hour, now.at), success=100 * now.hour.done / tried if tried else None,
        ready=max((line.forecast.late for line in running if line.forecast), default=None)
        if all(line.forecast for line in running) else None,
        others=[line for line in now.lines if not line.job.holder], ticks=ticks(now.series), range=range, ranges=tuple(RANGES),
        times=now.times, series=now.series, waiting=sum(queue.waiting for queue in now.queues),
        late=max((queue.oldest_wait for queue in now.queues if queue.oldest_wait is not None), default=None),
        queued=bool(now.workers) or any(any((*queue[1:4], *queue[5:9])) for queue in now.queues),
    )  # fmt: skip


async def find(pages: Pages, request: Request) -> Response:
    """A job by its id, an item by its key, a task by its id: whichever there is."""
    text = request.query_params.get("q", "").strip()[:512]
    site = pages.site

    def look(reader: Reader) -> str | None:
        if not text:
            return "/jobs"
        try:
            reader.ledger.job(text)
            return f"/jobs/{quote(text, safe='')}"
        except HeadwayError:
            pass  # no job's id, or not even one that could be one
        if found := find_item(reader.database, text):
            return item_path(*found)
        try:
            return f"/tasks/{quote(reader.queue.get(text).id, safe='')}"
        except HeadwayError:
            return None

    path = await site.view(look, site.reader)
    if path is None:
        path = f"/jobs?q={quote(text, safe='')}"
    return RedirectResponse(site.url(request, path), 303)


PAGES = {"/": overview, "/find": find}
