"""``jobs``, ``runs``, ``show`` and ``status``: which jobs there are and how far each is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from headway.cli import database_option, json_option, say
from headway.cli.toolkit import (
    clock,
    find_job,
    iso,
    job_argument,
    job_facts,
    open_ledger,
    open_store,
    put,
    put_json,
    put_table,
    table,
    terminal_columns,
    with_database,
)
from headway.errors import UsageError
from headway.telemetry import redact
from headway.wording import cut, duration, pace, printable, roughly

if TYPE_CHECKING:
    from headway.ledger import Cause, Job, JobInfo, Ledger, Run

#: The rate of a job is that of its last minutes.
RATE_MINUTES = 5
#: No forecast before so many items are done in these minutes.
FORECAST_ITEMS = 30
#: Seconds between two looks of --watch.
WATCH_SECONDS = 1.0

watch_option = click.option("--watch", "-w", is_flag=True, help="Look again every second, on a terminal.")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also those a fresh start has put aside.")
@watch_option
@json_option
@database_option
def jobs(database: str | None, *, as_json: bool, everything: bool, watch: bool) -> None:
    """List the jobs, the one that changed last first."""
    from headway.ledger.report import all_jobs  # not the whole ledger: a list is to be there at once

    with open_store(database) as store:
        if watch:
            _watch(lambda: (_job_table(all_jobs(store, archived=everything)), False), as_json=as_json)
            return
        found = all_jobs(store, archived=everything)
        if as_json:
            put_json("jobs/1", jobs=[job_facts(info) for info in found])
        elif found:
            for line in _job_table(found):
                put(line)
        else:
            say("There are no jobs yet. Start one:  headway run module:function --items items.jsonl")


def _job_table(found: list[JobInfo]) -> list[str]:
    rows = [
        [
            info.id,
            info.status,
            f"{info.done:,}/{info.total:,}",
            f"{info.percent:.1f}%",
            f"{info.failed:,}",
            f"{info.dead:,}",
            _ago(info.updated_at),
            info.function,
        ]
        for info in found
    ]
    heads = ["JOB", "STATUS", "DONE", "", "RETRYING", "DEAD", "CHANGED", "FUNCTION"]
    return table(heads, rows, right=("DONE", "", "RETRYING", "DEAD", "CHANGED"), columns=terminal_columns())


def _ago(at: datetime) -> str:
    seconds = (datetime.now(UTC) - at).total_seconds()
    return "now" if seconds < 2 else f"{duration(int(seconds))} ago"


@click.command()
@job_argument
@json_option
@database_option
def runs(job: str, database: str | None, *, as_json: bool) -> None:
    """List the runs of a job: every start and resume, and how each ended."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job).runs()
    if as_json:
        put_json("runs/1", job=job, runs=[run_facts(run) for run in found])
    elif found:
        put_table(*_run_rows(found), right=("RUN", "KEPT", "TOOK"))
    else:
        say(f"Job {job} has not been run by headway run or headway.map.")


def run_facts(run: Run) -> dict[str, object]:
    return {
        "no": run.no,
        "outcome": run.outcome,
        "host": run.host,
        "pid": run.pid,
        "kept": run.kept,
        "started_at": iso(run.started_at),
        "ended_at": iso(run.ended_at),
        "settings": {name: redact(value) if isinstance(value, str) else value for name, value in run.settings.items()},
    }


