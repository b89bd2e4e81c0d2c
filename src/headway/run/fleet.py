"""A job for a fleet: given to the workers of the queue, and followed from anywhere.

Whoever starts it registers the items, hands the job over to the fleet and submits slots, in this order; killed in between,
the next start or the sweeper does the rest. From then on nobody is needed but workers: what the starting command shows, it
reads from the ledger, as any other process can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway._sql import Database, Tx
from headway.config import Config
from headway.errors import HeadwayError, InvalidInput, JobHeld
from headway.ledger import Hold, Job, Ledger, fleet
from headway.ledger.fleet import Fleet
from headway.lifecycle import Shutdown
from headway.queue.settings import connection_settings, declared_per_user
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Priority
from headway.run import function as functions
from headway.run import stamp as stamps
from headway.run.display import Display, RunSnapshot
from headway.run.output import open_output
from headway.run.plan import Plan
from headway.run.pool import Ending, Settings
from headway.run.program import Program, Work
from headway.run.results import Keep
from headway.run.slot import KIND, add_slots, is_shared, party, seal_id, wanted_slots
from headway.telemetry import Log

log = Log("run")

#: How often the ledger is looked at for the display, and how often it is seen to that the run ends and has slots.
LOOK_SECONDS = 0.2
ATTEND_SECONDS = 2.0
#: A worker that refused a job need not be asked again at once.
REFUSED_SECONDS = 15.0
#: A slot that died comes back within so long, however often it died: the queue's growing pauses are for tasks that fail.
AGAIN_SECONDS = 5.0
#: No slot is submitted in larger numbers at once.
SLOTS_TOGETHER = 500


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What a start says of the fleet."""

    slots: int | None = None  # none: one for each worker there is
    priority: str = "normal"
    any_version: bool = False
    #: The words and ways of a program, if it is one: what its workers make it of.
    program: Mapping[str, Any] | None = None


def check(config: Config, call: Work, options: FleetOptions) -> None:
    """Refuse what no fleet could do, before anything is written."""
    if not is_shared(config.text("database")):
        raise InvalidInput(
            "A fleet needs PostgreSQL: a SQLite file is one machine's.",
            hint="Name one: HEADWAY_DATABASE=postgresql://user@host/name",
        )
    if options.slots is not None and not 1 <= options.slots <= 10_000:
        raise InvalidInput(f"{options.slots!r} is no number of slots.", hint="Use 1 to 10,000.")
    if options.priority not in {priority.value for priority in Priority}:
        raise InvalidInput(f"{options.priority!r} is no priority.", hint="Use urgent, high, normal or low.")
    if options.program is None:
        _importable(call)


def _importable(call: Work) -> str:
    """The name by which workers find the function."""
    name = functions.name_of(call) if not isinstance(call, Program) else ""
    try:
        if name.startswith("__main__:") or functions.load(name) is not call:
            raise InvalidInput(f"{name} is another function where it is imported.")
    except HeadwayError as error:
        raise InvalidInput(
            f"The workers of a fleet cannot import {name}.",
            hint="Define it at the top of a module (not in __main__, not inside a function) that every worker has.",
        ) from error
    return name


def open_queue(config: Config, database: Database) -> TaskQueue:
    """The queue that carries the slots. It leaves the application's own rule of tasks per user as it is."""
    known = connection_settings(config) | {"per_user": declared_per_user(database)}
    return add_slots(TaskQueue(**known))


def start(
    ledger: Ledger,
    job: Job,
    hold: Hold,
    call: Work,
    settings: Settings,
    keep: Keep,
    config: Config,
    options: FleetOptions,
) -> None:
    """Give the job, which this process holds and whose items are registered, to the fleet."""
    policy = settings.policy
    stamp = (
        stamps.of_program(options.program["words"][0]) if options.program is not None else stamps.of_function(call)  # type: ignore[arg-type]  # `check` saw that it is a function
    )
    slots = options.slots
    order = {
        "function": None if options.program is not None else _importable(call),
        "program": None if options.program is None else dict(options.program),
        "workers": settings.workers,
        "mode": settings.mode,
        "policy": {name: getattr(policy, name) for name in ("retries", "base", "factor", "cap", "jitter")},
        "timeout": settings.timeout,
        # Each slot keeps to its share of the rate; with no number of slots it is that of one for each worker.
        "rate": None if settings.rate is None else settings.rate / (slots or _workers(ledger.database)),
        "keep": {"results": keep.results, "all_results": keep.all_results, "printed": keep.printed},
        "stamp": dict(stamp),
        "any_version": options.any_version,
    }
    with open_queue(config, ledger.database) as queue:
        sealed = queue.sealed(seal_id(job.no, hold.run), json.dumps(order))
        fleet.hand_over(
            ledger.database, hold, work=sealed, queue=options.priority, slots=slots, most=settings.max_failures,
            has_pass=settings.last_pass,
        )  # fmt: skip
        _attend(queue, job)


