"""One run of a job: hold it, work it off, release it and deliver its events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway import events
from headway.config import Config
from headway.core.lifecycle import Shutdown
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, JobHeld, Stopping
from headway.events import CallableSink, Sink
from headway.ledger import Hold, Job, Ledger
from headway.run import function as functions
from headway.run import plan as plans
from headway.run.display.display import Display
from headway.run.output.files import CsvOutput, Output, keeps_results, open_output, refuse_foreign, refuse_incomplete
from headway.run.output.results import Keep
from headway.run.pool.executor import Executor, ExecutorRunner, capacity, check_executor
from headway.run.pool.local import LocalRunner
from headway.run.pool.loop import RunLoop
from headway.run.pool.runner import Ending, Feed, HeldJob, RunContext, Runner, RunParts, Settings
from headway.run.program import Work
from headway.telemetry import Log

log = Log("run")

#: Seconds that the end of a run waits for sinks. Undelivered events stay in the outbox.
TELL_SECONDS = 5.0


def check_output(path: Path, ledger: Ledger | None, plan: plans.Plan) -> None:
    """Refuse a file of results that belongs to another job or would be incomplete. Nothing is written."""
    refuse_foreign(path, ledger, plan.id)
    if ledger is not None and plan.existing is not None:
        refuse_incomplete(ledger.job(plan.id))


def take(
    ledger: Ledger,
    plan: plans.Plan,
    settings: Settings,
    *,
    command: str = "",
    accept: bool = False,
) -> tuple[Job, Hold]:
    """Hold the planned job and register its items.

    The hold prevents concurrent changes. If another process started, replaced or changed the job since planning,
    `JobHeld` is raised and the job is unchanged.
    """
    if plan.fresh:
        ledger.archive(plan.id)
    job = ledger.create(plan.id, max_retries=settings.policy.retries)
    hold = ledger.hold(job, describe(settings), policy=settings.policy)
    job = job.held_by(hold)
    try:
        if not plans.is_current(plan, job):
            raise JobHeld(
                f"Job {plan.id} was started or changed by another process at the same moment.", hint="Run it again."
            )
        plans.carry_out(ledger, job, plan, max_retries=settings.policy.retries, command=command, accept=accept)
    except BaseException as error:
        ledger.release(hold, "interrupted" if isinstance(error, Stopping) else "failed")
        raise
    return job, hold


def perform(
    ledger: Ledger,
    job: Job,
    hold: Hold,
    function: Work,
    settings: Settings,
    *,
    display: Display,
    shutdown: Shutdown,
    output: Path | None = None,
    keep: Keep | None = None,
    feed: Feed | None = None,
    sinks: Sequence[Sink] = (),
    executor: Executor | None = None,
) -> Ending:
    """Work off the job under ``hold`` and release it.

    Then deliver events to the sinks, unless the run was interrupted.
    """
    outcome = "failed"
    file: Output | CsvOutput | None = None
    keep = keep or Keep()
    try:
        file = None if output is None else open_output(job, output)
        keep = replace(keep, all_results=keep.results and keeps_results(job))
        if settings.start.why:
            display.say(settings.start.why)

        def runner(parts: RunParts) -> Runner:
            if executor is None:
                return LocalRunner(parts, function)
            assert callable(function)
            return ExecutorRunner(parts, function, executor)

        held = HeldJob(job, hold, lambda running: ledger.renew(hold, running))
        ending = RunLoop(held, settings, RunContext(display, shutdown, file, feed), keep, runner).run()
        outcome = ending.outcome
    finally:
        if file is not None:
            file.close()
        _release(ledger, hold, outcome)
    if outcome != "interrupted":  # an interrupted run has no event and must not wait for sinks
        tell(ledger, sinks, shutdown.abandon)
    return ending


def tell(ledger: Ledger, sinks: Sequence[Sink], stop: threading.Event | None = None) -> None:
    """Deliver events from the outbox for a few seconds.

    A later relay delivers the rest. Call it after the last fork of this process, because the relay starts threads.
    """
    own = [sink for sink in sinks if isinstance(sink, CallableSink)]
    others = [sink for sink in sinks if sink not in own]
    if sinks:
        with events.start(database=ledger.database, sinks=others, stop=stop) as relay:
            if own:
                events.Relay(events.SqlOutbox(ledger.database), own).drain_here(TELL_SECONDS, stop)
            relay.drain(TELL_SECONDS)


def _release(ledger: Ledger, hold: Hold, outcome: str) -> None:
    try:
        ledger.release(hold, outcome)
    except HeadwayError as error:
        if outcome != "failed":
            raise
        # Let the original error propagate; the lease expires by itself.
        log.warning("the job could not be released", error=str(error))


def configured_sinks(config: Config) -> list[Sink]:
    """Open the sinks from the settings."""
    return events.configured_sinks(config)


def describe(settings: Settings) -> dict[str, Any]:
    """Return the settings as recorded with the run."""
    return {
        "workers": settings.workers,
        "mode": settings.mode,
        "retries": settings.policy.retries,
        "retry_delay": settings.policy.base,
        "timeout": settings.timeout,
        "rate": settings.rate,
        "max_failures": settings.max_failures,
    }


def settings_of(
    config: Config,
    function: Work,
    name: str,
    *,
    last_pass: bool,
    fleet: bool = False,
    executor: Executor | None = None,
    encode: Callable[[Any], Any] | None = None,
) -> Settings:
    """Return the settings of a run, for both `headway run` and `headway.map`. `Config` has validated the values."""
    mode = None if config.origin("mode") == "default" else config.text("mode")
    workers, timeout, rate, most = (config[key] for key in ("workers", "timeout", "rate", "max_failures"))
    start = functions.FORK
    if executor is not None:
        check_executor(executor, mode if config.origin("mode") == "command line" else None)
        mode = "executor"
        workers = workers or capacity(executor)
    else:
        mode = functions.choose_mode(function, mode, name, workers or None)
        start = functions.choose_start(function, encode, config.text("start"))
        if fleet and not workers and mode == "process":
            workers = 1  # per slot: the number of slots depends on the machines
    return Settings(
        workers=int(workers or functions.default_workers(mode)),
        mode=mode,
        policy=policy_of(config),
        timeout=None if timeout is None else float(timeout),
        rate=None if rate is None else float(rate),
        max_failures=None if most is None else int(most),
        last_pass=last_pass,
        start=start,
        database_option=config.database_option,
    )


def policy_of(config: Config) -> RetryPolicy:
    """Return the retry policy for failed items."""
    return RetryPolicy(int(config["retries"] or 0), float(config["retry_delay"] or 0), jitter=0.5, cap=300.0)
