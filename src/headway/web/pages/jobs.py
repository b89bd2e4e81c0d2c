"""The pages Jobs, Job, Items and Item."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headway import ledger
from headway.core.text import duration, plural, roughly
from headway.errors import InvalidInput
from headway.ledger.control import Control
from headway.ledger.values import note_of
from headway.views.history import read_marks
from headway.views.jobs.items import Items, ItemSheet, read_item, read_items
from headway.views.jobs.job import Cause, JobSheet, Run, cause_view
from headway.views.jobs.listing import Job, find_job, job_view
from headway.views.jobs.map import Cell, ItemMap, read_map
from headway.views.jobs.series import Series
from headway.views.overview import JobLine, JobPage, Times, count_jobs, read_death_times, read_job_detail, read_job_page
from headway.views.reading import Reader
from headway.web.pages import draw
from headway.web.pages.marks import ChartMarks, marks_for
from headway.web.pages.render import Pages, num

STATES = ("pending", "processing", "retrying", "done", "dead")
STATUSES = ("processing", "paused", "interrupted", "needs a run", "pending", "completed")
#: Maximum causes in the filter.
CHOICES = 50
#: Maximum rows of the map as a table.
TABLE_ROWS = 8


class Found(NamedTuple):
    """The content of a job's page."""

    now: datetime
    sheet: JobSheet
    line: JobLine
    series: Series
    map: ItemMap | None
    #: The requests to the current run (pause, stop, scale); None without a run that can be controlled.
    asked: Control | None
    times: Times | None
    marks: ChartMarks


