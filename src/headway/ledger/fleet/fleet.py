"""A job that many processes work on at once, on PostgreSQL.

The fleet holds the job, not a process, so the hold does not expire. A *slot* is one participating process. It claims a
*block*, a range of untried items, by moving the job's frontier. That locks the job's row once per block.

Successes are recorded under the block's own row. Its token is the fence: a slot that was suspended past its lease, and
whose block was taken over, records nothing more. The block's row also counts its done items until the next claim adds
them to the job's row. Readers add the two.

Retries, long-running items and last passes are claimed item by item, each with its own token. Failures are recorded
under the job's row, as in a local run.

The transaction that finds nothing left finishes the job under the job's row: once, with its event.
"""

from __future__ import annotations

import json
from typing import Any

from headway._lease import has_ended
from headway._sql import Database, Row, Tx
from headway.ledger.fleet import store
from headway.ledger.fleet.store import Fleet, read
from headway.ledger.fleet.store import read_all as all_fleets
from headway.ledger.job_lease import Hold
from headway.ledger.store import items, jobs
from headway.ledger.store.completion import is_complete
from headway.ledger.store.recorder import Recorder
from headway.telemetry import Log

__all__ = ["Fleet", "all_fleets", "attend", "counts_before", "end", "hand_over", "note", "read", "reopen", "settle"]

log = Log("ledger")

#: End of a fleet's lease: it never expires and is ended explicitly.
FOR_EVER = 1e11


def hand_over(
    database: Database,
    hold: Hold,
    *,
    work: str,
    queue: str,
    slots: int | None,
    most: int | None,
    has_pass: bool,
) -> None:
    """Hand the job, which this process holds, over to the fleet."""

    def change(tx: Tx) -> None:
        row = Recorder(tx, hold.job, token=hold.token, owner=hold.owner).row
        holder = json.dumps({"host": hold.owner.host, "pid": hold.owner.pid, "fleet": hold.run})
        jobs.set_holder(tx, hold.job, hold.token, holder, FOR_EVER)
        before = {"failures": row.failures, "dead": row.dead}
        order = {"work": work, "most": most, "pass": has_pass, "before": before}
        known = {
            **jobs.run_settings(tx, hold.job, hold.run),
            "fleet": True,
            "slots": slots,
            "queue": queue,
            "order": order,
        }
        jobs.set_run_settings(tx, hold.job, hold.run, known)
        store.insert(tx, _new(hold.job, hold.run, hold.token, known))

    database.run(change, operation="fleet.start")


def _new(job: int, run: int, token: int, settings: dict[str, Any]) -> Fleet:
    """Return the fleet that the settings of a run describe."""
    order = settings["order"]
    return Fleet(
        job, run, token, order["work"], settings["queue"], settings["slots"], order["most"],
        died=0, has_pass=order["pass"], stopped=False, note=None, noted_at=None,
    )  # fmt: skip


def counts_before(database: Database, job: int, run: int) -> tuple[int, int] | None:
    """Return the failures and dead letters that the job had when the run began, or None if unknown."""
    before = (jobs.run_settings(database, job, run).get("order") or {}).get("before")
    return None if before is None else (before["failures"], before["dead"])


def reopen(recorder: Recorder, outcomes: tuple[str, ...] = ("finished",)) -> bool:
    """Continue the last run of a fleet, if it ended with one of these outcomes. Return whether it did.

    The run keeps its number, because an encrypted order is bound to it. A new token fences the earlier slots. The
    sweeper of any worker submits new slots.
    """
    tx, no = recorder.tx, recorder.no
    last = jobs.last_run(tx, no)
    if last is None:
        return False
    run, host, pid, settings, outcome = last
    known: dict[str, Any] = json.loads(settings)
    if recorder.row.holder is not None or outcome not in outcomes or known.get("order") is None:
        return False
    token = recorder.row.token + 1
    jobs.set_holder(tx, no, token, json.dumps({"host": host, "pid": pid, "fleet": run}), FOR_EVER)
    jobs.reopen_run(tx, no, run, token)
    store.insert(tx, _new(no, run, token, known))
    log.info("the fleet's run goes on", job=recorder.id)
    return True


