"""``headway progress`` and ``headway project``: the finish line from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headway.cli import json_option, say
from headway.config import Config
from headway.errors import Unavailable
from headway.lifecycle import Shutdown, on_signals

if TYPE_CHECKING:
    from headway.finishline import Answer, FinishLine, Progress

F = TypeVar("F", bound=Callable[..., Any])  # click's decorators take and give any function


def place_options(function: F) -> F:
    """Where projects live, the same on every command here."""
    database = click.option(
        "--database", "-d", metavar="URL", help="The projects' record.  [default: none, unless the settings name one]"
    )
    state = click.option("--state", metavar="URL", help="Redis with the state.  [default: redis://localhost:6379/1]")
    return state(database(function))


def open_line(state: str | None, database: str | None, *, journal: bool = False) -> FinishLine:
    from headway.finishline import FinishLine
    from headway.retry import RetryPolicy

    config = Config(cli={"state": state, "database": database})
    record = config.text("database") if config.origin("database") != "default" else None
    # Somebody waits at the terminal: one more try, and then the answer is that Redis is away.
    return FinishLine(config.text("state"), record, journal, checkpointer=False, retry=RetryPolicy(retries=1, base=0.5))


@click.command()
@click.argument("project_id")
@click.option("--watch", "-w", is_flag=True, help="Go on until the project is DONE or FAILED.")
@click.option("--every", metavar="SECONDS", type=click.FloatRange(min=0.05), default=2.0, show_default=True)
@json_option
@place_options
def progress(
    project_id: str, *, watch: bool, every: float, as_json: bool, state: str | None, database: str | None
) -> int:
    """How far a project is.

    Ends with 2 when there is no such project and with 6 when Redis is away. With --watch: 0 when the project is
    DONE, 3 when it is and items failed, 1 when it is FAILED.
    """
    with on_signals(Shutdown()) as shutdown, open_line(state, database) as line:
        if not watch:
            found = line.progress(project_id)
            click.echo(_shown(project_id, found, as_json=as_json))
            return 2 if found.status == "NOT_FOUND" else 0
        return _watch(line, shutdown, project_id, every=every, as_json=as_json)


def _watch(line: FinishLine, shutdown: Shutdown, project_id: str, *, every: float, as_json: bool) -> int:
    live = sys.stdout.isatty() and not as_json
    shown = ""
    while not shutdown.stop.is_set():
        try:
            found = line.progress(project_id)
        except Unavailable as error:
            say(str(error))
        else:
            text = _shown(project_id, found, as_json=as_json)
            if text != shown:
                click.echo(("\r\x1b[K" if live else "") + text, nl=not live)
                shown = text
            code = {"DONE": 3 if found.errors else 0, "FAILED": 1, "NOT_FOUND": 2}.get(found.status)
            if code is not None:
                if live:
                    click.echo()
                return code
        shutdown.stop.wait(every)
    if live:
        click.echo()
    return shutdown.exit_code


def _shown(project_id: str, found: Progress, *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"schema": 1, "project_id": project_id, **found.as_dict()})
    if found.status == "NOT_FOUND":
        return f"{project_id}  NOT_FOUND"
    text = f"{project_id}  {found.status}  {found.percent:.1f} %  {found.done:,} of {found.total:,} done"
    text += f", {found.errors:,} of them failed" if found.errors else ""
    if found.restored is not None:
        text += f"  (rebuilt from a checkpoint of {found.restored:%Y-%m-%d %H:%M:%S} UTC: later counts may be missing)"
    return text


@click.group()
def project() -> None:
    """Begin, change and delete projects of the finish line."""


@project.command()
@click.argument("project_id")
@click.option("--total", type=click.IntRange(min=0), default=0, help="How many items there are, if that is known.")
@click.option("--journal", is_flag=True, help="Keep every count in the database, so that all of it can be rebuilt.")
@place_options
def create(project_id: str, *, total: int, journal: bool, state: str | None, database: str | None) -> None:
    """Begin a project; one that exists is left as it is."""
    with open_line(state, database, journal=journal) as line:
        found = line.create(project_id, total)
        click.echo(_shown(project_id, found, as_json=False))
        if not found.live:
            say("Redis is away: the project is recorded and gets there when it is back.")


@project.command()
@click.argument("project_id")
@click.argument("total", type=click.IntRange(min=0))
@place_options
def total(project_id: str, total: int, *, state: str | None, database: str | None) -> None:
    """Set how many items there are."""
    with open_line(state, database) as line:
        _say_answer(line.set_total(project_id, total))


@project.command()
@click.argument("project_id")
@click.argument("status", metavar="INITIALIZING|CRAWLING|PROCESSING|FAILED")
@place_options
def status(project_id: str, status: str, *, state: str | None, database: str | None) -> None:
    """Set the status. Nothing completes while it is CRAWLING or FAILED."""
    with open_line(state, database) as line:
        _say_answer(line.set_status(project_id, status.upper()))


@project.command("finish-crawl")
@click.argument("project_id")
@click.option("--total", type=click.IntRange(min=0), help="How many items were found, if it is not set yet.")
@place_options
def finish_crawl(project_id: str, *, total: int | None, state: str | None, database: str | None) -> None:
    """All items are known: the project completes when they are through."""
    with open_line(state, database) as line:
        _say_answer(line.finish_crawl(project_id, total))


@project.command()
@click.argument("project_id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@place_options
def delete(project_id: str, *, yes: bool, state: str | None, database: str | None) -> int:
    """Forget a project and everything counted in it."""
    with open_line(state, database) as line:
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("This deletes recorded work. Say --yes to do it without being asked.")
            click.confirm(f"Delete project {project_id} and everything counted in it?", abort=True)
        if line.delete(project_id):
            click.echo(f"{project_id} is deleted.")
            return 0
        say(f"There is no project {project_id!r}.")
        return 2


def _say_answer(answer: Answer) -> None:
    click.echo(answer.outcome.value)