def read_job(reader: Reader, id: str) -> Found:
    """Read the content of a job's page."""
    job = find_job(reader.ledger, id)
    now, sheet, line, series = read_job_detail(job)
    runs = sheet.runs
    causes = [cause._replace(job=id) for cause in sheet.causes if cause.dead][:6]
    controlled = sheet.job.holder is not None and runs and runs[-1].settings.get("mode") != "loop"
    return Found(
        now, sheet, line, series, read_map(job, since=runs[-1].started_at.timestamp() if runs else None),
        job.asked(runs[-1].no) if controlled else None, read_death_times(reader.database, causes),
        marks_for(read_marks(reader.database, series.points[0].minute * 60.0).marks, job=id),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Timeline and item map


def job_timeline(found: Found) -> Markup | None:
    """Draw all runs over one time axis; None for a job of less than three intervals."""
    series, runs, line = found.series, found.sheet.runs, found.line
    if len(series.points) < 3 or not runs:
        return None
    now = found.now.timestamp() if line.job.holder else None
    last = runs[-1].started_at.timestamp()
    start = runs[0].started_at.timestamp()
    end = max((series.points[-1].minute + series.step) * 60, (now or 0))
    forecast = None
    if now is not None and line.forecast is not None:
        early, likely, late = (now + seconds for seconds in line.forecast)
        if likely - now < 1.5 * (now - start):  # a longer forecast would leave too little space for the past
            forecast = draw.Forecast(early, likely, late)
            end = max(end, late)
    events, gaps = _events(runs, series)
    if forecast is not None:
        text = Markup("~{} finish").format(roughly(forecast.likely - (now or 0.0)))
        events.append(
            (forecast.likely, text, Markup("{} to {}").format(*map(draw.stamp, (forecast.early, forecast.late))))
        )
    pad = (end - start) * 0.01
    return draw.Timeline(
        draw.Span(start - pad, end + pad), _columns(series, start, last, now), gaps, sorted(events), now=now,
        forecast=forecast, per="per min" if series.step == 1 else f"per {series.step} min",
        label=f"{plural(len(runs), 'run')}: {num(series.done)} items done, {num(series.failed)} attempts failed",
        marks=[at for at in found.marks.times if at.timestamp() <= end],
    ).draw()  # fmt: skip


def _columns(series: Series, start: float, last: float, now: float | None) -> list[tuple[float, float, int, str]]:
    """Return the columns of the timeline; those before the last run are shown as kept.

    The count of the current, incomplete interval is extrapolated.
    """
    columns, width = [], series.step * 60
    for point in series.points:
        began, over = max(point.minute * 60.0, start), point.minute * 60.0 + width
        count: float = point.done
        if now is not None and over > now:
            if now - began < width / 4:
                continue  # too short to extrapolate
            count, over = count * width / (now - began), now
        columns.append((began, over, round(count), "kept" if over <= last else "done"))
    return columns


def _events(runs: Sequence[Run], series: Series) -> tuple[list[tuple[float, str, str]], list[tuple[float, float, str]]]:
    """Return the starts and ends of runs, and the gaps between runs."""
    events: list[tuple[float, str, str]] = []
    gaps: list[tuple[float, float, str]] = []
    for place, run in enumerate(runs):
        began = run.started_at.timestamp()
        events.append(
            (began, Markup("{} {}").format(draw.stamp(began), "resumed" if place else "started"), _workers(run))
        )
        following = runs[place + 1].started_at.timestamp() if place + 1 < len(runs) else None
        stopped = _stopped(run, series, following)
        if following is not None and following - stopped > series.step * 60:
            gaps.append((stopped, following, f"{duration(following - stopped)} down"))
        if run.outcome not in (None, "finished"):
            word = "killed" if run.outcome == "lost" else run.outcome or ""
            events.append((stopped, Markup("{} {}").format(draw.stamp(stopped), word), "nothing lost"))
        elif run.outcome == "finished" and following is None:
            events.append((stopped, Markup("{} finished").format(draw.stamp(stopped)), ""))
    return events, gaps


def _workers(run: Run) -> str:
    count = run.settings.get("workers")
    return plural(count, "worker") if type(count) is int else run.host


def _stopped(run: Run, series: Series, following: float | None) -> float:
    """Return the end of a run. A killed run did not record it; then it is the end of its last active minute."""
    if run.ended_at is not None:
        return run.ended_at.timestamp()
    bound = following if following is not None else float("inf")
    began = run.started_at.timestamp()
    active = [
        p.minute * 60
        for p in series.points
        if p.done + p.failed and began - 60 <= (p.minute + series.step) * 60 <= bound + 60
    ]
    return min(bound, max(active, default=began) + 60)


def story(runs: Sequence[Run]) -> str:
    """Return the history of a job in one sentence; empty after a single undisturbed run."""
    lost = [run for run in runs[:-1] if run.outcome == "lost"]
    if len(runs) == 1 and runs[0].outcome == "lost":
        return "Killed; completed items are kept."
    if len(lost) == 1:
        return f"Killed once (run {lost[0].no}); resumed without loss."
    if lost:
        return f"Killed {len(lost)} times; resumed without loss each time."
    if len(runs) > 1:
        return f"Started {len(runs)} times; each run resumed where the previous one stopped."
    return ""


def map_sentence(map: ItemMap) -> tuple[str, int, int] | None:
    """Return where most dead items are, if they are close together: (count of total, first index, last index)."""
    dead = sorted((cell, mark.dead) for cell, mark in map.marks.items() if mark.dead)
    total = sum(count for _, count in dead)
    window = max(2, map.cells // 25)
    if total < 5 or map.cells < 4 * window:
        return None
    best, first, last, sum_, left = 0, 0, 0, 0, 0
    for cell, count in dead:
        sum_ += count
        while cell - dead[left][0] >= window:
            sum_ -= dead[left][1]
            left += 1
        if sum_ > best:
            best, first, last = sum_, dead[left][0], cell
    if best < 5 or best < total / 2:
        return None
    return f"{num(best)} of the {num(total)} dead", first * map.size, (last + 1) * map.size - 1


def map_rows(map: ItemMap) -> list[tuple[int, int, Cell]]:
    """Return the map as a table of up to `TABLE_ROWS` ranges: (first index, last index, counts), without empty ranges."""
    step = -(-map.cells // TABLE_ROWS)
    rows = []
    for first in range(0, map.cells, step):
        inside = [map.marks[cell] for cell in range(first, min(map.cells, first + step)) if cell in map.marks]
        sums = Cell(*(sum(values) for values in zip(*inside, strict=True))) if inside else Cell(0, 0, 0)
        if any(sums):
            rows.append((first * map.size, min(map.cells, first + step) * map.size - 1, sums))
    return rows


def map_data(map: ItemMap) -> Markup:
    """Return the map's data for the script as JSON. It contains no user input and is safe in a quoted attribute."""
    marks = {cell: list(mark) for cell, mark in map.marks.items()}
    found = {"size": map.size, "cells": map.cells, "bases": map.bases, "marks": marks}
    return Markup(json.dumps(found, separators=(",", ":")))  # noqa: S704 - see above


# ---------------------------------------------------------------------------------------------------------------------
# Pages


async def jobs(pages: Pages, request: Request) -> Response:
    """Answer ``/jobs``, filtered by name and state."""
    params = request.query_params
    status = params.get("state") or None
    if status is not None and status not in STATUSES:
        raise InvalidInput(f"state must be {', '.join(STATUSES)} (got {status[:40]!r}).")
    text, after = params.get("q", "").strip()[:100], params.get("after") or None
    by_creation = after is not None or params.get("order") == "created"

    def look(reader: Reader) -> tuple[JobPage, dict[str, int]]:
        page = read_job_page(reader.database, status=status, text=text, by_creation=by_creation, after=after)
        return page, count_jobs(reader.database)

    page, counts = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "jobs.html", refresh=15, page=page, state=status, text=text, after=after, by_creation=by_creation,
        statuses=STATUSES, counts=counts,
    )  # fmt: skip


async def job(pages: Pages, request: Request) -> Response:
    """Answer ``/jobs/ID``."""
    found = await pages.site.view(read_job, pages.site.reader, request.path_params["id"])
    map = found.map
    pictures = {}
    if map is not None:
        label = f"Map of {num(found.line.job.total)} items, {num(map.size)} to a cell"
        marks = {
            "retry": [cell for cell, mark in map.marks.items() if mark.retrying],
            "run": [cell for cell, mark in map.marks.items() if mark.processing],
            "dead": [cell for cell, mark in map.marks.items() if mark.dead],
        }
        for name, columns, cell in (("wide", 100, 15), ("nar", 50, 12)):
            pictures[name] = draw.item_map(
                map.bases, marks, columns=columns, cell=cell, cls=name, name=name, label=label
            )
    return pages.answer(
        request, "job.html", now=found.now, refresh=10, line=found.line, sheet=found.sheet, series=found.series, map=map,
        pictures=pictures, asked=found.asked, timeline=job_timeline(found), story=story(found.sheet.runs),
        sentence=map_sentence(map) if map else None, rows=map_rows(map) if map else [], data=map_data(map) if map else "",
        times=found.times, marks=found.marks, last=found.sheet.runs[-1] if found.sheet.runs else None,
        causes=[cause._replace(job=found.line.job.id) for cause in found.sheet.causes if cause.dead],
    )  # fmt: skip


def whole(text: str | None, what: str) -> int | None:
    """Parse a query parameter; None if it is empty. Raises `InvalidInput` unless it is a whole number."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidInput(f"{what} must be a whole number from 0 (got {text[:40]!r}).")
    return int(text)


async def items(pages: Pages, request: Request) -> Response:
    """Answer ``/jobs/ID/items``, filtered by state, cause and index. With ``key`` it redirects to that item."""
    params, id = request.query_params, request.path_params["id"]
    if key := params.get("key", "").strip():
        found = await pages.site.view(lambda: find_job(pages.site.reader.ledger, id).item(key))
        return RedirectResponse(pages.site.url(request, item_path(id, found.key, found.idx)), 303)
    state = params.get("state") or None
    if state is not None and state not in STATES:
        raise InvalidInput(f"state must be {', '.join(STATES)} (got {state[:40]!r}).")
    cause = whole(params.get("cause"), "cause")
    first = whole(params.get("from"), "from") or 0

    def look(reader: Reader) -> tuple[Items, Job, list[Cause], int]:
        one = find_job(reader.ledger, id)
        found = read_items(one, status=state, cause=cause, after=first - 1)
        return found, *_around(one), one.progress().running

    page, job, causes, running = await pages.site.view(look, pages.site.reader)
    chosen = next((one for one in causes if one.no == cause), None)
    return pages.answer(
        request, "items.html", page=page, job=job, running=running, state=state, cause=chosen, states=STATES,
        first=first, number=cause, causes=sorted(causes, key=lambda one: one.no != cause)[:CHOICES],
    )  # fmt: skip


def _around(job: ledger.Job) -> tuple[Job, list[Cause]]:
    """Read the job and its causes, without the durations, which take long to read for a million items."""
    return job_view(job.info()), [cause_view(cause) for cause in job.causes()]


def item_path(job: str, key: str | None, idx: int) -> str:
    """Return the path of an item: by key, unless browsers would treat the key as a relative path."""
    known = key is not None and key not in ("", ".", "..")
    return f"/jobs/{quote(job, safe='')}/" + (f"items/{quote(str(key), safe='')}" if known else f"item/{idx}")


async def item(pages: Pages, request: Request) -> Response:
    """Answer ``items/KEY`` by key or index, and ``item/INDEX`` by index only, because a key may equal another's index."""
    id, name = request.path_params["id"], request.path_params["key"]
    payload = pages.site.user(request).may("payload")

    def look(reader: Reader) -> tuple[ItemSheet, Job, list[Cause]]:
        one = find_job(reader.ledger, id)
        return read_item(one, name, payload=payload), *_around(one)

    found, job, causes = await pages.site.view(look, pages.site.reader)
    attempts = [(attempt, *frames(attempt.traceback)) for attempt in reversed(found.attempts)]
    return pages.answer(
        request,
        "item.html",
        found=found,
        job=job,
        attempts=attempts,
        causes={cause.no: cause for cause in causes},
        payload=payload,
        pretty=pretty,
        note_of=note_of,
    )


def pretty(value: Any) -> str:
    """Format a value as indented JSON of at most 20,000 characters."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= 20_000 else f"{text[:20_000]}\n… {len(text):,} characters in total"


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen ")


class Frame(NamedTuple):
    """One frame of a traceback."""

    place: str
    code: str


def frames(traceback: str | None) -> tuple[list[Frame], list[Frame]]:
    """Parse a traceback into (own frames, library frames), innermost first. Unparsable lines are skipped."""
    own: list[Frame] = []
    library: list[Frame] = []
    lines = (traceback or "").splitlines()
    for place, line in enumerate(lines):
        if found := _FRAME.match(line):
            code = lines[place + 1].strip() if place + 1 < len(lines) and lines[place + 1].startswith("    ") else ""
            short = "/".join(found["file"].split("/")[-2:])
            (library if _LIBRARY.search(found["file"]) else own).append(
                Frame(f"{short}:{found['line']} in {found['name']}", code)
            )
    return own[::-1], library[::-1]


PAGES = {
    "/jobs": jobs, "/jobs/{id}": job, "/jobs/{id}/items": items, "/jobs/{id}/item/{key:int}": item,
    "/jobs/{id}/items/{key:path}": item,
}  # fmt: skip
