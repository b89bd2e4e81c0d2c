"""``worker`` runs tasks; ``queues``, ``tasks``, ``task``, ``queue`` and ``workers`` show and control them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import (
    Number,
    Whole,
    clock,
    confirm,
    limit_option,
    open_reader,
    open_store,
    put,
    put_json,
    put_table,
    yes_option,
)
from headway.core.text import duration, plural
from headway.errors import InvalidInput, UsageError

if TYPE_CHECKING:
    from headway.queue.task import Priority
    from headway.queue.task_queue import TaskQueue
    from headway.views.queue import TaskView

QUEUES = ("urgent", "high", "normal", "low")
_QUEUE = click.Choice(QUEUES)


def open_queue(database: str | None) -> TaskQueue:
    """Open the queue without its application: enough to show and control tasks, not to run them."""
    from headway.queue.settings import declared_per_user
    from headway.queue.task_queue import TaskQueue

    store = open_store(database)
    return TaskQueue(store, per_user=declared_per_user(store))


def who() -> str:
    """Return the name of the current user, for the audit trail."""
    from headway.ledger.store.audit import current_user

    return current_user()


@click.command()
@click.option(
    "--app",
    metavar="MODULE:NAME",
    help="The application's queue, its Flask application, or a factory of either.  [default: only slots of fleets]",
)
@click.option("--queues", metavar="NAME[,NAME]", help="Serve only these, in this order.  [default: all four]")
@click.option("--workers", type=Whole(1, 1000), help="Worker processes at least.  [default: queue_workers, 1]")
@click.option(
    "--max-workers", type=Whole(1, 1000), help="And at most, under load.  [default: queue_max_workers, as many]"
)
@click.option("--burst", is_flag=True, help="Exit when no task is left.")
@click.option(
    "--drain",
    type=Number(0, 86_400),
    metavar="SECONDS",
    help="Time to finish current tasks at shutdown; then they return to their queue.  [default: queue_drain, 30]",
)
@click.option("--parent", type=Whole(1), hidden=True, help="Exit when this process is no longer the parent.")
@database_option
def worker(
    *,
    database: str | None,
    app: str | None,
    queues: str | None,
    workers: int | None,
    max_workers: int | None,
    burst: bool,
    drain: float | None,
    parent: int | None,
) -> int:
    """Run the tasks of an application's queue, and take part in fleets (headway run --fleet).

    One supervisor starts the worker processes, adds more under load and replaces those that crash. The first Ctrl-C or
    SIGTERM lets current tasks finish; a second one ends them at once. Options that are not given follow the settings, also
    while the worker runs: see 'headway queue settings'.
    """
    from headway.cli.services.background import attending
    from headway.core.lifecycle import Shutdown, on_signals
    from headway.queue.worker import supervisor
    from headway.run.fleet.slot import load
    from headway.run.fleet.start import Fleets

    if database is not None:
        if app is not None:
            raise UsageError(
                f"--database is for a worker without --app: {app} names the database of its queue.",
                hint="Leave one of them out.",
            )
        os.environ["HEADWAY_DATABASE"] = database  # the worker processes inherit it
    chosen = _chosen(queues)
    # systemd may send SIGTERM to every process. With Gunicorn's own that makes two, and both mean "finish your tasks".
    shutdown = Shutdown() if parent is None else supervisor.WorkerShutdown()
    with on_signals(shutdown), load(app or "") as queue:
        given = {"queue_workers": workers, "queue_max_workers": max_workers, "queue_drain": drain}
        given = {name: value for name, value in given.items() if value is not None}
        live = supervisor.live_settings(queue, given)
        supervisor.log_as_configured(live.config)
        live.refresh()
        now = live.in_force
        plan = supervisor.Plan(
            app or "", now.workers, now.max_workers, chosen, now.drain, given, module="headway.run.fleet.slot"
        )
        if burst:
            supervisor.work_off(queue, plan, shutdown=shutdown)
            return 0
        say(f"Serving {', '.join(queue.value for queue in chosen)} with {plural(now.workers, 'worker')}.")
        with attending(live.config, queue.database):
            chores = [Fleets(queue)]
            supervisor.Supervisor(queue, plan, shutdown=shutdown, parent=parent, live=live, chores=chores).run()
    return shutdown.exit_code if shutdown.abandon.is_set() else 0


def _chosen(queues: str | None) -> tuple[Priority, ...]:
    """Parse the option ``--queues``."""
    from headway.queue.task import PRIORITIES, Priority

    if queues is None:
        return PRIORITIES
    names = [name.strip() for name in queues.split(",") if name.strip()]
    if not names or any(name not in QUEUES for name in names):
        raise InvalidInput(f"{queues!r} does not name queues.", hint=f"Use some of {', '.join(QUEUES)}.")
    return tuple(Priority(name) for name in names)


@click.command()
@json_option
@database_option
def queues(database: str | None, *, as_json: bool) -> None:
    """Show the four queues in order of service."""
    with open_reader(database) as reader:
        found = reader.queues()
    if as_json:
        put_json(found)
        return
    nobody = "no worker is online:" if found.workers_online == 0 else "no worker runs"
    rows = [
        [
            view.queue, f"{view.waiting:,}", f"{view.delayed:,}", f"{view.running:,}",
            "" if view.oldest_wait is None else duration(view.oldest_wait), f"{view.completed:,}", f"{view.failed:,}",
            f"{view.completed_total:,}", f"{view.failed_total:,}",
            "; ".join(
                [f"paused by {view.paused_by}: {view.reason}"] * view.paused
                + [f"{nobody} {', '.join(view.unserved)}"] * bool(view.unserved)
            ),
        ]
        for view in found.queues
    ]  # fmt: skip
    numbers = ("WAITING", "DELAYED", "RUNNING", "OLDEST", "DONE 1H", "FAILED 1H", "DONE", "FAILED")
    put_table(["QUEUE", *numbers, "STATE"], rows, right=numbers, drop=("DELAYED", "DONE", "FAILED"))
    for hold in found.holds:
        put(f"Tasks of kind {hold.kind} wait until {clock(hold.until)}{f': {hold.reason}' if hold.reason else ''}")


@click.command()
@click.option("--status", type=click.Choice(["queued", "running", "completed", "failed", "cancelled"]))
@click.option("--queue", "name", type=_QUEUE)
@click.option("--kind", metavar="KIND")
@click.option("--user", "user_id", metavar="USER")
@click.option("--before", metavar="ID", help="Continue after this task, the last one of the previous page.")
@limit_option(50, "How many.")
@json_option
@database_option
def tasks(
    database: str | None,
    *,
    status: str | None,
    name: str | None,
    kind: str | None,
    user_id: str | None,
    before: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the newest tasks."""
    with open_reader(database) as reader:
        found = reader.tasks(
            status=status and status.upper(),
            queue=name,
            kind=kind,
            user_id=user_id,
            before=before,
            limit=min(limit, 1000),
        )
    if as_json:
        put_json(found)
        return
    if not found.tasks:
        say("No task matches.")
        return
    heads = ["TASK", "KIND", "QUEUE", "STATUS", "USER", "PROGRESS", "SUBMITTED", "NOTE"]
    put_table(heads, [_row(task) for task in found.tasks], whole=("STATUS",), drop=("SUBMITTED", "USER"))


