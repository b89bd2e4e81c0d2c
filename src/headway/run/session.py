"""One run of a job: plan, hold, work, release, deliver its events.

`headway.map`, ``headway run`` with a file or a pipe, `headway.open_job` and fleets all run a job by a `Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headway import events
from headway.config import Config
from headway.core.lifecycle import Shutdown
from headway.core.setup import Setup
from headway.errors import HeadwayError, JobHeld, NotFound, Stopping
from headway.events import CallableSink, Sink
from headway.ledger import Hold, Job, JobInfo, Ledger
from headway.ledger.store import output_files
from headway.run import plan as plans
from headway.run.display.display import Display
from headway.run.items import Source
from headway.run.output.files import open_output, refuse_foreign, refuse_incomplete
from headway.run.output.results import Keep
from headway.run.plan import Plan
from headway.run.pool.executor import Executor, ExecutorRunner
from headway.run.pool.local import LocalRunner
from headway.run.pool.loop import RunLoop
from headway.run.pool.runner import Ending, Feed, HeldJob, RunContext, Runner, RunParts, Settings
from headway.run.program import Work
from headway.run.settings import describe
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.run.fleet.start import FleetOptions

log = Log("run")

#: Seconds that the end of a run waits for sinks. Undelivered events stay in the outbox.
DELIVERY_SECONDS = 5.0


def configured_sinks(config: Config) -> list[Sink]:
    """Open the sinks from the settings."""
    return events.configured_sinks(config)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A validated request to run a job."""

    config: Config
    settings: Settings
    #: The function or program, and its name as recorded with the job. None if the caller keeps its own loop.
    work: Work | None = None
    name: str = ""
    shutdown: Shutdown = field(default_factory=Shutdown)
    keep: Keep = field(default_factory=Keep)
    output: Path | None = None
    sinks: Sequence[Sink] = ()
    executor: Executor | None = None
    fleet: FleetOptions | None = None
    fresh: bool = False
    accept_changes: bool = False
    #: The shell command that resumes the job.
    command: str = ""
    #: What each worker opens, checked.
    setup: Setup | None = None


