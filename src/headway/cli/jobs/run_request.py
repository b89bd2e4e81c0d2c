"""What ``headway run`` was asked for, checked, and how it is carried out and told."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.cli import say, typed
from headway.core.text import plural
from headway.errors import HeadwayError
from headway.telemetry import redact

if TYPE_CHECKING:
    from headway.config import Config
    from headway.core.lifecycle import Shutdown
    from headway.events import Sink
    from headway.ledger import Hold, Job, Ledger
    from headway.run import Ending, Settings
    from headway.run.display.display import Display
    from headway.run.fleet.start import FleetOptions
    from headway.run.items import Accept, PipedItems, Source
    from headway.run.output.results import Keep
    from headway.run.plan import Changes, Plan
    from headway.run.program import Work

#: Options that belong to one start only and are left out of the command that continues it.
_ONCE = {"--fresh", "--accept-changes", "--dry-run"}


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for, checked."""

    config: Config
    call: Work
    function: str
    settings: Settings
    job: str | None
    output: Path | None
    keep: Keep
    fresh: bool
    accept: bool
    serve: bool
    as_json: bool
    shutdown: Shutdown
    sinks: Sequence[Sink]
    fleet: FleetOptions | None
    detach: bool

    @property
    def accepts(self) -> Accept | None:
        """What says whether an item can be worked on, if anything does."""
        return None if callable(self.call) else self.call.check


def _look(order: Order, source: Source) -> tuple[Ledger | None, Plan]:
    """Find out what would be done. A database that is not there is not made for that."""
    from headway.errors import NotFound
    from headway.ledger import Ledger
    from headway.run import plan as plans

    ledger = None
    try:
        ledger = Ledger.open(order.config.text("database"), create=False, stop=order.shutdown.abandon)
        ledger.database.verify()
    except NotFound:
        pass
    id = order.job or plans.default_id(ledger, order.function, source.name)
    return ledger, plans.look(ledger, id, order.function, source, fresh=order.fresh)


def dry_run(order: Order, source: Source) -> int:
    """Say what the same command would do without --dry-run; where that would be refused, so is this."""
    from headway.errors import JobHeld
    from headway.run import plan as plans
    from headway.run.session import check_output

    ledger, plan = _look(order, source)
    with ledger or nullcontext():
        ahead = plans.preview(ledger, plan)
        if order.as_json:
            facts = {
                "job": plan.id, "new": plan.changes.new, "kept": ahead.kept, "changed": len(plan.changes.changed),
                "gone": len(plan.changes.gone), "to_do": ahead.to_do, "first_keys": list(ahead.first_keys),
            }  # fmt: skip
            click.echo(json.dumps({"schema": "headway.dry-run/1", **facts}))
        else:
            say(
                f"Run {plan.id} would work on {plural(ahead.to_do, 'item')} with {order.function}: {plan.changes}, "
                f"{ahead.kept:,} kept."
            )
            say(f"The first ones: {', '.join(ahead.first_keys)}." if ahead.first_keys else "Nothing is left to do.")
            say("Nothing was written.")
        if not order.accept:
            plans.refuse_doubt(plan)
        if order.output is not None:
            check_output(order.output, ledger, plan)
        if plan.existing is not None and plan.existing.held:
            raise JobHeld(f"Job {plan.id} is being run.", hint=f"See how far it is: headway show {plan.id}")
        return 3 if ahead.dead else 0


def run_file(order: Order, source: Source) -> int:
    from headway.ledger import Ledger
    from headway.run import plan as plans
    from headway.run.fleet import start as fleets
    from headway.run.session import check_output, take

    found, plan = _look(order, source)
    if not order.accept:
        plans.refuse_doubt(plan)
    if order.output is not None:
        check_output(order.output, found, plan)
    ledger = found or Ledger.open(order.config.text("database"), stop=order.shutdown.abandon)
    with ledger:
        if order.fleet is not None and (run := fleets.running(plan)) is not None:
            fleets.rejoin(ledger, ledger.job(plan.id), order.config)
            return _follow(order, ledger, ledger.job(plan.id), run, f"Run {plan.id} is the fleet's already")
        job, hold = take(ledger, plan, order.settings, command=_command(), accept=order.accept)
        if order.fleet is not None:
            text = _greeting(job, plan.changes if plan.existing is not None else None)
            keep = replace(order.keep, all_results=order.keep.results and order.output is not None)
            fleets.hand(ledger, job, hold, order.call, order.settings, keep, order.config, order.fleet)
            return _follow(order, ledger, ledger.job(job.id), hold.run, text)
        text = _greeting(job, plan.changes if plan.existing is not None else None)
        return _perform(order, ledger, job, hold, text, feed=None)


def run_pipe(order: Order, pipe: int, format: str | None, key: str | None, limit: int) -> int:
    from headway.ledger import Ledger
    from headway.run import plan as plans
    from headway.run.items import PipedItems
    from headway.run.output.files import refuse_foreign, refuse_incomplete
    from headway.run.session import describe

    with Ledger.open(order.config.text("database"), stop=order.shutdown.abandon) as ledger:
        id = order.job or plans.default_id(ledger, order.function, "-")
        existing = None if order.fresh else plans.find(ledger, id)
        if existing is not None:
            plans.refuse_other(existing, order.function, key)
        if order.output is not None:
            refuse_foreign(order.output, ledger, id)
            if existing is not None:
                refuse_incomplete(ledger.job(id))
        if order.fresh:
            ledger.archive(id)
        job = ledger.create(id)
        hold = ledger.hold(job, describe(order.settings), policy=order.settings.policy)
        job = job.held_by(hold)
        try:
            ledger.describe(
                job, function=order.function, source="-", command=_command(), keyed_by=key,
                max_retries=order.settings.policy.retries,
            )  # fmt: skip
            feed = PipedItems(job, pipe, format=format, key=key, limit=limit, accept=order.accepts)
        except BaseException:
            ledger.release(hold, "failed")
            raise
        return _perform(order, ledger, job, hold, _greeting(job, None), feed=feed)