def _row(task: TaskView) -> list[str]:
    note = task.error or task.message
    return [
        task.id, task.kind, task.queue, task.status, task.user_id or "", f"{task.percent:.0f}%", clock(task.created_at), note
    ]  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def task() -> None:
    """Show, cancel or retry one task."""


@task.command("show")
@click.argument("id")
@json_option
@database_option
def show(id: str, database: str | None, *, as_json: bool) -> None:
    """Show a task with its failed attempts."""
    with open_reader(database) as reader:
        sheet = reader.task(id)
    if as_json:
        put_json(sheet)
        return
    one = sheet.task
    put(f"{one.id}  {one.kind}  {one.status}{' (cancelling)' if one.cancelling else ''}")
    put(f"  queue {one.queue}, user {one.user_id or '-'}, {one.percent:.0f}%{' ' + one.message if one.message else ''}")
    put(
        f"  submitted {clock(one.created_at)}, started {clock(one.started_at) or '-'}, ended {clock(one.ended_at) or '-'}"
    )
    if sheet.hinted_at:
        put(f"  RQ was given its id {clock(sheet.hinted_at)}")
    if sheet.waits_until is not None:
        why = f": {sheet.waits_reason}" if sheet.waits_reason else ""
        often = f" (postponed {plural(sheet.postponed, 'time')})" if sheet.postponed else ""
        put(f"  waits until {clock(sheet.waits_until)}{why}{often}")
    if sheet.unserved and sheet.workers_online == 0:
        put("  waits: no worker is online")
    elif sheet.unserved:
        put(f"  waits: no online worker runs tasks of kind {one.kind} from the queue {one.queue}")
    for run in sheet.runs:
        put(f"  {clock(run.at)}  {run.outcome:<8} {run.error}")


