"""``headway run``: the main job."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from headway.cli import database_option, say, typed
from headway.errors import HeadwayError, InvalidInput, UsageError
from headway.telemetry import redact
from headway.wording import plural

if TYPE_CHECKING:
    from headway.config import Config
    from headway.events import Sink
    from headway.ledger import Hold, Job, Ledger
    from headway.lifecycle import Shutdown
    from headway.run import Ending, Settings
    from headway.run.display import Display
    from headway.run.fleet import FleetOptions
    from headway.run.items import Accept, PipedItems, Source
    from headway.run.plan import Changes, Plan
    from headway.run.program import Work
    from headway.run.results import Keep


class RunCommand(click.Command):
    """Everything after ``--`` is a program with its arguments, whatever it looks like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "{MODULE:FUNCTION | -- PROGRAM [ARGUMENT]...}"]


PROGRAM = "headway.program"

#: Options that belong to one start only and are left out of the command that continues it.
_ONCE = {"--fresh", "--accept-changes", "--dry-run"}


@click.command(cls=RunCommand)
@click.argument("function", metavar="MODULE:FUNCTION", required=False)
@click.option(
    "--items",
    "-i",
    required=True,
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Items: JSON lines, a JSON array, CSV or plain lines; - for a pipe.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", "json", "csv", "lines"]),
    help="If the file's name does not tell; json is an array.",
)
@click.option("--job", "-j", metavar="ID", help="What to call the job.  [default: made of function and file]")
@database_option
@click.option("--workers", "-w", type=click.IntRange(0), help="Items that run at once; 0, the default: one per core.")
@click.option("--mode", type=click.Choice(["process", "thread", "async"]), help="How items run.  [default: process]")
@click.option("--retries", type=click.IntRange(0), help="Further tries of an item that failed.  [default: 2]")
@click.option("--timeout", type=float, metavar="SECONDS", help="How long one item may take.")
@click.option("--rate", type=float, metavar="N", help="Start at most N items per second.")
@click.option("--key", metavar="FIELD", help="The field that names an item; then lines may be added and moved.")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write results: x.jsonl or x.csv."
)
@click.option("--results/--no-results", default=True, help="Keep what items returned.  [default: on]")
@click.option(
    "--keep-output",
    type=click.Choice(["failed", "all", "none"]),
    default="failed",
    help="Of which items to keep what they printed.  [default: failed]",
)
@click.option("--stdin", is_flag=True, help="Give the program its item on standard input.")
@click.option("--stdout", type=click.Choice(["text", "json"]), help="What a program's output is.  [default: text]")
@click.option("--max-failures", type=click.IntRange(1), metavar="N", help="Stop when N items died in this run.")
@click.option("--last-pass/--no-last-pass", default=True, help="Try dead letters once more at the end.  [default: on]")
@click.option("--fleet", is_flag=True, help="Let the workers of all machines do it (headway worker), on PostgreSQL.")
@click.option("--slots", type=click.IntRange(1, 10_000), help="Workers that take part.  [default: all there are]")
@click.option("--priority", type=click.Choice(["urgent", "high", "normal", "low"]), help="Of a fleet's job.")
@click.option("--detach", is_flag=True, help="Return at once; the fleet goes on by itself.")
@click.option("--any-version", is_flag=True, help="Let workers take part whose code or packages differ.")
@click.option("--fresh", is_flag=True, help="Start over; what was recorded is put aside.")
@click.option("--accept-changes", is_flag=True, help="Go on although items or function changed.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--progress", type=click.Choice(["auto", "bar", "plain", "json", "none"]), help="How to show it.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="Colours on the terminal.")
@click.option("--serve", is_flag=True, help="Open the job's page on this machine while it runs, and say its address.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON on stdout.")
@click.pass_context
def run(
    ctx: click.Context,
    function: str | None,
    items: str,
    format_: str | None,
    job: str | None,
    database: str | None,
    workers: int | None,
    mode: str | None,
    retries: int | None,
    timeout: float | None,
    rate: float | None,
    key: str | None,
    output: Path | None,
    results: bool,
    keep_output: Literal["failed", "all", "none"],
    stdin: bool,
    stdout: Literal["text", "json"] | None,
    max_failures: int | None,
    last_pass: bool,
    fleet: bool,
    slots: int | None,
    priority: str | None,
    detach: bool,
    any_version: bool,
    fresh: bool,
    accept_changes: bool,
    dry_run: bool,
    progress: str | None,
    color: str | None,
    serve: bool,
    as_json: bool,
) -> int:
    """Call MODULE:FUNCTION with every item, or run PROGRAM for it, and remember what became of each.

    In the arguments of a program {} is the item, {FIELD} one of its fields, {key} its key and {index} its number.

    The same command continues a run that was interrupted, however it was. Exit codes: 0 everything done, 3 finished
    but some items are dead, 4 stopped by --max-failures, 5 refused (another process runs it, or the items changed),
    130 or 143 interrupted, state saved.
    """
    from headway import telemetry
    from headway.config import Config
    from headway.ids import check_id
    from headway.lifecycle import Shutdown, on_signals
    from headway.run import configured_sinks
    from headway.run.items import FileItems
    from headway.run.program import Program
    from headway.run.results import Keep

    config = Config(
        cli={
            "database": database, "workers": workers, "mode": mode, "retries": retries, "timeout": timeout,
            "rate": rate, "max_failures": max_failures, "progress": progress, "color": color,
        }
    )  # fmt: skip
    # Where progress is read by a program, everything on stderr is.
    as_lines = config["log_format"] == "json" or config["progress"] == "json"
    telemetry.configure(level=config.text("log_level").upper(), as_json=as_lines)
    with _errors_as_progress(config):
        _check_words()
        if output is not None and not results:
            raise UsageError("--output needs results.", hint="Leave out --no-results or --output.")
        if serve:
            from headway.web import beside

            beside.check()
        call = _work(function, ctx.meta.get(PROGRAM), stdin=stdin, stdout=stdout, key=key)
        name = call.text if isinstance(call, Program) else function or ""
        crew = None
        if fleet:
            words = ctx.meta.get(PROGRAM)
            program = (
                None if words is None else {"words": words, "stdin": stdin, "stdout": stdout or "text", "key": key}
            )
            crew = _fleet(config, call, program, slots, priority, any_version=any_version, items=items)
        elif detach or slots or priority or any_version:
            raise UsageError("--slots, --priority, --detach and --any-version are for a fleet.", hint="Add --fleet.")
        if detach and (output is not None or serve):
            raise UsageError(
                "--detach returns at once: it writes no file and shows no page.",
                hint="Later:  headway results JOB --output FILE,  headway serve",
            )
        order = Order(
            config=config,
            call=call,
            function=name,
            settings=_settings(config, call, name, last_pass=last_pass, fleet=fleet),
            job=None if job is None else check_id(job, "a job id"),
            output=output,
            keep=Keep(results=results, printed=keep_output),
            fresh=fresh,
            accept=accept_changes,
            serve=serve,
            as_json=as_json,
            shutdown=Shutdown(),
            sinks=configured_sinks(config),  # a wrong address is said before anything is written
            fleet=crew,
            detach=detach,
        )
        limit = int(config["payload_limit"] or 0)
        with on_signals(order.shutdown):
            if items == "-" and not _is_a_file(_standard_input()):
                if dry_run or accept_changes:
                    raise InvalidInput(
                        "A pipe can be read only once, so nothing can be compared beforehand.", hint="Use a file."
                    )
                return _run_pipe(order, format_, key, limit)
            path = Path("/dev/stdin" if items == "-" else items)
            source = FileItems(path, format=format_, key=key, limit=limit, name=items, accept=order.accepts)
            return _dry_run(order, source) if dry_run else _run_file(order, source)


@contextmanager
def _errors_as_progress(config: Config) -> Iterator[None]:
    """With ``--progress json`` an error is a line of JSON too."""
    try:
        yield
    except HeadwayError as error:
        if config["progress"] != "json":
            raise
        facts = {"message": str(error), "hint": typed(error.hint), "exit_code": error.exit_code}
        say(json.dumps({"t": datetime.now(UTC).isoformat(timespec="seconds"), "event": "error", **facts}))
        raise click.exceptions.Exit(error.exit_code) from error


def _work(
    function: str | None,
    words: Sequence[str] | None,
    *,
    stdin: bool,
    stdout: Literal["text", "json"] | None,
    key: str | None,
) -> Work:
    """The function or the program that was named."""
    from headway.run import function as functions
    from headway.run.program import Program

    if words is not None:
        if function is not None:
            raise UsageError(
                f"Both a function ({function}) and a program (after --) were named.", hint="Name one of them."
            )
        return Program(words, stdin=stdin, stdout=stdout or "text", key=key)
    if function is None:
        raise UsageError(
            "Nothing was named that could be run.",
            hint="headway run module:function --items FILE, or headway run --items FILE -- program {}",
        )
    if stdin or stdout:
        raise UsageError(
            f"{'--stdin' if stdin else '--stdout'} is for programs, and {function} is a function.",
            hint="A program and its arguments come after --",
        )
    return functions.load(function)


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


def _fleet(
    config: Config,
    call: Work,
    program: dict[str, Any] | None,
    slots: int | None,
    priority: str | None,
    *,
    any_version: bool,
    items: str,
) -> FleetOptions:
    """What was asked of a fleet, checked."""
    from headway.run.fleet import FleetOptions, check

    if items == "-" and not _is_a_file(_standard_input()):
        raise UsageError("A fleet needs all items beforehand, and a pipe has no end.", hint="Write them to a file.")
    options = FleetOptions(slots, priority or "normal", any_version, program)
    check(config, call, options)
    return options


def _settings(config: Config, call: Work, name: str, *, last_pass: bool, fleet: bool = False) -> Settings:
    from headway.retry import RetryPolicy
    from headway.run import Settings, check_settings
    from headway.run import function as functions

    asked = None if config.origin("mode") == "default" else config.text("mode")
    mode = functions.choose_mode(call, asked, name, config["workers"] or None)
    workers, timeout, rate, most = (config[key] for key in ("workers", "timeout", "rate", "max_failures"))
    if fleet and workers is None and mode == "process":
        workers = 1  # of each slot: how many slots there are, the machines say
    settings = Settings(
        workers=functions.choose_workers(int(workers) if workers else None, mode),
        mode=mode,
        policy=RetryPolicy(int(config["retries"] or 0), float(config["retry_delay"] or 0), jitter=0.5, cap=300.0),
        timeout=None if timeout is None else float(timeout),
        rate=None if rate is None else float(rate),
        max_failures=None if most is None else int(most),
        last_pass=last_pass,
        start=functions.choose_start(call, None, config.text("start")),
        database_option=config.database_option,
    )
    check_settings(settings)
    return settings


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


def _dry_run(order: Order, source: Source) -> int:
    """Say what the same command would do without --dry-run; where that would be refused, so is this."""
    from headway.errors import JobHeld
    from headway.run import check_output
    from headway.run import plan as plans

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


def _run_file(order: Order, source: Source) -> int:
    from headway.ledger import Ledger
    from headway.run import check_output, take
    from headway.run import fleet as fleets
    from headway.run import plan as plans

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


def _run_pipe(order: Order, format: str | None, key: str | None, limit: int) -> int:
    from headway.ledger import Ledger
    from headway.run import describe
    from headway.run import plan as plans
    from headway.run.items import PipedItems
    from headway.run.output import refuse_foreign, refuse_incomplete

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
            feed = PipedItems(job, _standard_input(), format=format, key=key, limit=limit, accept=order.accepts)
        except BaseException:
            ledger.release(hold, "failed")
            raise
        return _perform(order, ledger, job, hold, _greeting(job, None), feed=feed)


def _perform(order: Order, ledger: Ledger, job: Job, hold: Hold, text: str, *, feed: PipedItems | None) -> int:
    from headway.run import perform
    from headway.run.display import open_display

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
    from headway.run import fleet, tell
    from headway.run.display import open_display

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

    from headway.web.beside import Beside

    try:
        beside = Beside(order.config.text("database"))
    except (HeadwayError, OSError) as error:
        display.say(f"There is no page: {redact(str(error))}")
        yield
        return
    display.say(f"Page: {beside.address}/jobs/{quote(job.id, safe='')}")
    try:
        yield
    finally:
        if failed := beside.close():
            display.say(f"The page failed meanwhile, the run did not: {failed}")


def _conclude(order: Order, display: Display, job: Job, ending: Ending) -> int:
    """Say how it ended and what to type next; the exit code."""
    from headway.run.display import RunSnapshot, interrupted, summary, terminal_columns

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


def _check_words() -> None:
    """The command is kept, with the names of files in it, and no database keeps bytes that are no text. Said before anything
    is written; a function's name or an item is checked elsewhere."""
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise InvalidInput(
                f"'{shown}' is not written in UTF-8, so it cannot be kept with the job.",
                hint="Rename the file, or give it another name by a link: ln -s FILE items.jsonl",
            ) from error


def _command() -> str:
    """What to type to continue; it is kept and shown, so a password in it is not."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return redact(shlex.join(["headway", *(word for word in words[:end] if word not in _ONCE), *words[end:]]))


def _standard_input() -> int:
    """Its descriptor, if items can come from there: under cron or a service it is /dev/null, or closed."""
    if sys.stdin is not None:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISCHR(mode) or os.isatty(descriptor):
            return descriptor
    raise InvalidInput(
        "There were no items on standard input: it is closed, or a device such as /dev/null.",
        hint="Pipe some in: ... | headway run --items - ...",
    )


def _is_a_file(descriptor: int) -> bool:
    """Whether standard input was redirected from a file: that can be read again."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
