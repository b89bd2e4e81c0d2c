"""``headway progress`` and ``headway project``: the finish line from the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from headway.cli import F, json_option, say
from headway.cli.toolkit import Number, Whole, confirm, put, put_json, put_json_line, reader_of, yes_option
from headway.config import Config, is_server
from headway.core.lifecycle import Shutdown, on_signals
from headway.errors import NotFound, Unavailable, UsageError
from headway.views.projects import ProjectProgress, project_view

if TYPE_CHECKING:
    from headway.finishline import Answer, FinishLine


def store_options(function: F) -> F:
    """Add ``--projects-redis`` and ``--database`` to a command."""
    database = click.option(
        "--database", "-d", metavar="URL", help="Database with the projects.  [default: none, unless set]"
    )
    redis = click.option(
        "--projects-redis",
        metavar="URL",
        help="Redis with the projects.  [default: database 1 of the setting redis]",
    )
    old = click.option("--state", hidden=True, expose_value=False, callback=_refuse_old_name)
    return redis(old(database(function)))


def _refuse_old_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:  # noqa: ARG001  # click's
    if value is not None:
        raise UsageError("The option --state has another name now.", hint="Say --projects-redis URL")


def open_line(projects_redis: str | None, database: str | None, *, journal: bool = False) -> FinishLine:
    from headway.core.retry import RetryPolicy
    from headway.finishline import FinishLine

    config = Config(cli={"projects_redis": projects_redis, "database": database})
    record = config.text("database") if config.is_set("database") else None
    # A user waits at the terminal: retry once, then report that Redis is unreachable.
    retry = RetryPolicy(retries=1, base=0.5)
    return FinishLine(config.text("projects_redis"), record, journal, checkpointer=False, retry=retry)


@click.command()
@click.argument("project_id")
@click.option("--watch", "-w", is_flag=True, help="Follow it until the project is DONE or FAILED.")
@click.option("--every", metavar="SECONDS", type=Number(0.05, 86_400), default=2.0, show_default=True)
@json_option
@store_options
def progress(
    project_id: str, *, watch: bool, every: float, as_json: bool, projects_redis: str | None, database: str | None
) -> int:
    """Show the progress of a project.

    Exit codes: 2 the project does not exist, 6 Redis is unreachable. With --watch: 0 the project is DONE, 3 it is DONE
    and items failed, 1 it is FAILED.
    """
    config = Config(cli={"projects_redis": projects_redis, "database": database})
    with on_signals(Shutdown()) as shutdown, _asking(config) as ask:
        if not watch:
            found = ask(project_id)
            if as_json:
                put_json(found)
            else:
                put(_in_words(found))
            return 2 if found.status == "NOT_FOUND" else 0
        return _watch(ask, shutdown, project_id, every=every, as_json=as_json)


@contextmanager
def _asking(config: Config) -> Iterator[Callable[[str], ProjectProgress]]:
    """Yield a function that reads progress: from the server that the settings name as the database, else from Redis."""
    if is_server(config.text("database")):
        with reader_of(config) as server:
            yield lambda project_id: _found(server, project_id)
        return
    with open_line(
        config.text("projects_redis"), config.text("database") if config.is_set("database") else None
    ) as line:
        yield lambda project_id: project_view(project_id, line.progress(project_id))


def _found(server: Any, project_id: str) -> ProjectProgress:
    from headway.finishline.progress import NOT_FOUND

    try:
        found: ProjectProgress = server.project(project_id)
    except NotFound:
        return project_view(project_id, NOT_FOUND)
    return found


def _watch(
    ask: Callable[[str], ProjectProgress], shutdown: Shutdown, project_id: str, *, every: float, as_json: bool
) -> int:
    live = sys.stdout is not None and sys.stdout.isatty() and not as_json
    shown: ProjectProgress | None = None
    while not shutdown.stop.is_set():
        try:
            found = ask(project_id)
        except Unavailable as error:
            say(str(error))
        else:
            if found != shown:
                shown = found
                if as_json:
                    put_json_line(found)
                else:
                    put(("\r\x1b[K" if live else "") + _in_words(found), end="" if live else "\n")
            code = {"DONE": 3 if found.errors else 0, "FAILED": 1, "NOT_FOUND": 2}.get(found.status)
            if code is not None:
                if live:
                    put()
                return code
        shutdown.stop.wait(every)
    if live:
        put()
    return shutdown.exit_code


def _in_words(found: ProjectProgress) -> str:
    if found.status == "NOT_FOUND":
        return f"{found.project_id}  NOT_FOUND"
    text = f"{found.project_id}  {found.status}  {found.percent:.1f} %  {found.done:,} of {found.total:,} done"
    text += f", {found.errors:,} of them failed" if found.errors else ""
    if found.restored is not None:
        text += f"  (rebuilt from a checkpoint of {found.restored:%Y-%m-%d %H:%M:%S} UTC: later counts may be missing)"
    return text


@click.group()
def project() -> None:
    """Create, change and delete projects of the finish line."""


@project.command()
@click.argument("project_id")
@click.option("--total", type=Whole(), default=0, help="Number of items, if known.")
@click.option("--journal", is_flag=True, help="Store every count in the database, so that nothing is lost with Redis.")
@store_options
def create(project_id: str, *, total: int, journal: bool, projects_redis: str | None, database: str | None) -> None:
    """Create a project. An existing one is not changed."""
    with open_line(projects_redis, database, journal=journal) as line:
        found = line.create(project_id, total)
        put(_in_words(project_view(project_id, found)))
        if not found.live:
            say("Redis is away: the project is recorded and gets there when it is back.")


@project.command()
@click.argument("project_id")
@click.argument("total", type=Whole())
@store_options
def total(project_id: str, total: int, *, projects_redis: str | None, database: str | None) -> None:
    """Set the number of items."""
    with open_line(projects_redis, database) as line:
        _say_answer(line.set_total(project_id, total))


@project.command()
@click.argument("project_id")
@click.argument("status", metavar="INITIALIZING|CRAWLING|PROCESSING|FAILED")
@store_options
def status(project_id: str, status: str, *, projects_redis: str | None, database: str | None) -> None:
    """Set the status. A project that is CRAWLING or FAILED cannot complete."""
    with open_line(projects_redis, database) as line:
        _say_answer(line.set_status(project_id, status.upper()))


@project.command("finish-crawl")
@click.argument("project_id")
@click.option("--total", type=Whole(), help="Number of items, if it is not set yet.")
@store_options
def finish_crawl(project_id: str, *, total: int | None, projects_redis: str | None, database: str | None) -> None:
    """Declare that all items are known. The project completes when all are counted."""
    with open_line(projects_redis, database) as line:
        _say_answer(line.finish_crawl(project_id, total))


@project.command()
@click.argument("project_id")
@yes_option
@store_options
def delete(project_id: str, *, yes: bool, projects_redis: str | None, database: str | None) -> int:
    """Delete a project and its counts."""
    with open_line(projects_redis, database) as line:
        confirm(f"Delete project {project_id} and everything counted in it?", yes=yes)
        if line.delete(project_id):
            put(f"{project_id} is deleted.")
            return 0
        say(f"There is no project {project_id!r}.")
        return 2


def _say_answer(answer: Answer) -> None:
    put(answer.outcome.value)