@task.command("cancel")
@click.argument("id")
@yes_option
@database_option
def cancel(id: str, database: str | None, *, yes: bool) -> None:
    """Cancel a task: at once if it waits, otherwise through its worker."""
    with open_queue(database) as queue:
        found = queue.get(id)
        if found.is_final:
            say(f"Task {id} is {found.status.value}; nothing was changed.")
            return
        confirm(f"Cancel task {id} ({found.kind}, {found.status.value})?", yes=yes)
        ended = queue.cancel(id, by=who())
        say(f"Task {id} is {ended.status.value}." if ended.is_final else f"The worker of task {id} is asked to end it.")


@task.command("retry")
@click.argument("id")
@yes_option
@database_option
def retry(id: str, database: str | None, *, yes: bool) -> None:
    """Retry a task that failed or was cancelled."""
    with open_queue(database) as queue:
        found = queue.get(id)
        confirm(f"Try task {id} ({found.kind}, {found.status.value}) again, with no attempt counted?", yes=yes)
        queue.retry(id)
        say(f"Task {id} waits in {found.priority.value}.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def queue() -> None:
    """Pause, resume or limit queues, change their settings, or migrate them."""


@queue.command("pause")
@click.argument("name", type=_QUEUE)
@click.option("--reason", default="", help="Why; shown on the pages and on the command line.")
@click.option("--for", "seconds", type=Number(1, 10**8), metavar="SECONDS", help="Resume after this time.")
@database_option
def pause(name: str, database: str | None, *, reason: str, seconds: float | None) -> None:
    """Pause a queue: no task of it starts. Current tasks finish, and new ones are accepted."""
    from datetime import UTC, datetime, timedelta

    with open_queue(database) as opened:
        # The database's clock ends the pause, so it also sets the time.
        began = None if seconds is None else datetime.fromtimestamp(opened.database.now(), UTC)
        until = None if began is None or seconds is None else began + timedelta(seconds=seconds)
        opened.pause(name, reason=reason, by=who(), until=until)
        say(f"The queue {name} is paused{'' if until is None else f' until {clock(until)}'}.")


@queue.command("resume")
@click.argument("name", type=_QUEUE)
@database_option
def resume(name: str, database: str | None) -> None:
    """Resume a paused queue."""
    with open_queue(database) as opened:
        say(f"The queue {name} is resumed." if opened.resume(name, by=who()) else f"The queue {name} was not paused.")


@queue.command("limit")
@click.argument("scope", type=click.Choice(["queue", "user", "partition", "kind"]))
@click.argument("key")
@click.option("--concurrency", type=Whole(0, 1_000_000), help="Maximum of tasks at once.")
@click.option("--rate", type=Number(0.000001, 10**6), help="Maximum of starts per second.")
@database_option
def limit(scope: str, key: str, database: str | None, *, concurrency: int | None, rate: float | None) -> None:
    """Limit concurrent tasks or starts per second. The key '*' means each one. Without options the limit is removed."""
    with open_queue(database) as opened:
        opened.limit(scope, key, concurrency=concurrency, rate=rate, by=who())
        say(
            "The limit is removed."
            if concurrency is None and rate is None
            else "The limit applies from the next claim on."
        )


@queue.command("set")
@click.argument("name")
@click.argument("value")
@database_option
def set_(name: str, value: str, database: str | None) -> None:
    """Change a setting of all workers and supervisors, within seconds and without a restart.

    See 'headway queue settings' for the names. It overrides the command line, the environment and headway.toml.
    """
    with open_queue(database) as opened:
        opened.set(name, value, by=who())
        back = typed(f"Undo: headway queue unset {name}")
        say(f"{name} is {value} for every worker from now on. {back}")


@queue.command("unset")
@click.argument("name")
@database_option
def unset(name: str, database: str | None) -> None:
    """Undo 'headway queue set': each host uses its own setting again."""
    with open_queue(database) as opened:
        say(
            f"{name} follows the settings of each host again."
            if opened.unset(name, by=who())
            else f"{name} was not set."
        )


@queue.command("settings")
@json_option
@database_option
def settings(database: str | None, *, as_json: bool) -> None:
    """Show the settings of workers and supervisors, and where each comes from."""
    with open_reader(database) as reader:
        found = reader.queue_settings()
    if as_json:
        put_json(found)
        return
    rows = [
        [one.name, "none" if one.value is None else f"{one.value}", one.origin, one.set_by or "", clock(one.set_at)]
        for one in found.settings
    ]
    put_table(["SETTING", "VALUE", "FROM", "BY", "SINCE"], rows, drop=("SINCE",))


@queue.command("migrate")
@click.option("--to", "target", required=True, type=click.Choice(["rq", "database"]))
@click.option("--app", required=True, metavar="MODULE:NAME", help="The application, as for 'headway worker'.")
@click.option("--dry-run", is_flag=True, help="Only count the tasks.")
def migrate(*, target: str, app: str, dry_run: bool) -> None:
    """Move waiting tasks to RQ or back to the database. A repeated call continues where the first stopped."""
    from headway.queue import migration
    from headway.queue.worker.app import load

    with load(app) as opened:
        if opened.hints is None:
            raise InvalidInput("This queue has no Redis.", hint="Configure one: TaskQueue(redis='redis://...')")
        moved = (
            migration.to_rq(opened, opened.hints, dry_run=dry_run)
            if target == "rq"
            else migration.to_database(opened, dry_run=dry_run)
        )
    say(f"{plural(moved.moved, 'task')} {'would be' if dry_run else 'were'} moved to {target}.")
    if moved.left and target == "rq":
        say(f"{plural(moved.left, 'task')} could not be moved: Redis is unreachable or full. Try again later.")
    elif moved.left:
        say(
            f"RQ still knows {plural(moved.left, 'task')}: Redis is unreachable, or workers that use it add them again."
        )


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@json_option
@database_option
@click.pass_context
def workers(context: click.Context, database: str | None, *, as_json: bool) -> None:
    """List the workers, with those that ended in the last day; or ask one to exit."""
    if context.invoked_subcommand is not None:
        return
    with open_reader(database) as reader:
        found = reader.workers()
    if as_json:
        put_json(found)
        return
    if not found.workers:
        say(typed("There are no workers. Start one: headway worker --app MODULE:QUEUE, or without --app for fleets"))
        return
    rows = [
        [
            view.name, view.state if view.wanted is None else f"{view.state} ({view.wanted} by {view.wanted_by})",
            view.task or "", f"{view.completed:,}", f"{view.failed:,}", clock(view.seen_at),
        ]
        for view in found.workers
    ]  # fmt: skip
    put_table(["WORKER", "STATE", "TASK", "DONE", "FAILED", "SEEN"], rows, right=("DONE", "FAILED"), drop=("SEEN",))


@workers.command("drain")
@click.argument("name")
@database_option
def drain(name: str, database: str | None) -> None:
    """Ask a worker to exit after its current tasks. Its supervisor starts another one."""
    with open_queue(database) as opened:
        asked = opened.drain(name, by=who())
        say(f"Worker {name} is asked to {asked}; it obeys within seconds.")


@workers.command("stop")
@click.argument("name")
@yes_option
@database_option
def stop(name: str, database: str | None, *, yes: bool) -> None:
    """Ask a worker to exit at once. Its tasks return to their queues, and no attempt is counted."""
    with open_queue(database) as opened:
        confirm(f"Stop worker {name} and return its tasks to their queues?", yes=yes)
        opened.stop(name, by=who())
        say(f"Worker {name} is asked to stop; it obeys within seconds.")


@workers.command("remove")
@click.argument("name")
@database_option
def remove(name: str, database: str | None) -> None:
    """Remove a lost or ended worker from the list, where it would stay for a day."""
    with open_queue(database) as opened:
        opened.remove_worker(name, by=who())
        say(f"Worker {name} is removed from the list.")
