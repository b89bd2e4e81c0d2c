"""Who runs a job: at most one process at a time, by a lease on the job's row (`headway._lease`)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from headway._lease import Lease, Owner, SqlLeases, has_ended
from headway._sql import Database, Tx, listed
from headway.core.failure import Failure
from headway.core.retry import RetryPolicy
from headway.errors import Held, JobHeld, NotFound
from headway.ledger.store.index_range import OPEN
from headway.ledger.store.recorder import Recorder, audit
from headway.ledger.values import NOTED, Failed
from headway.telemetry import Log

log = Log("ledger")

#: A killed holder's job is free again after so many seconds at the latest; on the same machine at once.
LEASE = 25.0

RUN_LOST = Failure("RunLost", "the whole run was killed while it worked on this item")

_LEASES = SqlLeases("jobs", "no")


@dataclass(frozen=True, slots=True)
class Hold:
    """The right to record for a whole job. ``token`` fences: once somebody else holds the job, this one is refused."""

    job: int
    token: int
    run: int
    lease: float
    owner: Owner

    @property
    def mark(self) -> str:
        """How workers of this run are named in the ledger."""
        return f"{NOTED}{self.run}"


def acquire(
    database: Database, job: int, settings: dict[str, Any], *, policy: RetryPolicy | None, lease: float = LEASE
) -> Hold:
    """Hold the job, or raise `JobHeld` and say who does.

    Taking over from a run that was killed also writes down the runs of items that were lost with it, puts right what
    the known corrections can put right, and counts anew.
    """
    me = Owner.current()

    def work(tx: Tx) -> Hold | JobHeld:
        recorder = Recorder(tx, job)
        found = _LEASES.acquire(tx, job, me, lease)
        if isinstance(found, Held):
            if tx.one("SELECT 1 FROM fleets WHERE job = ?", (job,)) is not None:
                return JobHeld(
                    f"Job {recorder.id} is being run by a fleet.",
                    hint=f"See how far it is: headway show {recorder.id}. End its run: headway stop {recorder.id}",
                )
            who = _LEASES.holder(tx, job) or "another process"
            return JobHeld(
                f"Job {recorder.id} is being run by {who}.",
                hint=f"See how far it is: headway show {recorder.id}. It is freed within 30 s of that process's death.",
            )
        token = found.token
        if policy is not None:
            recorder.set_policy(policy)
        end_lost_runs(tx, job, recorder.now)
        _correct(recorder)
        _charge_lost(recorder)
        run = tx.one("SELECT coalesce(max(no), 0) + 1 FROM runs WHERE job = ?", (job,))
        assert run is not None
        tx.execute(
            "INSERT INTO runs (job, no, token, host, pid, settings, kept, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (job, run[0], token, me.host, me.pid, json.dumps(settings), recorder.done, recorder.now),
        )
        recorder.close(settle=False)
        return Hold(job, token, run[0], lease, me)

    hold = database.run(work, operation="hold")
    if isinstance(hold, JobHeld):
        raise hold
    return hold


def refusal(tx: Tx, job: int, id: str) -> JobHeld | None:
    """Why the job cannot be put aside or deleted now, because somebody runs it. To be raised once the transaction is
    committed: as by `acquire`, a hold that ends too late was shortened."""
    locked = " FOR UPDATE" if tx.engine == "postgresql" else ""  # nobody takes it between this look and the change
    row = tx.one(f"SELECT holder, lease_until FROM jobs WHERE no = ?{locked}", (job,))
    if row is None or row[0] is None or has_ended(row[0], row[1], tx.now()):
        return None
    _LEASES.shorten(tx, job)
    return JobHeld(
        f"Job {id} is being run.", hint="Stop that run first: Ctrl-C where it runs, or see: headway show JOB"
    )


def end_lost_runs(tx: Tx, job: int, now: float) -> None:
    """Runs that nobody ended were lost: when they recorded last is the end that is known of them."""
    tx.execute(
        "UPDATE runs SET outcome = 'lost', ended_at = "
        "(SELECT CASE WHEN updated_at < started_at THEN started_at WHEN updated_at > ? THEN ? ELSE updated_at END "
        "FROM jobs WHERE no = ?) WHERE job = ? AND outcome IS NULL",
        (now, now, job, job),
    )


def renew(database: Database, hold: Hold, running: Collection[int] = ()) -> None:
    """Prolong the lease and the notes on the items that run; raises `StaleClaim` if the job was taken over.

    Notes on other items lapse. A database that was restored has notes on items that ended since: those run again.
    """

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token, owner=hold.owner)
        _LEASES.renew(tx, Lease(hold.job, hold.token, hold.owner, hold.lease))
        if running:
            until = recorder.now + hold.lease
            among, numbers = listed(tx.engine, sorted(running), "bigint")
            tx.execute(
                "UPDATE progress SET lease_until = ?, next_attempt_at = ? "
                f"WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL AND worker LIKE ? AND idx IN ({among})",
                (until, until, hold.job, f"{hold.mark} %", numbers),
            )

    database.run(work, operation="renew")


def release(database: Database, hold: Hold, outcome: str) -> None:
    """End the run and give the job back."""

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token, owner=hold.owner)
        if not _LEASES.release(tx, Lease(hold.job, hold.token, hold.owner, hold.lease)):
            # Somebody had the job since by the same token and number of the run, because the database was put back to an
            # earlier moment, and has ended: how is theirs to say.
            return
        tx.execute(
            "UPDATE runs SET outcome = ?, ended_at = CASE WHEN started_at > ? THEN started_at ELSE ? END "
            "WHERE job = ? AND no = ?",
            (outcome, recorder.now, recorder.now, hold.job, hold.run),
        )

    try:
        database.run(work, operation="release")
    except NotFound:
        log.info("the job was forgotten while it ran")


def _charge_lost(recorder: Recorder) -> None:
    """What an earlier run noted as running was lost with it: one attempt each."""
    rows = recorder.tx.all(
        f"SELECT idx, worker FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL AND worker LIKE ?",
        (recorder.no, f"{NOTED}%"),
    )
    if rows:
        lost = [Failed(idx, RUN_LOST, outcome="lost", worker=worker) for idx, worker in rows]
        recorder.write(lost)
        log.warning("the earlier run was killed; what it worked on is tried again", job=recorder.id, count=len(rows))


def _correct(recorder: Recorder) -> None:
    """Known inconsistencies, which only a foreign hand can make: each is put right, logged and audited."""
    unknown = recorder.tx.all(
        "SELECT idx, status FROM progress WHERE job = ? AND status NOT IN ('pending', 'done', 'failed')", (recorder.no,)
    )
    for idx, status in unknown:
        recorder.tx.execute(
            "UPDATE progress SET status = 'pending', next_attempt_at = ? WHERE job = ? AND idx = ?",
            (recorder.now, recorder.no, idx),
        )
        _say_corrected(recorder, f"item {idx} had the unknown status {status!r}; it is pending again")
    both = recorder.tx.all(
        "SELECT d.idx FROM dead_letters d JOIN progress p ON p.job = d.job AND p.idx = d.idx "
        "WHERE d.job = ? AND p.status = 'done'",
        (recorder.no,),
    )
    for (idx,) in both:
        recorder.tx.execute("DELETE FROM dead_letters WHERE job = ? AND idx = ?", (recorder.no, idx))
        _say_corrected(recorder, f"item {idx} was done and dead; it is done")
    waiting = recorder.tx.execute(
        f"UPDATE progress SET next_attempt_at = ? WHERE job = ? AND {OPEN} AND next_attempt_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.job = progress.job AND d.idx = progress.idx)",
        (recorder.now, recorder.no),
    )
    if waiting:
        _say_corrected(recorder, f"{waiting} items waited for no moment at all; they may be tried now")
    strange = recorder.tx.one(
        "SELECT count(*), min(d.idx) FROM dead_letters d WHERE d.job = ? AND NOT EXISTS "
        "(SELECT 1 FROM progress p WHERE p.job = d.job AND p.idx = d.idx)",
        (recorder.no,),
    )
    if strange is not None and strange[0]:
        what = f"{strange[0]} dead letters, the first is item {strange[1]}, have no failure recorded; they were left so"
        audit(recorder.tx, recorder.now, "headway", "inconsistent", recorder.id, {"what": what})
        log.error(f"inconsistent: {what}", job=recorder.id)
    if recorder.recount():
        _say_corrected(recorder, "the counters did not agree with the items and were counted anew")


def _say_corrected(recorder: Recorder, what: str) -> None:
    audit(recorder.tx, recorder.now, "headway", "corrected", recorder.id, {"what": what})
    log.warning(f"corrected: {what}", job=recorder.id)
