"""Jobs, one job with its picture, its items, one item with its history."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
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
from headway.views.jobs.items import Items, ItemSheet, read_item, read_items
from headway.views.jobs.job import Cause, JobSheet, Run, cause_view
from headway.views.jobs.listing import Job, find_job, job_view
from headway.views.jobs.map import Cell, ItemMap, read_map
from headway.views.jobs.series import Series
from headway.views.overview import JobLine, JobPage, Times, read_death_times, read_job_detail, read_job_page
from headway.views.reading import Reader
from headway.web.pages import draw
from headway.web.pages.render import Pages, clock, num

STATES = ("pending", "processing", "retrying", "done", "dead")
STATUSES = ("processing", "interrupted", "needs a run", "pending", "completed")
#: Causes to choose from.
CHOICES = 50
#: Rows of the map as a table.
TABLE_ROWS = 8


class Found(NamedTuple):
    """All that a job's page shows."""

    now: datetime
    sheet: JobSheet
    line: JobLine
    series: Series
    map: ItemMap | None
    #: What is asked of the run that goes on; None if none does, or if it listens to nobody.
    asked: Control | None
    times: Times | None


def read_job(reader: Reader, id: str) -> Found:
    job = find_job(reader.ledger, id)
    now, sheet, line, series = read_job_detail(job)
    runs = sheet.runs
    causes = [cause._replace(job=id) for cause in sheet.causes if cause.dead][:6]
    controlled = sheet.job.holder is not None and runs and runs[-1].settings.get("mode") != "loop"
    return Found(
        now, sheet, line, series, read_map(job, since=runs[-1].started_at.timestamp() if runs else None),
        job.asked(runs[-1].no) if controlled else None, read_death_times(reader.database, causes),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Pictures of a job


def job_timeline(found: Found) -> Markup | None:
    """All runs over one axis; None for a job that took no time worth an axis."""
    series, runs, line = found.series, found.sheet.runs, found.line
    if len(series.points) < 3 or not runs:
        return None
    now = found.now.timestamp() if line.job.holder else None
    last = runs[-1].started_at.timestamp()
    width = series.step * 60
    start = runs[0].started_at.timestamp()
    end = max(series.points[-1].minute * 60 + width, (now or 0))
    forecast = None
    if now is not None and line.forecast is not None:
        early, likely, late = (now + seconds for seconds in line.forecast)
        if likely - now < 1.5 * (now - start):  # a forecast that is longer than the past would push it aside
            forecast = (early, likely, late, f"~{roughly(line.forecast.likely)}")
            end = max(end, late)
    pad = (end - start) * 0.01
    columns = []
    for point in series.points:
        began, over = max(point.minute * 60.0, start), point.minute * 60.0 + width
        count: float = point.done
        if (
            now is not None and over > now
        ):  # it is not over: as tall as it will be if it goes on so, and as wide as it is
            if now - began < width / 4:
                continue
            count, over = count * width / (now - began), now
        columns.append((began, over, round(count), "kept" if over <= last else "done"))
    events: list[tuple[float, str, str]] = []
    gaps: list[tuple[float, float, str]] = []
    for place, run in enumerate(runs):
        began = run.started_at.timestamp()
        events.append((began, f"{clock(run.started_at)} {'resumed' if place else 'started'}", _workers(run)))
        following = runs[place + 1].started_at.timestamp() if place + 1 < len(runs) else None
        stopped = _stopped(run, series, following)
        if following is not None and following - stopped > width:
            gaps.append((stopped, following, f"{duration(following - stopped)} down"))
        if run.outcome not in (None, "finished"):
            word = "killed" if run.outcome == "lost" else run.outcome or ""
            events.append((stopped, f"{clock(datetime.fromtimestamp(stopped, UTC))} {word}", "nothing lost"))
        elif run.outcome == "finished" and following is None:
            events.append((stopped, f"{clock(datetime.fromtimestamp(stopped, UTC))} finished", ""))
    if forecast is not None:
        events.append((forecast[1], f"{forecast[3]} ready", f"{_hm(forecast[0])} to {_hm(forecast[2])}"))
    return draw.timeline(
        draw.Span(start - pad, end + pad), columns, gaps, sorted(events), now=now,
        now_text=f"now, {clock(found.now)} UTC", forecast=forecast,
        per="per min" if series.step == 1 else f"per {series.step} min",
        label=f"{plural(len(runs), 'run')}: {num(series.done)} items done, {num(series.failed)} attempts failed",
    )  # fmt: skip


def _hm(seconds: float) -> str:
    return clock(datetime.fromtimestamp(seconds, UTC))


def _workers(run: Run) -> str:
    count = run.settings.get("workers")
    return plural(count, "worker") if type(count) is int else run.host


def _stopped(run: Run, series: Series, following: float | None) -> float:
    """When a run stopped. One that was killed just now did not write it down: then after the last minute it did something."""
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
    """What happened to a job, in one sentence."""
    lost = [run for run in runs[:-1] if run.outcome == "lost"]
    if len(runs) == 1 and runs[0].outcome == "lost":
        return "Its process was killed; what was done is kept."
    if len(lost) == 1:
        return f"It was killed once, in run {lost[0].no}, and went on where it stood."
    if lost:
        return f"It was killed {len(lost)} times and went on where it stood each time."
    if len(runs) > 1:
        return f"It was started {len(runs)} times and went on where it stood."
    return ""


def map_sentence(map: ItemMap) -> tuple[str, int, int] | None:
    """Where the dead ones lie, if most lie together: (how many of how many, first index, last index)."""
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
    """The map as a table: (first index, last index, what is in between), a few rows, those with something odd."""
    step = -(-map.cells // TABLE_ROWS)
    rows = []
    for first in range(0, map.cells, step):
        inside = [map.marks[cell] for cell in range(first, min(map.cells, first + step)) if cell in map.marks]
        sums = Cell(*(sum(values) for values in zip(*inside, strict=True))) if inside else Cell(0, 0, 0)
        if any(sums):
            rows.append((first * map.size, min(map.cells, first + step) * map.size - 1, sums))
    return rows


def map_data(map: ItemMap) -> Markup:
    """What the script needs to say what is in a cell: numbers and names of ours, so safe between single quotes as it is."""
    marks = {cell: list(mark) for cell, mark in map.marks.items()}
    found = {"size": map.size, "cells": map.cells, "bases": map.bases, "marks": marks}
    return Markup(json.dumps(found, separators=(",", ":")))  # noqa: S704 - see above


# ---------------------------------------------------------------------------------------------------------------------
# Pages


async def jobs(pages: Pages, request: Request) -> Response:
    asked = request.query_params
    status = asked.get("state") or None
    if status is not None and status not in STATUSES:
        raise InvalidInput(f"{status[:40]!r} is no state of a job.", hint=f"Use one of: {', '.join(STATUSES)}.")
    text, after = asked.get("q", "").strip()[:100], asked.get("after") or None
    by_creation = after is not None or asked.get("order") == "created"

    def look(reader: Reader) -> JobPage:
        return read_job_page(reader.database, status=status, text=text, by_creation=by_creation, after=after)

    page = await pages.site.view(look, pages.site.reader)
    return pages.answer(
        request, "jobs.html", refresh=15, page=page, state=status, text=text, after=after, by_creation=by_creation,
        statuses=STATUSES,
    )  # fmt: skip


async def job(pages: Pages, request: Request) -> Response:
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
        times=found.times, causes=[cause._replace(job=found.line.job.id) for cause in found.sheet.causes if cause.dead],
    )  # fmt: skip


def whole(text: str | None, what: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidInput(f"{text[:40]!r} is no {what}.", hint="Use a whole number from 0.")
    return int(text)


async def items(pages: Pages, request: Request) -> Response:
    asked, id = request.query_params, request.path_params["id"]
    if key := asked.get("key", "").strip():
        found = await pages.site.view(lambda: find_job(pages.site.reader.ledger, id).item(key))
        return RedirectResponse(pages.site.url(request, item_path(id, found.key, found.idx)), 303)
    state = asked.get("state") or None
    if state is not None and state not in STATES:
        raise InvalidInput(f"{state[:40]!r} is no state of an item.", hint=f"Use one of: {', '.join(STATES)}.")
    cause = whole(asked.get("cause"), "number of a cause")
    first = whole(asked.get("from"), "index") or 0

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
    """What a page of items says of their job. Not its whole sheet: how long a million items took takes longer to read than
    one of them."""
    return job_view(job.info()), [cause_view(cause) for cause in job.causes()]


def item_path(job: str, key: str | None, idx: int) -> str:
    """Where an item is shown: under its key, unless a browser would take that for a way up."""
    known = key is not None and key not in ("", ".", "..")
    return f"/jobs/{quote(job, safe='')}/" + (f"items/{quote(str(key), safe='')}" if known else f"item/{idx}")


async def item(pages: Pages, request: Request) -> Response:
    """By its key or its index; under ``item/`` by its index and nothing else, for a key may be the index of another."""
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
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= 20_000 else f"{text[:20_000]}\n… {len(text):,} characters in all"


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen ")


class Frame(NamedTuple):
    """One place of a traceback."""

    place: str
    code: str


def frames(traceback: str | None) -> tuple[list[Frame], list[Frame]]:
    """(own frames, frames of libraries), each with the innermost first. What cannot be read is simply not there."""
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