def _perform(order: Order, ledger: Ledger, job: Job, hold: Hold, text: str, *, feed: PipedItems | None) -> int:
    from headway.run.display.display import open_display
    from headway.run.session import perform

    display = open_display(order.config.text("progress"), stream=sys.stderr, color=order.config.text("color"))
    display.begin(text)
    if _looks_like_a_number_of_workers(order):
        display.say(f"-j names the job, which is called {job.id} now. For that many items at once: --workers {job.id}")
    with _page(order, job, display):
        ending = perform(
            ledger, job, hold, order.call, order.settings,
            display=display, shutdown=order.shutdown, output=order.output, keep=order.keep, feed=feed, sinks=order.sinks,
        )  # fmt: skip
    return _conclude(order, display, job, ending)


def _looks_like_a_number_of_workers(order: Order) -> bool:
    """Whoever comes from GNU parallel, make or xargs means that by -j."""
    given = order.job or ""
    return given.isascii() and given.isdigit() and len(given) <= 3 and order.config.origin("workers") == "default"


def _follow(order: Order, ledger: Ledger, job: Job, run: int, text: str) -> int:
    """Show a run of the fleet until it is over, or until this command is to end: the run goes on then."""
    from headway.run.display.display import open_display
    from headway.run.fleet import start as fleet
    from headway.run.session import tell

    again = typed(f"Follow it:  headway show {job.id} --watch    Stop it:  headway stop {job.id}")
    if order.detach:
        say(f"{text}. {again}")
        if order.as_json:
            click.echo(json.dumps({"schema": "headway.run/1", "job": job.id, "outcome": "detached", "exit_code": 0}))
        return 0
    display = open_display(order.config.text("progress"), stream=sys.stderr, color=order.config.text("color"))
    display.begin(text)
    with _page(order, job, display):
        ending = fleet.follow(ledger, job, run, display=display, shutdown=order.shutdown)
    if ending is None:
        display.conclude(
            [f"Job {job.id} goes on without this command. {again}"],
            {"job": job.id, "outcome": "detached", "exit_code": order.shutdown.exit_code},
        )
        return order.shutdown.exit_code
    fleet.conclude(job, ending, order.output, lambda: tell(ledger, order.sinks, order.shutdown.abandon))
    return _conclude(order, display, job, ending)


@contextmanager
def _page(order: Order, job: Job, display: Display) -> Iterator[None]:
    """With --serve: the job's page, until the run is over. That it cannot be opened or fails ends no run, and is said."""
    if not order.serve:
        yield
        return
    from urllib.parse import quote

    from headway.web.run_page import Beside

    try:
        beside = Beside(order.config.text("database"))
    except (HeadwayError, OSError) as error:
        display.say(f"There is no page: {redact(str(error))}")
        yield
        return
    path = f"/jobs/{quote(job.id, safe='')}"
    display.say(f"Page: {beside.server.link(path)}")
    try:
        yield
    finally:
        if failed := beside.close():
            display.say(f"The page failed meanwhile, the run did not: {failed}")


def _conclude(order: Order, display: Display, job: Job, ending: Ending) -> int:
    """Say how it ended and what to type next; the exit code."""
    from headway.run.display.display import RunSnapshot, interrupted, summary, terminal_columns

    info = job.info()
    code = 3 if info.dead else 0
    if ending.outcome == "stopped":
        code = 4
    elif ending.outcome == "interrupted":
        code = order.shutdown.exit_code if order.shutdown.signum is not None else 143
    shown = RunSnapshot(
        total=info.total if info.sealed else None, kept=ending.kept, done=ending.done, running=0, retrying=info.failed,
        dead=info.dead, failures=ending.failures,
    )  # fmt: skip
    facts = {
        "job": job.id, "outcome": ending.outcome, "total": info.total, "done": info.done, "kept": ending.kept,
        "dead": info.dead, "retrying": info.failed, "failures": ending.failures,
        "seconds": round(ending.seconds, 3), "exit_code": code,
    }  # fmt: skip
    if order.as_json:
        click.echo(json.dumps({"schema": "headway.run/1", **facts}))
    columns = terminal_columns(sys.stderr, os.environ) if sys.stderr is not None and sys.stderr.isatty() else 120
    options = order.config.database_option
    if ending.outcome == "finished":
        causes = [cause for cause in job.causes() if cause.dead]
        retries = max(0, ending.failures - ending.died)
        lines = summary(
            job.id, shown, seconds=ending.seconds, retries=retries, causes=causes, options=options, columns=columns
        )
        if ending.rescued:
            lines.insert(1, f"  {ending.rescued:,} of them succeeded only in the pass over dead letters at the end")
    else:
        lines = interrupted(job.id, shown, info.command, columns=columns)
        if ending.outcome == "stopped":
            lines.insert(0, f"Stopped: {plural(ending.died, 'item')} died in this run (--max-failures).")
            lines.append(f"See why first:  headway dead show {job.id} {options}".rstrip())
    display.conclude(lines, facts)
    return code


def _greeting(job: Job, changes: Changes | None) -> str:
    """The line above the bar: what is started or resumed."""
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


def _command() -> str:
    """What to type to continue; it is kept and shown, so a password in it is not."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return redact(shlex.join(["headway", *(word for word in words[:end] if word not in _ONCE), *words[end:]]))
