"""``headway run``: options and their validation."""

from __future__ import annotations

import json
import os
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from headway.cli import database_option, say, typed
from headway.errors import HeadwayError, InvalidInput, UsageError

if TYPE_CHECKING:
    from headway.config import Config
    from headway.run.fleet.start import FleetOptions
    from headway.run.program import Work


class RunCommand(click.Command):
    """A command that keeps everything after ``--`` as a program with its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "{MODULE:FUNCTION | -- PROGRAM [ARGUMENT]...}"]


PROGRAM = "headway.program"


@click.command(cls=RunCommand)
@click.argument("function", metavar="MODULE:FUNCTION", required=False)
@click.option(
    "--items",
    "-i",
    required=True,
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Items: JSON lines, a JSON array, CSV, TSV or plain lines, or one of them as .gz; - for a pipe.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", "json", "csv", "tsv", "lines"]),
    help="Format, if the file's name does not show it; json is an array.",
)
@click.option("--job", "-j", metavar="ID", help="Job id.  [default: made of function and file]")
@database_option
@click.option("--workers", "-w", type=click.IntRange(0), help="Number of items at once; 0, the default: one per core.")
@click.option("--mode", type=click.Choice(["process", "thread", "async"]), help="How items run.  [default: process]")
@click.option("--retries", type=click.IntRange(0), help="Retries of an item that failed.  [default: 2]")
@click.option(
    "--retry-delay",
    type=float,
    metavar="SECONDS",
    help="Delay of the first retry; doubles with each further one.  [default: 1]",
)
@click.option("--later-limit", metavar="N/TIME", help="How often an item may be postponed.  [default: 100/24h]")
@click.option("--later", type=float, metavar="SECONDS", help="Delay of a program with exit status 75.  [default: 30]")
@click.option("--setup", metavar="MODULE:FUNCTION", help="What each worker opens and passes to the function.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Time limit of one item.")
@click.option("--rate", type=float, metavar="N", help="Start at most N items per second.")
@click.option("--key", metavar="FIELD", help="Field that identifies an item; then lines may be added and moved.")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write results to x.jsonl or x.csv."
)
@click.option("--results/--no-results", default=True, help="Keep the results of items.  [default: on]")
@click.option(
    "--keep-output",
    type=click.Choice(["failed", "all", "none"]),
    default="failed",
    help="Items whose output is kept.  [default: failed]",
)
@click.option("--stdin", is_flag=True, help="Pass the item to the program on standard input.")
@click.option("--stdout", type=click.Choice(["text", "json"]), help="Format of the program's output.  [default: text]")
@click.option("--max-failures", type=click.IntRange(1), metavar="N", help="Stop when N items have died in this run.")
@click.option("--last-pass/--no-last-pass", default=True, help="Retry dead letters once at the end.  [default: on]")
@click.option("--fleet", is_flag=True, help="Run on the workers of all machines (headway worker); needs PostgreSQL.")
@click.option("--slots", type=click.IntRange(1, 10_000), help="Maximum number of workers.  [default: all]")
@click.option("--priority", type=click.Choice(["urgent", "high", "normal", "low"]), help="Priority of a fleet's job.")
@click.option("--detach", is_flag=True, help="Return at once; the fleet runs the job.")
@click.option("--any-version", is_flag=True, help="Allow workers whose code or packages differ.")
@click.option("--fresh", is_flag=True, help="Start over; earlier records are archived.")
@click.option("--accept-changes", is_flag=True, help="Accept that items or the function changed.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--progress", type=click.Choice(["auto", "bar", "plain", "json", "none"]), help="How to show progress.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="Colours on the terminal.")
@click.option("--serve", is_flag=True, help="Serve the job's page on this machine while it runs, and print its URL.")
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
    retry_delay: float | None,
    later_limit: str | None,
    later: float | None,
    setup: str | None,
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
    """Call MODULE:FUNCTION with every item, or run PROGRAM for it, and record the outcome of each.

    In the program's arguments {} is the item, {FIELD} one of its fields, {key} its key and {index} its number.

    The same command continues an interrupted or killed run. Exit codes: 0 all items done, 3 finished but some items
    are dead, 4 stopped by --max-failures, 5 refused (another process runs it, or the items changed), 130 or 143
    interrupted, state saved.
    """
    from headway import telemetry
    from headway.cli.jobs import run_request
    from headway.config import Config
    from headway.core.ids import check_id
    from headway.core.lifecycle import Shutdown, on_signals
    from headway.core.setup import checked
    from headway.run import function as functions
    from headway.run.items import FileItems, WatchedItems
    from headway.run.output.results import Keep
    from headway.run.program import Program
    from headway.run.session import RunRequest, configured_sinks
    from headway.run.settings import settings_of

    with warnings.catch_warnings(record=True) as caught:
        config = Config(
            cli={
                "database": database, "workers": workers, "mode": mode, "retries": retries, "retry_delay": retry_delay,
                "timeout": timeout, "rate": rate, "max_failures": max_failures, "progress": progress, "color": color,
                "later_limit": later_limit,
            }
        )  # fmt: skip
    # With JSON progress, errors on stderr are JSON lines too.
    as_lines = config["log_format"] == "json" or config["progress"] == "json"
    telemetry.configure(level=config.text("log_level").upper(), as_json=as_lines)
    for warning in caught:
        if config["progress"] == "json":
            say(json.dumps({"t": _now(), "event": "warning", "message": str(warning.message)}))
        else:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    with _errors_as_progress(config):
        _check_words()
        if output is not None and not results:
            raise UsageError(
                "--output needs results, and --no-results keeps none.", hint="Leave out --no-results or --output."
            )
        if serve:
            from headway.web import run_page as beside

            beside.check()
        work = _work(function, ctx.meta.get(PROGRAM), stdin=stdin, stdout=stdout, key=key, later=later, setup=setup)
        name = work.text if isinstance(work, Program) else function or ""
        options = None
        if fleet:
            program = _program_facts(ctx.meta.get(PROGRAM), stdin=stdin, stdout=stdout, key=key, later=later)
            options = _fleet_options(
                config, work, program, slots, priority, setup, any_version=any_version, items=items
            )
        elif detach or slots or priority or any_version:
            raise UsageError("--slots, --priority, --detach and --any-version need --fleet.", hint="Add --fleet.")
        if detach and (output is not None or serve):
            raise UsageError(
                "--detach returns at once, so it cannot write a file or serve a page.",
                hint="Later:  headway results JOB --output FILE,  headway serve",
            )
        opens = None if setup is None else functions.load_any(setup)
        settings = settings_of(config, work, name, last_pass=last_pass, fleet=fleet, setup=opens)
        request = RunRequest(
            config, settings, work, name, Shutdown(),
            Keep(results=results, printed=keep_output), output,
            configured_sinks(config),  # before anything is written, because an address may be wrong
            fleet=options, fresh=fresh, accept_changes=accept_changes, command=run_request.command(),
            setup=None if setup is None else checked(opens, loop=settings.mode == "async", name="--setup"),
        )  # fmt: skip
        order = run_request.Order(request, None if job is None else check_id(job, "a job id"), serve, as_json, detach)
        limit = int(config["payload_limit"] or 0)
        with on_signals(request.shutdown):
            if items == "-" and not _is_a_file(pipe := _standard_input()):
                if dry_run or accept_changes:
                    raise InvalidInput(
                        "A pipe can be read only once, so --dry-run and --accept-changes cannot compare it.",
                        hint="Use a file.",
                    )
                return run_request.run_pipe(order, pipe, format_, key, limit)
            path = Path("/dev/stdin" if items == "-" else items)
            file = FileItems(path, format=format_, key=key, limit=limit, name=items, accept=order.accepts)
            source = WatchedItems(file, request.shutdown, order.display().say)
            return run_request.dry_run(order, source) if dry_run else run_request.run_file(order, source)


@contextmanager
def _errors_as_progress(config: Config) -> Iterator[None]:
    """Print errors as JSON lines with ``--progress json``."""
    try:
        yield
    except HeadwayError as error:
        if config["progress"] != "json":
            raise
        facts = {"message": str(error), "hint": typed(error.hint), "exit_code": error.exit_code}
        say(json.dumps({"t": _now(), "event": "error", **facts}))
        raise click.exceptions.Exit(error.exit_code) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _work(
    function: str | None,
    words: Sequence[str] | None,
    *,
    stdin: bool,
    stdout: Literal["text", "json"] | None,
    key: str | None,
    later: float | None,
    setup: str | None,
) -> Work:
    """Return the named function or program."""
    from headway.run import function as functions
    from headway.run.program import LATER_SECONDS, Program

    if words is not None:
        if function is not None:
            raise UsageError(
                f"Both a function ({function}) and a program (after --) were given.", hint="Leave one out."
            )
        if setup is not None:
            raise UsageError("--setup is for functions, and a program starts anew for each item.", hint="Leave it out.")
        return Program(
            words, stdin=stdin, stdout=stdout or "text", key=key, later=LATER_SECONDS if later is None else later
        )
    if function is None:
        raise UsageError(
            "No function or program was given.",
            hint="headway run module:function --items FILE, or headway run --items FILE -- program {}",
        )
    if stdin or stdout or later is not None:
        option = "--stdin" if stdin else "--stdout" if stdout else "--later"
        raise UsageError(
            f"{option} is for programs, and {function} is a function.",
            hint="A program and its arguments come after --",
        )
    return functions.load(function, 1 if setup is None else 2)


def _program_facts(words: Sequence[str] | None, *, later: float | None, **options: Any) -> dict[str, Any] | None:
    """Return the arguments from which a slot builds the `Program`, or None for a function."""
    if words is None:
        return None
    facts = {"words": words, **options, "stdout": options["stdout"] or "text"}
    return facts if later is None else facts | {"later": later}


def _fleet_options(
    config: Config,
    work: Work,
    program: dict[str, Any] | None,
    slots: int | None,
    priority: str | None,
    setup: str | None,
    *,
    any_version: bool,
    items: str,
) -> FleetOptions:
    """Return the validated fleet options."""
    from headway.run.fleet.start import FleetOptions, check

    if items == "-" and not _is_a_file(_standard_input()):
        raise UsageError(
            "A fleet needs all items at the start, so it cannot read a pipe.", hint="Write them to a file."
        )
    options = FleetOptions(slots, priority or "normal", any_version, program, setup)
    check(config, work, options)
    return options


def _check_words() -> None:
    """Refuse arguments that are not UTF-8, because the command is stored with the job as text."""
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise InvalidInput(
                f"'{shown}' is not UTF-8, so it cannot be stored with the job.",
                hint="Rename the file, or link to it: ln -s FILE items.jsonl",
            ) from error


def _standard_input() -> int:
    """Return the descriptor of standard input. Refuse /dev/null and a closed one, as under cron or a service."""
    if sys.stdin is not None:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISCHR(mode) or os.isatty(descriptor):
            return descriptor
    raise InvalidInput(
        "There are no items on standard input: it is closed, or a device such as /dev/null.",
        hint="Pipe some in: ... | headway run --items - ...",
    )


def _is_a_file(descriptor: int) -> bool:
    """Return whether standard input was redirected from a file, which can be read again."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
