"""Executes a validated request of ``headway run`` and reports the result."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import click

from headway.cli import say, typed
from headway.core.text import plural
from headway.errors import HeadwayError, JobHeld
from headway.ledger import Job
from headway.run import plan as plans
from headway.run.display.display import (
    Display,
    RunSnapshot,
    interrupted,
    open_display,
    summary,
    terminal_columns,
    waiting,
)
from headway.run.items import Accept, PipedItems, Source
from headway.run.plan import Changes, Plan
from headway.run.pool.runner import Ending
from headway.run.session import RunRequest, Session
from headway.telemetry import redact

#: Options for a single start, which the command to continue omits.
_ONCE = {"--fresh", "--accept-changes", "--dry-run"}


@dataclass(frozen=True, slots=True)
class Order:
    """The validated options of ``headway run``."""

    request: RunRequest
    job: str | None
    serve: bool
    as_json: bool
    detach: bool

    @property
    def accepts(self) -> Accept | None:
        """The check that every item must pass, if there is one."""
        work = self.request.work
        return None if work is None or callable(work) else work.check

    def id(self, session: Session, source: str) -> str:
        """Return the job's id: the given one, or one derived from function and source."""
        return self.job or plans.default_id(session.ledger, self.request.name, source)

    def display(self) -> Display:
        """Open the display on stderr."""
        config = self.request.config
        return open_display(config.text("progress"), stream=sys.stderr, color=config.text("color"))


@contextmanager
def _planned(order: Order, source: Source) -> Iterator[tuple[Session, Plan]]:
    """Open a session and compare the items. A missing database is not created."""
    with Session(order.request, create=False) as session:
        if session.ledger is not None:
            session.ledger.database.verify()
        yield session, session.compare(order.id(session, source.name), source)


def dry_run(order: Order, source: Source) -> int:
    """Print what the command would do without --dry-run. Raises the same errors."""
    with _planned(order, source) as (session, plan):
        ahead = plans.preview(session.ledger, plan)
        if order.as_json:
            facts = {
                "job": plan.id, "new": plan.changes.new, "kept": ahead.kept, "changed": len(plan.changes.changed),
                "gone": len(plan.changes.gone), "to_do": ahead.to_do, "first_keys": list(ahead.first_keys),
            }  # fmt: skip
            click.echo(json.dumps({"schema": "headway.dry-run/1", **facts}))
        else:
            say(
                f"Run {plan.id} would work on {plural(ahead.to_do, 'item')} with {order.request.name}: {plan.changes}, "
                f"{ahead.kept:,} kept."
            )
            say(f"The first ones: {', '.join(ahead.first_keys)}." if ahead.first_keys else "Nothing is left to do.")
            say("Nothing was written.")
        session.check(plan)
        if plan.existing is not None and plan.existing.held:
            raise JobHeld(f"Job {plan.id} is being run.", hint=f"See how far it is: headway show {plan.id}")
        return 3 if ahead.dead else 0


def run_file(order: Order, source: Source) -> int:
    """Run the items of a file; return the exit code."""
    with _planned(order, source) as (session, plan):
        session.check(plan)
        job = session.hold(plan)
        if session.joined:
            return _work(order, session, job, f"A fleet already runs {plan.id}")
        return _work(order, session, job, _greeting(job, plan.changes if plan.existing is not None else None))


def run_pipe(order: Order, pipe: int, format: str | None, key: str | None, limit: int) -> int:
    """Run the items that arrive on a pipe; return the exit code."""

    def feed(job: Job) -> PipedItems:
        return PipedItems(job, pipe, format=format, key=key, limit=limit, accept=order.accepts)

    with Session(order.request) as session:
        job = session.hold_stream(order.id(session, "-"), key, feed)
        return _work(order, session, job, _greeting(job, None))


def _work(order: Order, session: Session, job: Job, text: str) -> int:
    """Execute the job, or follow the fleet that executes it; return the exit code."""
    again = typed(f"Follow it:  headway show {job.id} --watch    Stop it:  headway stop {job.id}")
    if order.detach:
        say(f"{text}. {again}")
        if order.as_json:
            click.echo(json.dumps({"schema": "headway.run/1", "job": job.id, "outcome": "detached", "exit_code": 0}))
        return 0
    display, shutdown = order.display(), order.request.shutdown
    display.begin(text)
    if _looks_like_a_number_of_workers(order):
        display.say(
            f"-j names the job, so this job is called {job.id}. For that many items at once: --workers {job.id}"
        )
    with _page(order, job, display):
        ending = session.work(display)
    if ending is not None:
        return _conclude(order, display, job, ending)
    display.conclude(
        [f"Job {job.id} goes on without this command. {again}"],
        {"job": job.id, "outcome": "detached", "exit_code": shutdown.exit_code},
    )
    return shutdown.exit_code


