"""Jobs run by a fleet: started here, run by the workers of the queue, followed from anywhere.

A start registers the items, hands the job over to the fleet and submits slots, in this order. If it is killed in
between, the next start or the sweeper completes it. From then on only workers are needed. The starting command reads
its progress from the ledger, as any other process can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway._sql import Database, Tx
from headway.config import Config
from headway.core.lifecycle import Shutdown
from headway.errors import HeadwayError, InvalidInput, JobHeld
from headway.ledger import Job, Ledger
from headway.ledger.fleet import fleet
from headway.ledger.fleet.fleet import Fleet
from headway.queue.settings import connection_settings, declared_per_user
from headway.queue.store import fleet_slots
from headway.queue.task import Priority
from headway.queue.task_queue import TaskQueue
from headway.run import function as functions
from headway.run.display.display import Display, RunSnapshot
from headway.run.fleet import code_version as stamps
from headway.run.fleet.slot import KIND, add_slots, is_shared, party, seal_id, wanted_slots
from headway.run.plan import Plan
from headway.run.pool.runner import Ending, HeldJob
from headway.run.program import Program, Work
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.run.session import RunRequest

log = Log("run")

#: Interval of display updates, and of checks that the run ends and has its slots, seconds.
REFRESH_SECONDS = 0.2
ATTEND_SECONDS = 2.0
#: Delay of new slots after a worker refused the job, seconds.
REFUSED_SECONDS = 15.0
#: Longest retry delay of a dead slot, seconds. The queue's backoff is meant for tasks that fail.
AGAIN_SECONDS = 5.0
#: Maximum number of slots submitted at once.
SLOTS_TOGETHER = 500


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The fleet options of a start."""

    slots: int | None = None  # None: one per worker
    priority: str = "normal"
    any_version: bool = False
    #: The arguments from which workers build the `Program`, if the job runs one.
    program: Mapping[str, Any] | None = None
    #: The set-up of the workers, as ``module:function``.
    setup: str | None = None


def check(config: Config, call: Work, options: FleetOptions) -> None:
    """Raise `InvalidInput` for what a fleet cannot do, before anything is written."""
    if not is_shared(config.text("database")):
        raise InvalidInput(
            "A fleet needs PostgreSQL, because a SQLite file is on one machine only.",
            hint="Name one: HEADWAY_DATABASE=postgresql://user@host/name",
        )
    if options.slots is not None and not 1 <= options.slots <= 10_000:
        raise InvalidInput(f"slots must be between 1 and 10,000 (got {options.slots!r}).")
    if options.priority not in {priority.value for priority in Priority}:
        raise InvalidInput(f"priority must be urgent, high, normal or low (got {options.priority!r}).")
    if options.program is None:
        importable(call)


def importable(call: Work) -> str:
    """Return the name by which workers import the function or set-up."""
    name = functions.name_of(call) if not isinstance(call, Program) else ""
    try:
        if name.startswith("__main__:") or functions.load_any(name) is not call:
            raise InvalidInput(f"{name} is a different function when imported by name.")
    except HeadwayError as error:
        raise InvalidInput(
            f"The workers of a fleet cannot import {name}.",
            hint="Define it at the top level of a module that every worker can import (not __main__).",
        ) from error
    return name


def open_queue(config: Config, database: Database) -> TaskQueue:
    """Open the queue that carries the slots. It keeps the application's own limit of tasks per user."""
    known = connection_settings(config) | {"per_user": declared_per_user(database)}
    return add_slots(TaskQueue(**known))


def start(ledger: Ledger, held: HeldJob, request: RunRequest) -> None:
    """Hand a held job over to the fleet. Its items are registered."""
    options, settings, keep = request.fleet, request.settings, request.keep
    assert options is not None
    assert request.work is not None
    if options.program is None:
        assert callable(request.work)
        stamp = stamps.of_function(request.work)
    else:
        stamp = stamps.of_program(options.program["words"][0])
    # Each slot gets an equal share of the rate, by default for one slot per worker.
    slots = options.slots or max(1, fleet_slots.count_workers(ledger.database))
    order = {
        "function": None if options.program is not None else importable(request.work),
        "setup": options.setup,
        "later_limit": str(settings.later_limit),
        "program": None if options.program is None else dict(options.program),
        "workers": settings.workers,
        "mode": settings.mode,
        "policy": {name: getattr(settings.policy, name) for name in ("retries", "base", "factor", "cap", "jitter")},
        "timeout": settings.timeout,
        "rate": None if settings.rate is None else settings.rate / slots,
        "keep": {
            "results": keep.results,
            "all_results": keep.results and request.output is not None,
            "printed": keep.printed,
        },
        "stamp": dict(stamp),
        "any_version": options.any_version,
    }
    with open_queue(request.config, ledger.database) as queue:
        sealed = queue.backend.encode(seal_id(held.job.no, held.hold.run), json.dumps(order))
        fleet.hand_over(
            ledger.database, held.hold, work=sealed, queue=options.priority, slots=options.slots,
            most=settings.max_failures, has_pass=settings.last_pass,
        )  # fmt: skip
        _attend(queue, held.job)


def may_have(job: Job) -> bool:
    """Return whether a fleet has the job, or the database cannot tell."""
    try:
        return bool((job.info().holder or {}).get("fleet"))
    except HeadwayError:
        return True


def rejoin(ledger: Ledger, job: Job, config: Config) -> None:
    """Repeat a start that may have been killed before it submitted the slots."""
    with open_queue(config, ledger.database) as queue:
        _attend(queue, job)


