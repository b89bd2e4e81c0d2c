"""``jobs``, ``runs``, ``show`` and ``status``: jobs and their progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import (
    clock,
    job_argument,
    limit_option,
    open_reader,
    optional_job_argument,
    put,
    put_json,
    put_table,
    table,
    terminal_columns,
    with_database,
    wrapped,
)
from headway.core.text import cut, duration, pace, plural, printable, roughly, took
from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.views.jobs import listing as views
    from headway.views.jobs.durations import Durations, SlowItem
    from headway.views.jobs.job import JobSheet, Run

#: Seconds between two updates of --watch.
WATCH_SECONDS = 1.0
#: Minimum width of a bar, in cells.
SHORTEST_BAR = 10
#: Maximum runs and causes shown by ``show``.
SHEET_ROWS = 10

watch_option = click.option("--watch", "-w", is_flag=True, help="Update every second, on a terminal.")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Include jobs archived by a fresh start.")
@limit_option(200, "How many; --json has all.")
@watch_option
@json_option
@database_option
def jobs(database: str | None, *, as_json: bool, everything: bool, watch: bool, limit: int = 200) -> None:
    """List the jobs, most recently changed first."""
    with open_reader(database) as reader:
        if watch:
            _watch(lambda: (_job_table(reader.jobs(archived=everything).jobs[:limit]), False), as_json=as_json)
            return
        found = reader.jobs(archived=everything)
        if as_json:
            put_json(found)
        elif found.jobs:
            for line in _job_table(found.jobs[:limit]):
                put(line)
            if len(found.jobs) > limit:
                more = with_database(f"headway jobs --limit {len(found.jobs)}", database)
                say(f"{plural(len(found.jobs) - limit, 'more job')}:  {more}")
        else:
            say(typed("There are no jobs yet. Start one:  headway run module:function --items items.jsonl"))


def _job_table(found: Sequence[views.Job]) -> list[str]:
    rows = [
        [
            job.id,
            job.status,
            f"{job.done:,}/{job.total:,}",
            f"{job.percent:.1f}%",
            f"{job.retrying:,}",
            f"{job.dead:,}",
            _ago(job.updated_at),
            job.function,
        ]
        for job in found
    ]
    heads = ["JOB", "STATUS", "DONE", "", "RETRYING", "DEAD", "CHANGED", "FUNCTION"]
    return table(
        heads,
        rows,
        right=("DONE", "", "RETRYING", "DEAD", "CHANGED"),
        drop=("FUNCTION", "CHANGED", "RETRYING", "", "STATUS"),
        columns=terminal_columns(),
    )


def _ago(at: datetime) -> str:
    seconds = (datetime.now(UTC) - at).total_seconds()
    return "now" if seconds < 2 else f"{duration(int(seconds))} ago"


@click.command()
@job_argument
@limit_option(50, "How many, the last ones; --json has all.")
@json_option
@database_option
def runs(job: str, database: str | None, *, as_json: bool, limit: int) -> None:
    """List the runs of a job: every start and resume, and how it ended."""
    with open_reader(database) as reader:
        found = reader.runs(job)
    if as_json:
        put_json(found)
    elif found.runs:
        if len(found.runs) > limit:
            more = with_database(f"headway runs {job} --limit {len(found.runs)}", database)
            say(f"{plural(len(found.runs) - limit, 'earlier run')}:  {more}")
        heads, rows = _run_rows(found.runs[-limit:])
        put_table(heads, rows, right=_RUN_NUMBERS, whole=_RUN_WHOLE, drop=_RUN_DROP)
    else:
        say(f"Job {job} has not been run by headway run or headway.map.")


_RUN_NUMBERS = ("RUN", "KEPT", "TOOK")
_RUN_WHOLE = ("STARTED", "OUTCOME")
_RUN_DROP = ("WHERE", "KEPT", "TOOK")


def _run_rows(found: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    now = datetime.now(UTC)
    rows = [
        [
            str(run.no),
            clock(run.started_at),
            duration(max(0.0, ((run.ended_at or now) - run.started_at).total_seconds())),
            run.outcome or "running",
            f"{run.kept:,}",
            f"process {run.pid} on {run.host}",
        ]
        for run in found
    ]
    return ["RUN", "STARTED", "TOOK", "OUTCOME", "KEPT", "WHERE"], rows


@click.command()
@job_argument
@watch_option
@json_option
@database_option
def show(job: str, database: str | None, *, as_json: bool, watch: bool) -> None:
    """Show one job: counts, runs, causes of failure, its process, and the command to continue."""
    with open_reader(database) as reader:
        found = reader.job(job)
        if watch:
            _watch(lambda: _lines_until_finished(reader.job(job), database), as_json=as_json)
        elif as_json:
            put_json(found)
        else:
            for line in _lines(found, database):
                put(line)


def _lines(sheet: JobSheet, database: str | None) -> list[str]:
    """Return the lines of ``show``."""
    job, columns = sheet.job, terminal_columns() or 120
    kept = f" ({sheet.kept:,} kept)" if sheet.kept else ""
    words = [
        f"done {job.done:,}{kept},",
        f"pending {job.pending:,},",
        f"retrying {job.retrying:,},",
        f"dead {job.dead:,};",
    ]
    words += f"{job.failures:,} failed runs of items".split()
    origin = f"{printable(job.function) or 'a program'} over {printable(job.source) or 'its own items'}"
    lines = [f"Job {job.id}: {_state(sheet)}", cut(f"  {origin}", columns), *_bar_lines(sheet, columns)]
    lines += wrapped(words, columns=columns)
    if sheet.durations is not None:
        lines += wrapped(_durations(sheet.durations, job.done), columns=columns)
    if sheet.note:
        lines += wrapped(printable(sheet.note).split(), columns=columns)
    if sheet.runs:
        heads, rows = _run_rows(sheet.runs[-SHEET_ROWS:])
        lines += [
            "",
            *_indented(table(heads, rows, right=_RUN_NUMBERS, whole=_RUN_WHOLE, drop=_RUN_DROP, columns=columns - 2)),
        ]
    causes = [cause for cause in sheet.causes if cause.dead]
    if causes:
        lines += ["", f"What is dead, by cause ({with_database(f'headway dead show {job.id}', database)}):"]
        rows = [[str(cause.no), f"{cause.dead:,}", cause.type, cause.message] for cause in causes[:SHEET_ROWS]]
        heads = ["CAUSE", "DEAD", "TYPE", "MESSAGE"]
        lines += _indented(table(heads, rows, right=("CAUSE", "DEAD"), columns=columns - 2))
        if len(causes) > SHEET_ROWS:
            lines.append(f"  ... and {len(causes) - SHEET_ROWS} more causes")
    lines += _waits(sheet)
    advice = _advice(job, database)
    if advice:
        lines += ["", advice]
    return lines


def _waits(sheet: JobSheet) -> list[str]:
    """Return until when the job or some of its items wait, and why (RetryLater)."""
    lines = []
    if sheet.waits_until is not None:
        why = f": {printable(sheet.wait_reason)}" if sheet.wait_reason else ""
        lines.append(f"  starts nothing until {clock(sheet.waits_until)}{why}")
    if sheet.postponed and sheet.postponed_until is not None:
        why = f": {printable(sheet.postponed_reason)}" if sheet.postponed_reason else ""
        lines.append(
            f"  {plural(sheet.postponed, 'item')} postponed, the first until {clock(sheet.postponed_until)}{why}"
        )
    return lines


def _durations(found: Durations, done: int) -> list[str]:
    """Return the durations of items as phrases that are not broken across lines."""
    looked = f" (of {found.looked_at:,} looked at)" if found.looked_at < done else ""
    slowest = [f"{_name(item)} {took(item.seconds)}" for item in found.slowest[:3]]
    words = ["an item took", f"{took(found.p50)} (p50),", f"{took(found.p95)} (p95){looked};", "slowest:"]
    return words + [f"{item}," for item in slowest[:-1]] + slowest[-1:]


def _name(item: SlowItem) -> str:
    return f"item {item.idx}" if item.key is None else cut(printable(item.key), 40)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _bar_lines(sheet: JobSheet, columns: int) -> list[str]:
    """Return the bar with the counts. The speed is beside it, or below on a narrow terminal."""
    from headway.run.display.display import bar

    job, total = sheet.job, sheet.job.total or 1
    ends = f"  {job.percent:.1f}% ", f" {job.done:,}/{job.total:,}"
    room = min(40, columns - len(ends[0]) - len(ends[1]))
    ascii_only = (getattr(sys.stdout, "encoding", None) or "").lower() not in ("utf-8", "utf8")
    shares = sheet.kept / total, (job.done - sheet.kept) / total
    strokes = bar(*shares, room, ascii_only=ascii_only) if room >= SHORTEST_BAR else ""
    line = f"{ends[0]}{strokes}{ends[1]}"
    left = _left(sheet)
    speed = "   ".join(part for part in (pace(sheet.rate), left) if part)
    if not speed:
        return [line]
    return [f"{line}   {speed}"] if len(line) + 3 + len(speed) <= columns else [line, f"  {speed}"]


def _left(sheet: JobSheet) -> str:
    """Return ``~18 min left (15 to 25 min)``, or an empty text without a forecast."""
    if sheet.eta_seconds is None:
        return ""
    likely = f"~{roughly(sheet.eta_seconds)} left"
    if sheet.eta_low_seconds is None or sheet.eta_high_seconds is None:  # an older server sends no range
        return likely
    low, high = roughly(sheet.eta_low_seconds), roughly(sheet.eta_high_seconds)
    (number, _, unit), (_, _, other) = low.partition(" "), high.partition(" ")
    return likely if low == high else f"{likely} ({number if unit == other else low} to {high})"


def _state(sheet: JobSheet) -> str:
    job = sheet.job
    if job.holder is not None:
        if sheet.paused_by is not None:
            return f"paused by {printable(sheet.paused_by)}; process {job.holder.pid} on {job.holder.host} waits"
        if sheet.runs and sheet.runs[-1].settings.get("fleet"):
            return f"{job.status} by a fleet, started by process {job.holder.pid} on {job.holder.host}"
        return f"{job.status} by process {job.holder.pid} on {job.holder.host}"
    if job.finished_at is not None:
        dead = f" with {plural(job.dead, 'dead letter')}" if job.dead else ""
        return f"{job.status}{dead} {clock(job.finished_at)}"
    if sheet.runs and sheet.runs[-1].ended_at is None:
        last = sheet.runs[-1]
        return f"{job.status}; the process {last.pid} on {last.host} that ran it is gone, or stands still"
    return job.status


def _advice(job: views.Job, database: str | None) -> str:
    """Return the command to run next, or an empty text."""
    if job.holder is not None:
        return ""
    if job.pending or job.retrying:
        return f"Continue:  {job.command}" if job.command else ""
    if job.dead:
        return f"Retry what is dead:  {with_database(f'headway retry {job.id}', database)}"
    return ""


def _lines_until_finished(sheet: JobSheet, database: str | None) -> tuple[list[str], bool]:
    return _lines(sheet, database), sheet.job.holder is None and sheet.job.finished_at is not None


@click.command()
@optional_job_argument
@watch_option
@json_option
@database_option
@click.pass_context
def status(ctx: click.Context, job: str | None, database: str | None, *, as_json: bool, watch: bool) -> None:
    """Show the same as `headway jobs`, or with JOB the same as `headway show JOB`."""
    if job is None:
        ctx.invoke(jobs, database=database, as_json=as_json, watch=watch, everything=False)
    else:
        ctx.invoke(show, job=job, database=database, as_json=as_json, watch=watch)


def _watch(read: Callable[[], tuple[list[str], bool]], *, as_json: bool) -> None:
    """Draw the lines that ``read`` returns until it reports that they are final."""
    if as_json or terminal_columns() is None:
        raise UsageError("--watch draws on a terminal.", hint="For programs: call it with --json as often as you like.")
    from shutil import get_terminal_size

    drawn = 0
    while True:
        lines, is_final = read()
        size = get_terminal_size()
        shown = [cut(line, max(1, size.columns - 1)) for line in lines[: max(1, size.lines - 1)]]
        # Clear from the first line of the previous drawing downwards, which also works after a resize.
        put((f"\x1b[{drawn}A\r\x1b[J" if drawn else "") + "\n".join(shown))
        drawn = len(shown)
        if is_final:
            return
        time.sleep(WATCH_SECONDS)
