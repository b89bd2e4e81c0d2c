"""``headway states``: show, follow, wait for and delete the states of a job's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headway import states
from headway.cli import F, json_option, say
from headway.cli.toolkit import (
    MOST_DAYS,
    Number,
    Whole,
    clock,
    confirm,
    put,
    put_json,
    put_json_line,
    put_table,
    reader_of,
    yes_option,
)
from headway.config import Config
from headway.core.text import plural, printable
from headway.errors import InvalidInput
from headway.states import FINISHED, STARTED, Manager, WentBack
from headway.views.shape import iso
from headway.views.states import StateEvent, event_view

if TYPE_CHECKING:
    from headway.views.states import State

WORDS = {"not-started": 0, "started": STARTED, "finished": FINISHED}


class _JobOrVerb(click.Group):
    """Accepts ``headway states JOB``. Subcommands come first; for a job named like one use ``states show JOB``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


def store_option(function: F) -> F:
    return click.option(
        "--store",
        "-s",
        metavar="URL",
        help="Store of the states: sqlite, postgresql, redis or firestore.  [default: the setting states]",
    )(function)


def _url(store: str | None) -> str:
    return Config(cli={"states": store}).text("states")


def _monitor(store: str | None, job: str) -> Manager:
    """Open the states of an existing job, read-only."""
    opened, num_tasks = states.open_store(_url(store), job)
    return Manager(job, 0, num_tasks, opened)


@click.group("states", cls=_JobOrVerb, no_args_is_help=True)
def group() -> None:
    """Show the state of each task of a job: headway states JOB [--follow].

    The status of a job is the lowest status of its tasks.
    """


@group.command()
@click.argument("job")
@click.option("--task", type=Whole(), metavar="N", help="Only this task.")
@click.option("--tag", metavar="T", help="Only this tag.")
@click.option("--follow", "-f", is_flag=True, help="Print every change until Ctrl-C.")
@store_option
@json_option
def show(job: str, task: int | None, tag: str | None, follow: bool, store: str | None, as_json: bool) -> None:
    """Show the states of JOB."""
    if follow:
        with _monitor(store, job) as manager:
            _follow(manager, task, tag, as_json)
        return
    with reader_of(Config(cli={"states": store}), "states") as reader:
        found = reader.states(job, task=task, tag=tag)
    if as_json:
        put_json(found)
        return
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found.counts.items() if count)
    say(f"{job}: {plural(found.num_tasks, 'task')}; {counts}. The lowest is {_describe(found.state)}.")
    if found.worst_error is not None:
        say(f"Worst error: {_describe(found.worst_error)}.")
    if found.states:
        rows = [
            [
                str(state.task_id), state.tag, _word(state.status), str(state.version), clock(state.timestamp),
                state.message,
            ]
            for state in found.states
        ]  # fmt: skip
        heads = ["TASK", "TAG", "STATUS", "VERSION", "UPDATED", "MESSAGE"]
        put_table(heads, rows, right=("TASK", "VERSION"), whole=("STATUS",), drop=("VERSION", "UPDATED"))


def _follow(manager: Manager, task: int | None, tag: str | None, as_json: bool) -> None:
    """Print changes until Ctrl-C or until the job is deleted. After a restored backup, start over."""
    while True:
        try:
            with manager.subscribe(task_id=task, tag=tag) as subscription:
                for event in subscription:
                    _put_event(event_view(event), as_json)
                return
        except WentBack as error:
            if as_json:
                put_json_line(StateEvent("went_back", None))
            say(str(error))


def _put_event(event: StateEvent, as_json: bool) -> None:
    if as_json:
        put_json_line(event)
    elif event.state is not None:
        if isinstance(event.skipped, int):
            say(f"-- {event.skipped} changes of the next were skipped: the output is too slow --")
        state = event.state
        put(
            f"{state.task_id:<5} {printable(state.tag):<20} {_word(state.status):<11} {state.version:<8} "
            f"{clock(state.timestamp):<20}  {printable(state.message)}".rstrip()
        )
    else:
        say("-- these are the current states; changes follow --")


@group.command()
@click.argument("job")
@click.option("--tag", required=True, metavar="T", help="The tag to wait for.")
@click.option("--status", default="finished", show_default=True, metavar="S", help="started, finished, or a number.")
@click.option("--timeout", type=Number(), metavar="SECONDS", help="Time limit.  [default: none]")
@click.option("--ignore-errors", is_flag=True, help="Continue to wait when a task reports an error.")
@store_option
def wait(job: str, tag: str, status: str, timeout: float | None, ignore_errors: bool, store: str | None) -> None:
    """Wait until every task of JOB has reached a status with a tag.

    Exit codes: 0 all tasks have reached it, 3 a task reported an error, 1 the timeout has passed, 2 JOB was deleted.
    """
    with _monitor(store, job) as manager:
        manager.wait_for(tag, _status(status), timeout=timeout, ignore_errors=ignore_errors)
    say(f"All {manager.num_tasks:,} tasks of {job} have reached {status} with {tag}.")


@group.command()
@store_option
@json_option
def jobs(store: str | None, as_json: bool) -> None:
    """List the jobs that have states."""
    with reader_of(Config(cli={"states": store}), "states") as reader:
        found = reader.states_jobs()
    if as_json:
        put_json(found)
        return
    for one in found.jobs:
        put(f"{one.job}\t{one.num_tasks}\t{iso(one.created_at) or ''}\t{'deleted' if one.deleted else ''}")


@group.command()
@click.argument("job")
@click.option("--mark", is_flag=True, help="Only mark the job as deleted; the next purge removes it.")
@yes_option
@store_option
def delete(job: str, mark: bool, yes: bool, store: str | None) -> None:
    """Delete JOB with all its states."""
    confirm(f"Delete job {job} with all its states?", yes=yes)
    (states.mark_job_deleted if mark else states.delete_job)(_url(store), job)
    say(f"{job} is {'marked as deleted' if mark else 'deleted'}.")


@group.command()
@click.option(
    "--older-than",
    type=Number(0, MOST_DAYS),
    metavar="DAYS",
    help="Include finished jobs unchanged for this many days.",
)
@store_option
def purge(older_than: float | None, store: str | None) -> None:
    """Remove jobs marked as deleted, and with --older-than those that finished long ago."""
    removed = states.purge(_url(store), older_than=None if older_than is None else older_than * 86_400)
    for job in removed:
        put(job)
    say(f"{plural(len(removed), 'job')} removed.")


def _status(text: str) -> int:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a status.", hint="Use started, finished, or a number above 0.") from None


def _word(status: int) -> str:
    for word, number in WORDS.items():
        if status == number:
            return word
    return str(status)


def _describe(state: State) -> str:
    tag = f" {printable(state.tag)}" if state.tag else ""
    message = f" ({printable(state.message)})" if state.message else ""
    return f"task {state.task_id}{tag}: {_word(state.status)}{message}"