def _attend(queue: TaskQueue, job: Job) -> None:
    known = fleet.read(job.database, job.no)
    if known is not None and fleet.attend(job.database, job.no):
        submit_missing(queue, job, known)


def submit_missing(queue: TaskQueue, job: Job, known: Fleet) -> int:
    """Submit the slots that the job lacks; return how many.

    A start and the sweeper may do this at the same time, so both lock the row of the fleet. Surplus slots would each
    get a turn before the first slot of another job.
    """
    wanted = min(wanted_slots(job, known), max(1, job.info().remaining))
    refused = known.noted_at is not None and queue.database.now() - known.noted_at < REFUSED_SECONDS
    slot: dict[str, Any] = {
        "kind": KIND, "payload": {"job": job.id, "run": known.run}, "priority": known.queue, "role": "admin",
        "partition": party(known.job), "delay": REFUSED_SECONDS if refused else 0.0,
    }  # fmt: skip

    def work(tx: Tx) -> int:
        if not fleet_slots.lock(tx, known.job, known.run):
            return 0
        fleet_slots.bring_forward(tx, KIND, party(known.job), tx.now() + max(AGAIN_SECONDS, slot["delay"]))
        missing = wanted - fleet_slots.count(tx, KIND, party(known.job), known.queue)
        missing = max(0, min(missing, SLOTS_TOGETHER))
        queue.submit_many([slot] * missing)  # commits separately: if this transaction is retried, it counts them
        return missing

    return queue.database.run(work, operation="fleet.submit")


class Fleets:
    """A chore of the sweeper: submit missing slots and finish completed fleet jobs."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue

    def __call__(self) -> None:
        for id, known in fleet.all_fleets(self._queue.database):
            try:
                if fleet.attend(self._queue.database, known.job):
                    submit_missing(self._queue, Job(self._queue.database, known.job, id), known)
            except HeadwayError as error:  # an error in one job must not affect the others
                log.warning("a fleet could not be checked; the next sweep retries", job=id, error=str(error))


def running(plan: Plan) -> int | None:
    """Return the number of the fleet's current run of the job, or None.

    Raises `JobHeld` if that run has different items.
    """
    held = plan.existing is not None and plan.existing.held and plan.existing.holder
    run: int | None = held.get("fleet") if held else None
    if run is not None and not plan.changes.none:
        raise JobHeld(
            f"A fleet is running job {plan.id} with other items: {plan.changes}.",
            hint=f"Let it finish, or stop it:  headway stop {plan.id}    Then run the same command again.",
        )
    return run


def follow(ledger: Ledger, job: Job, run: int, *, display: Display, shutdown: Shutdown) -> Ending | None:
    """Show progress until the run ends. Return None if this process must stop first; the job continues."""
    attended, watched = 0.0, _Watched(job, run, display)
    while True:
        ended = watched.refresh()
        if ended is not None or shutdown.stop.is_set():
            display.end(watched.snapshot)
            return None if ended is None else watched.ending(ended)
        if time.monotonic() - attended > ATTEND_SECONDS:
            attended = time.monotonic()
            fleet.attend(ledger.database, job.no)
            watched.say_news()
        shutdown.stop.wait(REFRESH_SECONDS)


class _Watched:
    """The state of a run that this process follows."""

    def __init__(self, job: Job, run: int, display: Display) -> None:
        self._job, self._run, self._display = job, run, display
        self._this = next(each for each in job.runs() if each.no == run)
        info = job.info()
        # An earlier Headway version did not record these counts: then count from now.
        self._failures, self._dead = fleet.counts_before(job.database, job.no, run) or (info.failures, info.dead)
        self._messages: set[str] = set()
        self.snapshot = self._snapshot()
        # Items done before this process followed the run must not count towards its pace.
        display.show(replace(self.snapshot, stopped=True))

    def refresh(self) -> str | None:
        """Update the display; return the outcome if the run has ended."""
        outcomes = [run.outcome for run in self._job.runs() if run.no == self._run]
        self.snapshot = self._snapshot()
        self._display.show(self.snapshot)
        return outcomes[0] if outcomes else "interrupted"

    def _snapshot(self) -> RunSnapshot:
        info, asked = self._job.info(), self._job.asked(self._run)
        return RunSnapshot(
            total=info.total if info.sealed else None, kept=self._this.kept, done=info.done - self._this.kept,
            running=self._job.progress().running, retrying=info.failed, dead=info.dead,
            failures=info.failures - self._failures, paused_by=asked.actor if asked.paused else "",
            wait_seconds=asked.wait, wait_reason=asked.wait_reason,
        )  # fmt: skip

    def ending(self, outcome: str) -> Ending:
        """Return the ending of the run from the last snapshot."""
        shown = self.snapshot
        seconds = max(0.0, self._job.database.now() - self._this.started_at.timestamp())
        return Ending(
            outcome=outcome, done=shown.done, kept=shown.kept, dead=shown.dead, died=max(0, shown.dead - self._dead),
            failures=shown.failures, rescued=0, completed=outcome == "finished", seconds=seconds,
        )  # fmt: skip

    def say_news(self) -> None:
        """Say why nothing may be happening: a note of the fleet, or no workers."""
        known = fleet.read(self._job.database, self._job.no)
        if known is not None and known.note:
            self._say(known.note)
        if not fleet_slots.count_workers(self._job.database):
            self._say("No workers online. Start one on any machine:  headway worker")

    def _say(self, text: str) -> None:
        if text not in self._messages:
            self._messages.add(text)
            self._display.say(text)
