"""The right to run a job: at most one process at a time, by a lease on the job's row (`headway._lease`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from headway._lease import Lease, Owner, SqlLeases, has_ended
from headway._sql import Database, Tx
from headway.core.failure import Failure
from headway.core.retry import RetryPolicy
from headway.errors import Held, JobHeld, NotFound
from headway.ledger.fleet import store as fleets
from headway.ledger.store import items, jobs
from headway.ledger.store.audit import audit
from headway.ledger.store.recorder import Recorder
from headway.ledger.values import NOTED, Failed
from headway.telemetry import Log

log = Log("ledger")

#: Seconds after which a killed holder's job can be acquired. On the same machine, it can be acquired at once.
LEASE = 25.0

RUN_LOST = Failure("RunLost", "the whole run was killed while it worked on this item")

_LEASES = SqlLeases("jobs", "no")


@dataclass(frozen=True, slots=True)
class Hold:
    """The right to record for a whole job.

    ``token`` is its fence: the ledger refuses it once another process holds the job.
    """

    job: int
    token: int
    run: int
    lease: float
    owner: Owner

    @property
    def mark(self) -> str:
        """Return the prefix of this run's workers in the ledger."""
        return f"{NOTED}{self.run}"


def acquire(
    database: Database, job: int, settings: dict[str, Any], *, policy: RetryPolicy | None, lease: float = LEASE
) -> Hold:
    """Acquire the job for a new run. Raises `JobHeld`, which names the current holder.

    Replacing a killed run also records the runs of its items as lost, repairs known inconsistencies, and recounts.
    """
    me = Owner.current()

    def work(tx: Tx) -> Hold | JobHeld:
        recorder = Recorder(tx, job)
        found = _LEASES.acquire(tx, job, me, lease)
        if isinstance(found, Held):
            return _held(tx, job, recorder.id)
        if policy is not None:
            recorder.row.set_policy(policy)
        jobs.end_lost_runs(tx, job, recorder.now)
        _correct(recorder)
        _charge_lost(recorder)
        run = jobs.insert_run(
            tx, job, token=found.token, owner=me, settings=settings, kept=recorder.row.done, now=recorder.now
        )
        recorder.close(settle=False)
        return Hold(job, found.token, run, lease, me)

    hold = database.run(work, operation="hold")
    if isinstance(hold, JobHeld):
        raise hold
    return hold


def _held(tx: Tx, job: int, id: str) -> JobHeld:
    if fleets.read(tx, job) is not None:
        return JobHeld(
            f"Job {id} is being run by a fleet.",
            hint=f"See its progress: headway show {id}. End its run: headway stop {id}",
        )
    return JobHeld(
        f"Job {id} is being run by {_LEASES.holder(tx, job) or 'another process'}.",
        hint=f"See its progress: headway show {id}. It is freed within 30 s of that process's death.",
    )


def refusal(tx: Tx, job: int, id: str) -> JobHeld | None:
    """Return why the job cannot be archived or deleted now, or None.

    Raise it after the commit: as in `acquire`, a lease that expires too late was shortened.
    """
    _, holder, until, _ = jobs.lock_holder(tx, job)  # locked, so that no run can start before the change
    if holder is None or has_ended(holder, until, tx.now()):
        return None
    _LEASES.shorten(tx, job)
    return JobHeld(
        f"Job {id} is being run.", hint="Stop that run first: Ctrl-C where it runs, or see: headway show JOB"
    )


def renew(database: Database, hold: Hold, running: Collection[int] = ()) -> None:
    """Renew the lease and the notes on the running items.

    Raises `StaleClaim` if another process has the job. Notes on other items expire. A restored database may have notes
    on items that ended since; those run again.
    """

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token, owner=hold.owner)
        _LEASES.renew(tx, _lease(hold))
        if running:
            items.renew_notes(tx, hold.job, hold.mark, sorted(running), recorder.now + hold.lease)

    database.run(work, operation="renew")


def release(database: Database, hold: Hold, outcome: str) -> None:
    """End the run with ``outcome`` and release the job."""

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token, owner=hold.owner)
        # After a restore of the database another run may have had the same token and number, and has ended since.
        # Its outcome stays.
        if _LEASES.release(tx, _lease(hold)):
            jobs.end_run(tx, hold.job, hold.run, outcome, recorder.now)

    try:
        database.run(work, operation="release")
    except NotFound:
        log.info("the job was deleted while it ran")


def _lease(hold: Hold) -> Lease:
    return Lease(hold.job, hold.token, hold.owner, hold.lease)


def _charge_lost(recorder: Recorder) -> None:
    """Count an attempt of every item that a killed run has noted as running."""
    noted = items.noted(recorder.tx, recorder.no)
    if noted:
        recorder.write([Failed(idx, RUN_LOST, outcome="lost", worker=worker) for idx, worker in noted])
        log.warning("the earlier run was killed; its running items are retried", job=recorder.id, count=len(noted))


def _correct(recorder: Recorder) -> None:
    """Repair known inconsistencies, which only an edit from outside can cause. Each repair is logged and audited."""
    tx, no, now = recorder.tx, recorder.no, recorder.now
    for idx, status in items.correct_unknown_status(tx, no, now):
        _log_correction(recorder, f"item {idx} had the unknown status {status!r}; it is pending again")
    for idx in items.correct_done_and_dead(tx, no):
        _log_correction(recorder, f"item {idx} was done and dead; it is done")
    if waiting := items.correct_missing_time(tx, no, now):
        _log_correction(recorder, f"{waiting} items had no time of their next attempt; they are due now")
    count, first = items.dead_without_failure(tx, no)
    if count:
        what = f"{count} dead letters, the first is item {first}, have no recorded failure; they were not changed"
        audit(tx, now, "headway", "inconsistent", recorder.id, {"what": what})
        log.error(f"inconsistent: {what}", job=recorder.id)
    if recorder.row.recount():
        _log_correction(recorder, "the counters did not match the items; they were recounted")


def _log_correction(recorder: Recorder, what: str) -> None:
    audit(recorder.tx, recorder.now, "headway", "corrected", recorder.id, {"what": what})
    log.warning(f"corrected: {what}", job=recorder.id)