def rejoin(ledger: Ledger, job: Job, config: Config) -> None:
    """The same start once more: the first may have been killed before it had submitted the slots."""
    with open_queue(config, ledger.database) as queue:
        _attend(queue, job)


def _attend(queue: TaskQueue, job: Job) -> None:
    known = fleet.read(job.database, job.no)
    if known is not None and fleet.attend(job.database, job.no):
        submit_missing(queue, job, known)


def _workers(database: Database) -> int:
    row = database.one("SELECT count(*) FROM task_workers WHERE ended_at IS NULL")
    return max(1, int(row[0]) if row else 1)


def submit_missing(queue: TaskQueue, job: Job, known: Fleet) -> int:
    """Submit as many slots as the job lacks; how many. Who starts the job and the sweeper may do so at the same time: one
    waits for the other, or there were too many, and each would have a turn before another job's first."""
    wanted = min(wanted_slots(job, known), max(1, job.info().remaining))
    refused = known.noted_at is not None and queue.database.now() - known.noted_at < REFUSED_SECONDS
    slot: dict[str, Any] = {
        "kind": KIND, "payload": {"job": job.id, "run": known.run}, "priority": known.queue, "role": "admin",
        "partition": party(known.job), "delay": REFUSED_SECONDS if refused else 0.0,
    }  # fmt: skip

    def work(tx: Tx) -> int:
        if tx.one("SELECT 1 FROM fleets WHERE job = ? AND run = ? FOR UPDATE", (known.job, known.run)) is None:
            return 0
        soon = tx.now() + max(AGAIN_SECONDS, slot["delay"])
        tx.execute(
            "UPDATE tasks SET run_at = ?, version = version + 1 WHERE status = 'QUEUED' AND ready = 0 AND run_at > ? "
            "AND kind = ? AND party = ?",
            (soon, soon, KIND, party(known.job)),
        )
        row = tx.one(
            "SELECT (SELECT count(*) FROM tasks WHERE status = 'QUEUED' AND queue = ? AND party = ?) + "
            "(SELECT count(*) FROM tasks WHERE status = 'RUNNING' AND kind = ? AND party = ?)",
            (known.queue, party(known.job), KIND, party(known.job)),
        )
        missing = max(0, min(wanted - (int(row[0]) if row else 0), SLOTS_TOGETHER))
        queue.submit_many([slot] * missing)  # by transactions of its own: repeated, this one counts what they brought
        return missing

    return queue.database.run(work, operation="fleet.submit")


class Fleets:
    """The sweeper's chore: every job of a fleet has the slots it lacks, and ends when nothing is left of it."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue

    def __call__(self) -> None:
        if self._queue.database.engine != "postgresql":
            return
        for id, known in fleet.all_fleets(self._queue.database):
            try:
                if fleet.attend(self._queue.database, known.job):
                    submit_missing(self._queue, Job(self._queue.database, known.job, id), known)
            except HeadwayError as error:  # one job that cannot be looked after leaves the others
                log.warning("a fleet could not be looked after; it is tried again", job=id, error=str(error))


def running(plan: Plan) -> int | None:
    """The number of the run by which a fleet works on the planned job, if one does; `JobHeld` if it has other items."""
    held = plan.existing is not None and plan.existing.held and plan.existing.holder
    run: int | None = held.get("fleet") if held else None
    if run is not None and not plan.changes.none:
        raise JobHeld(
            f"A fleet works on job {plan.id}, whose items were others when it began: {plan.changes}.",
            hint=f"Let it finish, or stop it:  headway stop {plan.id}    Then run the same command again.",
        )
    return run


def start_and_follow(
    ledger: Ledger,
    plan: Plan,
    call: Work,
    settings: Settings,
    options: FleetOptions,
    config: Config,
    *,
    keep: Keep,
    display: Display,
    shutdown: Shutdown,
    take: Callable[[], tuple[Job, Hold]],
    tell: Callable[[], None],
    output: Path | None,
) -> Ending:
    """For a program that waits: give the job to the fleet, unless it has it, and wait for the end of its run. If this
    process is to stop first, the job goes on, and that is said."""
    run = running(plan)
    if run is None:
        job, hold = take()
        hand(ledger, job, hold, call, settings, keep, config, options)
        run = hold.run
    else:
        rejoin(ledger, ledger.job(plan.id), config)
    job = ledger.job(plan.id)
    ending = follow(ledger, job, run, display=display, shutdown=shutdown)
    if ending is None:
        stop = f"headway stop {job.id} {settings.database_option}".rstrip()
        display.say(f"Job {job.id} goes on without this process. Stop it:  {stop}")
        return Ending("interrupted", 0, 0, 0, 0, 0, 0, completed=False, seconds=0.0)
    conclude(job, ending, output, tell)
    return ending


def hand(
    ledger: Ledger,
    job: Job,
    hold: Hold,
    call: Work,
    settings: Settings,
    keep: Keep,
    config: Config,
    options: FleetOptions,
) -> None:
    """`start`; if that fails before the job is the fleet's, it is given back."""
    try:
        start(ledger, job, hold, call, settings, keep, config, options)
    except BaseException:
        with suppress(HeadwayError):
            if not (job.info().holder or {}).get("fleet"):
                ledger.release(hold, "failed")
        raise