def _looks_like_a_number_of_workers(order: Order) -> bool:
    """Return whether -j was meant as a number of workers, as in GNU parallel, make and xargs."""
    given = order.job or ""
    return (
        given.isascii() and given.isdigit() and len(given) <= 3 and order.request.config.origin("workers") == "default"
    )


@contextmanager
def _page(order: Order, job: Job, display: Display) -> Iterator[None]:
    """With --serve, serve the job's page until the run ends. If that fails, report it and continue."""
    if not order.serve:
        yield
        return
    from urllib.parse import quote

    from headway.web.run_page import Beside

    try:
        beside = Beside(order.request.config.text("database"))
    except (HeadwayError, OSError) as error:
        display.say(f"The page cannot be opened: {redact(str(error))}")
        yield
        return
    path = f"/jobs/{quote(job.id, safe='')}"
    display.say(f"Page: {beside.server.link(path)}")
    try:
        yield
    finally:
        if failed := beside.close():
            display.say(f"The page failed during the run: {failed}")


def _conclude(order: Order, display: Display, job: Job, ending: Ending) -> int:
    """Print how the run ended and the next command; return the exit code."""
    info = job.info()
    code = 3 if info.dead else 0
    if ending.outcome == "stopped":
        code = 4
    elif ending.outcome == "interrupted":
        code = order.request.shutdown.exit_code if order.request.shutdown.signum is not None else 143
    shown = RunSnapshot(
        total=info.total if info.sealed else None, kept=ending.kept, done=ending.done, running=0, retrying=info.failed,
        dead=info.dead, failures=ending.failures, postponed=ending.postponed,
    )  # fmt: skip
    facts = {
        "job": job.id, "outcome": ending.outcome, "total": info.total, "done": info.done, "kept": ending.kept,
        "dead": info.dead, "retrying": info.failed, "failures": ending.failures,
        "postponed": ending.postponed,
        "seconds": round(ending.seconds, 3), "exit_code": code,
    }  # fmt: skip
    if order.as_json:
        click.echo(json.dumps({"schema": "headway.run/1", **facts}))
    columns = terminal_columns(sys.stderr, os.environ) if sys.stderr is not None and sys.stderr.isatty() else 120
    options = order.request.config.database_option
    if ending.outcome == "finished":
        causes = [cause for cause in job.causes() if cause.dead]
        retries = max(0, ending.failures - ending.died)
        lines = summary(
            job.id, shown, seconds=ending.seconds, retries=retries, causes=causes, options=options, columns=columns
        )
        if ending.rescued:
            lines.insert(1, f"  {ending.rescued:,} succeeded only in the last pass over dead letters")
    else:
        lines = interrupted(job.id, shown, info.command, columns=columns)
        if info.wait_until is not None:
            lines.insert(0, waiting(info.wait_until, info.wait_reason))
        if ending.outcome == "stopped":
            lines.insert(0, f"Stopped: {plural(ending.died, 'item')} died in this run (--max-failures).")
            lines.append(f"See why first:  headway dead show {job.id} {options}".rstrip())
    display.conclude(lines, facts)
    return code


def _greeting(job: Job, changes: Changes | None) -> str:
    """Return the line above the bar: whether the run starts or resumes."""
    info = job.info()
    earlier = job.runs()[:-1]
    if not earlier:
        return f"Run {job.id}: {plural(info.total, 'item') if info.sealed else 'items from a pipe'}"
    if info.finished_at is not None and not info.remaining:
        return f"Run {job.id} was finished already: {info.done:,} done, {info.dead:,} dead"
    last = earlier[-1]
    how = {"lost": "killed", "failed": "failed", "finished": "finished"}.get(last.outcome or "", "interrupted")
    ended = f", {how} {_clock(last.ended_at)}" if last.ended_at else ""
    added = f"; {changes}" if changes is not None and str(changes) != "nothing changed" else ""
    return (
        f"Resuming run {job.id} (started {_clock(earlier[0].started_at)}{ended}): "
        f"{info.done:,} of {info.total:,} already done{added}"
    )


def _clock(moment: datetime) -> str:
    local = moment.astimezone()
    today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M" if today else "%d %b %H:%M")


def command() -> str:
    """Return the command that resumes the run. It is stored and shown, so passwords in it are redacted."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return redact(shlex.join(["headway", *(word for word in words[:end] if word not in _ONCE), *words[end:]]))