class Session:
    """One run of a job. Leaving its block releases the job, also after an error."""

    def __init__(self, request: RunRequest, *, create: bool = True) -> None:
        """Open the database. Without ``create``, a missing one is created when a job is registered."""
        self._request = request
        self._feed: Feed | None = None
        self._held: HeldJob | None = None
        #: A fleet's job and the number of its run.
        self._followed: tuple[Job, int] | None = None
        #: Whether a fleet ran the job already.
        self.joined = False
        #: None while there is no database.
        self.ledger: Ledger | None = None
        with nullcontext() if create else suppress(NotFound):
            self.ledger = self._open(create=create)

    def _open(self, *, create: bool) -> Ledger:
        request = self._request
        return Ledger.open(request.config.text("database"), create=create, stop=request.shutdown.abandon)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._held is not None:
                self.release("interrupted" if isinstance(error, Stopping) else "failed")
        finally:
            self.close()

    def close(self) -> None:
        """Close the database."""
        if self.ledger is not None:
            self.ledger.close()

    # ---- plan ------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobInfo]:
        """Return the jobs of the database."""
        return [] if self.ledger is None else self.ledger.jobs()

    def find(self, id: str) -> JobInfo | None:
        """Return the job with that id, or None."""
        return plans.find(self.ledger, id)

    def compare(self, id: str, source: Source) -> Plan:
        """Compare the items with the job's. Nothing is written."""
        return plans.compare(self.ledger, id, self._request.name, source, fresh=self._request.fresh)

    def check(self, plan: Plan) -> None:
        """Refuse changed items that were not accepted, and a file of results that is not this job's."""
        if not self._request.accept_changes:
            plans.refuse_doubt(plan)
        self._check_output(plan.id, exists=plan.existing is not None)

    def _check_output(self, id: str, *, exists: bool) -> None:
        if self._request.output is not None:
            refuse_foreign(self._request.output, self.ledger, id)
            if exists and self.ledger is not None:
                refuse_incomplete(self.ledger.job(id))

    # ---- hold ------------------------------------------------------------------------------------------------------

    def hold(self, plan: Plan) -> Job:
        """Hold the planned job and register its items. A job for a fleet is handed over to it.

        The hold prevents concurrent changes. If another process started, replaced or changed the job since planning,
        `JobHeld` is raised and the job is unchanged.
        """
        request = self._request
        if request.fleet is not None and (joined := self._join_fleet(plan)) is not None:
            return joined
        job = self._acquire(plan.id)
        if not plans.is_current(plan, job):
            raise JobHeld(
                f"Job {plan.id} was started or changed by another process at the same moment.", hint="Run it again."
            )
        retries = request.settings.policy.retries
        plans.carry_out(
            self._the_ledger, job, plan, max_retries=retries, command=request.command, accept=request.accept_changes
        )
        return job if request.fleet is None else self._hand_over()

    def hold_stream(self, id: str, key: str | None, open_feed: Callable[[Job], Feed]) -> Job:
        """Hold a job whose items arrive during the run."""
        request = self._request
        existing = None if request.fresh else self.find(id)
        if existing is not None:
            plans.refuse_other(existing, request.name, key)
        self._check_output(id, exists=existing is not None)
        job = self._acquire(id)
        self._the_ledger.describe(
            job, function=request.name, source="-", command=request.command, keyed_by=key,
            max_retries=request.settings.policy.retries,
        )  # fmt: skip
        self._feed = open_feed(job)
        return job

    def hold_existing(self, id: str) -> Job:
        """Hold a job as it is registered, or raise `NotFound`."""
        ledger = self.ledger = self.ledger or self._open(create=False)
        return self._keep(ledger.job(id), ledger.hold(ledger.job(id), {"mode": self._request.settings.mode}))

    def _acquire(self, id: str) -> Job:
        if self.ledger is None:
            self.ledger = self._open(create=True)
        if self._request.fresh:
            self.ledger.archive(id)
        settings = self._request.settings
        job = self.ledger.create(id, max_retries=settings.policy.retries)
        return self._keep(job, self.ledger.hold(job, describe(settings), policy=settings.policy))

    def _keep(self, job: Job, hold: Hold) -> Job:
        ledger = self._the_ledger
        self._held = HeldJob(job.held_by(hold), hold, lambda running: ledger.renew(hold, running))
        return self._held.job

    @property
    def held(self) -> HeldJob:
        """The held job."""
        assert self._held is not None
        return self._held

    @property
    def _the_ledger(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    def release(self, outcome: str) -> None:
        """End the run with ``outcome`` and release the job."""
        held, self._held = self.held, None
        try:
            self._the_ledger.release(held.hold, outcome)
        except HeadwayError as error:
            if outcome != "failed":
                raise
            # Let the original error propagate; the lease expires by itself.
            log.warning("the job could not be released", error=str(error))

    # ---- work ------------------------------------------------------------------------------------------------------

    def work(self, display: Display) -> Ending | None:
        """Work off the job, release it, and deliver its events unless it was interrupted.

        Return None if this process must stop before a fleet has ended the run.
        """
        ending = self._work_here(display) if self._followed is None else self._follow(display, *self._followed)
        if ending is not None and ending.outcome != "interrupted":  # an interrupted run has no event and must not wait
            self.deliver()
        return ending

    def _work_here(self, display: Display) -> Ending:
        request, held = self._request, self.held
        file = None if request.output is None else open_output(held.job, request.output)
        try:
            keep = replace(request.keep, all_results=request.keep.results and output_files.has_any(held.job))
            if request.settings.start.why:
                display.say(request.settings.start.why)
            context = RunContext(display, request.shutdown, file, self._feed)
            ending = RunLoop(held, request.settings, context, keep, self._runner).run()
        finally:
            if file is not None:
                file.close()
        self.release(ending.outcome)
        return ending

    def _runner(self, parts: RunParts) -> Runner:
        work, executor = self._request.work, self._request.executor
        assert work is not None
        if executor is None:
            return LocalRunner(parts, work, self._request.setup)
        assert callable(work)
        return ExecutorRunner(parts, work, executor)

    def deliver(self) -> None:
        """Deliver events from the outbox for a few seconds.

        A later relay delivers the rest. Call it after the last fork of this process, because the relay starts threads.
        """
        sinks, stop, database = self._request.sinks, self._request.shutdown.abandon, self._the_ledger.database
        own = [sink for sink in sinks if isinstance(sink, CallableSink)]
        others = [sink for sink in sinks if sink not in own]
        if sinks:
            with events.start(database=database, sinks=others, stop=stop) as relay:
                if own:
                    events.Relay(events.SqlOutbox(database), own).drain_here(DELIVERY_SECONDS, stop)
                relay.drain(DELIVERY_SECONDS)

    # ---- fleets ----------------------------------------------------------------------------------------------------

    def _join_fleet(self, plan: Plan) -> Job | None:
        """Return the job if a fleet runs it already. Complete the start of that run, which may have been killed."""
        from headway.run.fleet import start as fleets

        run = fleets.running(plan)
        if run is None:
            return None
        job = self._the_ledger.job(plan.id)
        self._followed, self.joined = (job, run), True
        fleets.rejoin(self._the_ledger, job, self._request.config)
        return job

    def _hand_over(self) -> Job:
        from headway.run.fleet import start as fleets

        held, ledger = self.held, self._the_ledger
        try:
            fleets.start(ledger, held, self._request)
        except BaseException:
            if fleets.may_have(held.job):
                self._held = None  # it goes on without this process
            raise
        job = ledger.job(held.job.id)
        self._held, self._followed = None, (job, held.hold.run)
        return job

    def _follow(self, display: Display, job: Job, run: int) -> Ending | None:
        from headway.run.fleet import start as fleets

        ending = fleets.follow(self._the_ledger, job, run, display=display, shutdown=self._request.shutdown)
        if ending is not None and self._request.output is not None:
            # Slots record results only in the ledger, so the file is written here.
            file = open_output(job, self._request.output)
            try:
                file.write()
            finally:
                file.close()
        return ending
