"""``headway states``: where each task of a job is, followed live, waited for, and cleaned up."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from headway import states
from headway.cli import F, json_option, say
from headway.config import Config
from headway.errors import InvalidInput
from headway.states import FINISHED, STARTED, Manager, State, StateEvent, Subscription, WentBack

WORDS = {"not-started": 0, "started": STARTED, "finished": FINISHED}


class _JobOrVerb(click.Group):
    """``headway states JOB`` shows a job. Verbs are taken first; a job named like one is shown by ``states show wait``."""

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
        help="Where the states are kept: sqlite, postgresql, redis or firestore.  [default: as the settings say]",
    )(function)


def _url(store: str | None) -> str:
    config = Config(cli={"states": store})
    return config.text("states") if config["states"] is not None else config.text("database")


def _monitor(store: str | None, job: str) -> Manager:
    """A view of a job that exists. It is bound to task 0 and never writes."""
    opened, num_tasks = states.open_store(_url(store), job)
    return Manager(job, 0, num_tasks, opened)


@click.group("states", cls=_JobOrVerb, no_args_is_help=True)
def group() -> None:
    """Where each task of a job is: headway states JOB [--follow].

    The status of a whole is its lowest: a job is as far as the task that is least far.
    """


@group.command()
@click.argument("job")
@click.option("--task", type=int, metavar="N", help="Only this task.")
@click.option("--tag", metavar="T", help="Only this tag.")
@click.option("--follow", "-f", is_flag=True, help="Go on and show every change; Ctrl-C ends it.")
@store_option
@json_option
def show(job: str, task: int | None, tag: str | None, follow: bool, store: str | None, as_json: bool) -> None:
    """Show the states of JOB."""
    with _monitor(store, job) as manager:
        if follow:
            _follow(manager, task, tag, as_json)
            return
        with manager.subscribe(task_id=task, tag=tag) as subscription:
            current = sorted(_current(subscription), key=lambda state: state.key)
        decided = manager.get_state(task_id=task, tag=tag)
        summary = manager.summary(tag=tag)
    if as_json:
        _print_json(
            {
                "schema": "headway.states/1",
                "job": job,
                "num_tasks": manager.num_tasks,
                "state": decided.as_dict(),
                "counts": dict(summary.counts),
                "worst_error": None if summary.worst_error is None else summary.worst_error.as_dict(),
                "states": [state.as_dict() for state in current],
            }
        )
        return
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.counts.items() if count)
    say(f"{job}: {manager.num_tasks} tasks; {counts}. The lowest is {_describe(decided)}.")
    if summary.worst_error is not None:
        say(f"Worst error: {_describe(summary.worst_error)}.")
    if current:
        _print_row("TASK", "TAG", "STATUS", "VERSION", "UPDATED", "MESSAGE")
    for state in current:
        _print_state(state)


def _current(subscription: Subscription) -> list[State]:
    found = []
    while (state := subscription.get().state) is not None:
        found.append(state)
    return found


def _follow(manager: Manager, task: int | None, tag: str | None, as_json: bool) -> None:
    """Until Ctrl-C, or until the job is gone. A store that went back in time is told from the beginning."""
    while True:
        try:
            with manager.subscribe(task_id=task, tag=tag) as subscription:
                for event in subscription:
                    _print_event(event, as_json)
                return
        except WentBack as error:
            if as_json:
                _print_json({"event": "went_back", "state": None})
            say(str(error))


def _print_event(event: StateEvent, as_json: bool) -> None:
    if as_json:
        kind = "replay_complete" if event.state is None else "replay" if event.replay else "change"
        found = None if event.state is None else event.state.as_dict()
        _print_json({"event": kind, "state": found} | ({"skipped": event.skipped} if event.skipped else {}))
    elif event.state is not None:
        if event.skipped:
            say(f"-- {event.skipped} changes of the next were skipped: the output is too slow --")
        _print_state(event.state)
    else:
        say("-- that is what stands; changes follow --")
    sys.stdout.flush()


@group.command()
@click.argument("job")
@click.option("--tag", required=True, metavar="T", help="The tag to wait for.")
@click.option("--status", default="finished", show_default=True, metavar="S", help="started, finished, or a number.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after so long.  [default: never]")
@click.option("--ignore-errors", is_flag=True, help="Go on waiting when a task reports an error.")
@store_option
def wait(job: str, tag: str, status: str, timeout: float | None, ignore_errors: bool, store: str | None) -> None:
    """Wait until every task of JOB has reached a status with a tag.

    Ends with 0 when they have, 3 when a task reported an error, 1 when it took too long, 2 when JOB was deleted.
    """
    with _monitor(store, job) as manager:
        manager.wait_for(tag, _status(status), timeout=timeout, ignore_errors=ignore_errors)
    say(f"All {manager.num_tasks} tasks of {job} have reached {status} with {tag}.")


@group.command()
@store_option
@json_option
def jobs(store: str | None, as_json: bool) -> None:
    """List the jobs whose states are kept."""
    found = states.list_jobs(_url(store))
    if as_json:
        rows = [
            {
                "job": record.job_id,
                "num_tasks": record.num_tasks,
                "created_at": None if record.created_at is None else record.created_at.isoformat(),
                "deleted": record.deleted,
                "history": record.history,
            }
            for record in found
        ]
        _print_json({"schema": "headway.states.jobs/1", "jobs": rows})
        return
    for record in found:
        made = "" if record.created_at is None else f"{record.created_at:%Y-%m-%dT%H:%M:%SZ}"
        click.echo(f"{record.job_id}\t{record.num_tasks}\t{made}\t{'deleted' if record.deleted else ''}")


@group.command()
@click.argument("job")
@click.option("--mark", is_flag=True, help="Only leave a tombstone; the next purge removes the job.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@store_option
def delete(job: str, mark: bool, yes: bool, store: str | None) -> None:
    """Delete JOB with all its states."""
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidInput(f"Deleting {job} must be confirmed.", hint="Say it on the command line: --yes")
        click.confirm(f"Delete the job {job} and all its states?", abort=True, err=True)
    (states.mark_job_deleted if mark else states.delete_job)(_url(store), job)
    say(f"{job} is {'marked as deleted' if mark else 'deleted'}.")


@group.command()
@click.option("--older-than", type=float, required=True, metavar="DAYS", help="Days since the last state was written.")
@store_option
def purge(older_than: float, store: str | None) -> None:
    """Remove jobs that finished long ago, and those marked as deleted."""
    removed = states.purge(_url(store), older_than=older_than * 86_400)
    for job in removed:
        click.echo(job)
    say(f"{len(removed)} jobs removed.")


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
    tag = f" {state.tag}" if state.tag else ""
    message = f" ({_plain(state.message)})" if state.message else ""
    return f"task {state.task_id}{tag}: {_word(state.status)}{message}"


def _print_state(state: State) -> None:
    updated = "" if state.timestamp is None else f"{state.timestamp:%Y-%m-%dT%H:%M:%SZ}"
    _print_row(state.task_id, state.tag, _word(state.status), state.version, updated, _plain(state.message))


def _print_row(task: object, tag: str, status: str, version: object, updated: str, message: str) -> None:
    click.echo(f"{task:<5} {tag:<20} {status:<11} {version:<8} {updated:<20}  {message}".rstrip())


def _plain(text: str) -> str:
    """A message comes from elsewhere: it must not move the cursor or colour the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))