def _run_rows(found: list[Run]) -> tuple[list[str], list[list[str]]]:
    now = datetime.now(UTC)
    rows = [
        [
            str(run.no),
            clock(run.started_at),
            duration(((run.ended_at or now) - run.started_at).total_seconds()),
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
    """Show one job: counts, runs, causes of failure, who runs it, and the command to continue."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        if watch:
            _watch(lambda: _sheet_until_finished(found, database), as_json=as_json)
        elif as_json:
            put_json("job/1", **_facts(ledger, found))
        else:
            for line in _sheet(found, database):
                put(line)


def cause_facts(cause: Cause) -> dict[str, object]:
    return {
        "no": cause.no,
        "type": cause.type,
        "message": cause.message,
        "frame": cause.frame,
        "failures": cause.count,
        "dead": cause.dead,
        "first_seen": iso(cause.first_seen),
        "last_seen": iso(cause.last_seen),
        "example": cause.example,
    }


def _facts(ledger: Ledger, job: Job) -> dict[str, Any]:
    info = job.info()
    rate, left = _speed(job, info)
    return {
        "job": job_facts(info),
        "running": job.progress().running,
        "rate": None if rate is None else round(rate, 3),
        "eta_seconds": None if left is None else round(left, 1),
        "runs": [run_facts(run) for run in job.runs()],
        "causes": [cause_facts(cause) for cause in job.causes()],
        "database": {"name": ledger.database.name, "bytes": ledger.database.size()},
    }


def _speed(job: Job, info: JobInfo) -> tuple[float | None, float | None]:
    """Items per second of the run in progress, over its last minutes, and the seconds left at that pace."""
    past = job.runs()
    if not info.held or not past:
        return None, None
    now = job.database.now()
    window = int(now // 60) - RATE_MINUTES
    began = past[-1].started_at.timestamp()
    if began >= window * 60:
        done = info.done - past[-1].kept  # all of this run: an earlier one may lie in the same minutes
    else:
        done, began = sum(row[1] for row in job.minutes(window)), window * 60.0
    rate = done / max(1.0, now - began)
    return rate or None, info.remaining / rate if done >= FORECAST_ITEMS else None


def _sheet(job: Job, database: str | None) -> list[str]:
    """Everything about a job on one page."""
    from headway.run.display import bar
    from headway.run.summary import cause_lines

    info, past = job.info(), job.runs()
    columns = terminal_columns() or 120
    rate, left = _speed(job, info)
    kept = past[-1].kept if past else 0
    total = info.total or 1
    strokes = bar(
        kept / total,
        (info.done - kept) / total,
        40,
        ascii_only=(sys.stdout.encoding or "").lower() not in ("utf-8", "utf8"),
    )
    counts = {
        "kept": kept,
        "done": info.done - kept,
        "pending": info.remaining - info.failed,
        "retrying": info.failed,
        "dead": info.dead,
    }
    speed = [pace(rate), f"~{roughly(left)} left" if left is not None else ""]
    lines = [
        f"Job {info.id}: {_state(info)}",
        f"  {printable(info.function) or 'a program'} over {printable(redact(info.source)) or 'its own items'}",
        "   ".join(part for part in [f"  {info.percent:.1f}% {strokes} {info.done:,}/{info.total:,}", *speed] if part),
        "  "
        + ", ".join(f"{name} {count:,}" for name, count in counts.items())
        + f"; {info.failures:,} failed runs of items",
    ]
    if past:
        heads, rows = _run_rows(past[-10:])
        lines += ["", *(f"  {line}" for line in table(heads, rows, right=("RUN", "KEPT", "TOOK")))]
    causes = [cause for cause in job.causes() if cause.dead]
    if causes:
        lines += ["", f"What is dead, by cause ({with_database(f'headway dead show {info.id}', database)}):"]
        lines += cause_lines(causes[:10], columns=columns)
    advice = _advice(info, database)
    if advice:
        lines += ["", advice]
    return lines


def _state(info: JobInfo) -> str:
    if info.held and info.holder:
        return f"{info.status} by process {info.holder['pid']} on {info.holder['host']}"
    if info.finished_at is not None:
        return f"{info.status} {clock(info.finished_at)}"
    if info.holder is not None:
        return f"{info.status}; the process {info.holder['pid']} on {info.holder['host']} that ran it is gone"
    return info.status


def _advice(info: JobInfo, database: str | None) -> str:
    """The next command to type, if there is one."""
    if info.held:
        return ""
    if info.remaining:
        return f"Continue:  {redact(info.command)}" if info.command else ""
    if info.dead:
        return f"Retry what is dead:  {with_database(f'headway dead retry {info.id}', database)}"
    return ""


def _sheet_until_finished(job: Job, database: str | None) -> tuple[list[str], bool]:
    lines = _sheet(job, database)
    info = job.info()
    return lines, not info.held and info.finished_at is not None


@click.command()
@click.argument("job", required=False)
@watch_option
@json_option
@database_option
@click.pass_context
def status(ctx: click.Context, job: str | None, database: str | None, *, as_json: bool, watch: bool) -> None:
    """The same as `headway jobs`, or with JOB as `headway show JOB`."""
    if job is None:
        ctx.invoke(jobs, database=database, as_json=as_json, watch=watch, everything=False)
    else:
        ctx.invoke(show, job=job, database=database, as_json=as_json, watch=watch)


def _watch(look: Callable[[], tuple[list[str], bool]], *, as_json: bool) -> None:
    """Draw what ``look`` gives, again and again, until it says that this was the last."""
    if as_json or not sys.stdout.isatty():
        raise UsageError("--watch draws on a terminal.", hint="For programs: call it with --json as often as you like.")
    from shutil import get_terminal_size

    drawn = 0
    while True:
        lines, last = look()
        size = get_terminal_size()
        shown = [cut(line, size.columns - 1) for line in lines[: size.lines - 1]]
        # From the first of the lines drawn before, clear everything below: right also after a resize.
        put((f"\x1b[{drawn}A\r\x1b[J" if drawn else "") + "\n".join(shown))
        drawn = len(shown)
        if last:
            return
        time.sleep(WATCH_SECONDS)