def note(database: Database, job: int, run: int, text: str) -> None:
    """Store why a worker refused to take part, for display."""
    database.run(lambda tx: store.note(tx, job, run, text), operation="fleet.note")


def attend(database: Database, job: int) -> bool:
    """End the job's run if it is complete, or was asked to stop and no slot is working.

    Returns whether slots should be working. The sweeper calls this, but any process may.
    """
    if read(database, job) is None:
        return False

    def work(tx: Tx) -> bool:
        fleet = store.read(tx, job)
        if fleet is None:
            return False
        recorder = Recorder(tx, job, token=fleet.token)
        requests = jobs.control(tx, job, fleet.run)
        if requests.stopping or fleet.stopped:
            _shorten_all(recorder)
            if not _is_active(recorder):
                end(recorder, fleet, "stopped" if fleet.stopped else "interrupted")
            return False
        if settle(recorder, fleet):
            return False
        return not requests.paused and _has_work(recorder, fleet)

    return database.run(work, operation="fleet.attend")


def _claimants(recorder: Recorder) -> list[Row]:
    """Return (holder, lease_until) of every claim on a block or an item."""
    return [*store.claimants(recorder.tx, recorder.no), *items.claimants(recorder.tx, recorder.no)]


def _is_active(recorder: Recorder) -> bool:
    """Return whether a live slot has a block or an item of the job."""
    return any(not has_ended(holder, until, recorder.now) for holder, until in _claimants(recorder))


def _shorten_all(recorder: Recorder) -> None:
    """Shorten claims that end too late (see `headway._lease.shorten`), before checking for live slots."""
    store.shorten_blocks(recorder.tx, recorder.no)
    items.shorten_claims(recorder.tx, recorder.no)


def _has_work(recorder: Recorder, fleet: Fleet) -> bool:
    """Return whether there is something to claim now or within 2 seconds."""
    tx, no = recorder.tx, recorder.no
    if store.has_items_from(tx, no, recorder.row.frontier):
        return True
    _shorten_all(recorder)
    if any(has_ended(holder, until, recorder.now) for holder, until in _claimants(recorder)):
        return True
    if items.is_due(tx, no, recorder.now + 2.0):
        return True
    if store.has_blocks(tx, no):
        return False
    if fleet.has_pass and is_complete(recorder.row):
        return bool(items.last_pass(tx, no, 1, unclaimed=True))
    return not recorder.row.failed and not items.is_any_claimed(tx, no)


def settle(recorder: Recorder, fleet: Fleet) -> bool:
    """End the run and finish the job if nothing is left to do. Return whether it did."""
    if store.has_blocks(recorder.tx, recorder.no) or not _is_complete(recorder, fleet):
        return False
    end(recorder, fleet, "finished")
    return True


def _is_complete(recorder: Recorder, fleet: Fleet) -> bool:
    """Return whether every item is done or dead, and every dead letter had its last pass."""
    if not is_complete(recorder.row):
        return False
    return not fleet.has_pass or not items.awaits_last_pass(recorder.tx, recorder.no)


def end(recorder: Recorder, fleet: Fleet, outcome: str) -> None:
    """End the run and release the job. Claims without a recorded outcome are undone.

    An interrupted run counts as finished if everything was recorded.
    """
    tx, no, row = recorder.tx, recorder.no, recorder.row
    for first, done, seconds in store.counts(tx, no):
        row.count_done(done, seconds)
        row.frontier = min(row.frontier, first)
    items.release_all(tx, no, recorder.now)
    if outcome == "interrupted" and _is_complete(recorder, fleet):
        outcome = "finished"
    recorder.close(settle=outcome == "finished")
    store.delete(tx, no)
    jobs.free(tx, no, fleet.token)
    jobs.end_run(tx, no, fleet.run, outcome, recorder.now)
    log.info("the fleet's run has ended", job=recorder.id, reason=outcome)