def conclude(job: Job, ending: Ending, output: Path | None, tell: Callable[[], None]) -> None:
    """What is left to do for one who waited: the file of results, which many write to nowhere but in the ledger, and the
    word to those who are to be told."""
    if output is not None:
        file = open_output(job, output)
        try:
            file.write()
        finally:
            file.close()
    if ending.outcome != "interrupted":
        tell()


def follow(ledger: Ledger, job: Job, run: int, *, display: Display, shutdown: Shutdown) -> Ending | None:
    """Show how far the job is until its run is over; None if this process is to stop first, which the job does not mind."""
    attended, watched = 0.0, _Watched(job, run, display)
    while True:
        ended = watched.look()
        if ended is not None or shutdown.stop.is_set():
            display.end(watched.snapshot)
            return None if ended is None else watched.ending(ended)
        if time.monotonic() - attended > ATTEND_SECONDS:
            attended = time.monotonic()
            fleet.attend(ledger.database, job.no)
            watched.say_news()
        shutdown.stop.wait(LOOK_SECONDS)


class _Watched:
    """What one who follows a run knows of it."""

    def __init__(self, job: Job, run: int, display: Display) -> None:
        self._job, self._run, self._display = job, run, display
        self._this = next(each for each in job.runs() if each.no == run)
        info = job.info()
        # A run of an earlier Headway did not note them: then what is counted begins here.
        self._failures, self._dead = fleet.counts_before(job.database, job.no, run) or (info.failures, info.dead)
        self._said: set[str] = set()
        self.snapshot = self._snapshot()
        # What was done before this process followed the run says nothing about its pace.
        display.show(replace(self.snapshot, stopped=True))

    def look(self) -> str | None:
        """Show the run as it is; how it ended, if it has."""
        row = self._job.database.one("SELECT outcome FROM runs WHERE job = ? AND no = ?", (self._job.no, self._run))
        self.snapshot = self._snapshot()
        self._display.show(self.snapshot)
        return "interrupted" if row is None else row[0]

    def _snapshot(self) -> RunSnapshot:
        info, asked = self._job.info(), self._job.asked(self._run)
        return RunSnapshot(
            total=info.total if info.sealed else None, kept=self._this.kept, done=info.done - self._this.kept,
            running=self._job.progress().running, retrying=info.failed, dead=info.dead,
            failures=info.failures - self._failures, paused_by=asked.actor if asked.paused else "",
        )  # fmt: skip

    def ending(self, outcome: str) -> Ending:
        shown = self.snapshot
        seconds = max(0.0, self._job.database.now() - self._this.started_at.timestamp())
        return Ending(
            outcome=outcome, done=shown.done, kept=shown.kept, dead=shown.dead, died=max(0, shown.dead - self._dead),
            failures=shown.failures, rescued=0, completed=outcome == "finished", seconds=seconds,
        )  # fmt: skip

    def say_news(self) -> None:
        """What a person should know who wonders why nothing happens."""
        known = fleet.read(self._job.database, self._job.no)
        if known is not None and known.note:
            self._say(known.note)
        row = self._job.database.one("SELECT count(*) FROM task_workers WHERE ended_at IS NULL")
        if row is not None and row[0] == 0:
            self._say("No worker is there yet. Start one on any machine:  headway worker")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._display.say(text)
