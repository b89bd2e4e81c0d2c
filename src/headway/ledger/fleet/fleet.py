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
from typing import NamedTuple

from headway._lease import has_ended, shorten
from headway._sql import Database, Row, Tx
from headway.errors import Refused
from headway.ledger import control
from headway.ledger.fleet import claims
from headway.ledger.job_lease import Hold
from headway.ledger.store.index_range import OPEN
from headway.ledger.store.recorder import Recorder
from headway.telemetry import Log

log = Log("ledger")

#: End of a fleet's lease: it never expires, it is ended explicitly.
FOR_EVER = 1e11
SELECT_FLEET = "SELECT job, run, token, work, queue, slots, most, died, pass, stopped, note, noted_at FROM fleets"


class Fleet(NamedTuple):
    """The state of a job's fleet."""

    job: int
    run: int
    token: int
    work: str
    queue: str
    slots: int | None
    most: int | None
    died: int
    has_pass: bool
    stopped: bool
    note: str | None
    noted_at: float | None


def read(database: Database, job: int) -> Fleet | None:
    """Return the job's fleet, or None."""
    row = database.one(f"{SELECT_FLEET} WHERE job = ?", (job,))
    return None if row is None else fleet_of(row)


def all_fleets(database: Database) -> list[tuple[str, Fleet]]:
    """Return (job id, fleet) of every job that a fleet works on."""
    rows = database.all(
        "SELECT j.id, f.job, f.run, f.token, f.work, f.queue, f.slots, f.most, f.died, f.pass, f.stopped, f.note, "
        "f.noted_at FROM fleets f JOIN jobs j ON j.no = f.job ORDER BY f.job"
    )
    return [(row[0], fleet_of(row[1:])) for row in rows]


def fleet_of(row: Row) -> Fleet:
    """Build a `Fleet` from a row of `SELECT_FLEET`."""
    job, run, token, work, queue, slots, most, died, has_pass, stopped, note, noted_at = row
    return Fleet(job, run, token, work, queue, slots, most, died, bool(has_pass), bool(stopped), note, noted_at)


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
        recorder = Recorder(tx, hold.job, token=hold.token, owner=hold.owner)
        holder = json.dumps({"host": hold.owner.host, "pid": hold.owner.pid, "fleet": hold.run})
        tx.execute("UPDATE jobs SET holder = ?, lease_until = ? WHERE no = ?", (holder, FOR_EVER, hold.job))
        (settings,) = tx.one("SELECT settings FROM runs WHERE job = ? AND no = ?", (hold.job, hold.run)) or ("{}",)
        before = {"failures": recorder.failures, "dead": recorder.dead}
        order = {"work": work, "most": most, "pass": has_pass, "before": before}
        known = {**json.loads(settings), "fleet": True, "slots": slots, "queue": queue, "order": order}
        tx.execute("UPDATE runs SET settings = ? WHERE job = ? AND no = ?", (json.dumps(known), hold.job, hold.run))
        for table in ("blocks", "fleets"):
            tx.execute(f"DELETE FROM {table} WHERE job = ?", (hold.job,))
        tx.execute(
            "INSERT INTO fleets (job, run, token, work, queue, slots, most, pass) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (hold.job, hold.run, hold.token, work, queue, slots, most, int(has_pass)),
        )

    database.run(change, operation="fleet.start")


def counts_before(database: Database, job: int, run: int) -> tuple[int, int] | None:
    """Return the failures and dead letters that the job had when the run began, or None if unknown."""
    row = database.one("SELECT settings FROM runs WHERE job = ? AND no = ?", (job, run))
    before = (json.loads(row[0]).get("order") or {}).get("before") if row is not None else None
    return None if before is None else (before["failures"], before["dead"])


def reopen(recorder: Recorder) -> bool:
    """Continue the finished run of a fleet, because items are to be retried. Return whether there was one.

    The run keeps its number, because an encrypted order is bound to it. A new token fences the earlier slots. The
    sweeper of any worker submits new slots.
    """
    tx, no = recorder.tx, recorder.no
    row = tx.one(
        "SELECT r.no, r.host, r.pid, r.settings, r.outcome, j.holder, j.token FROM runs r JOIN jobs j ON j.no = r.job "
        "WHERE r.job = ? ORDER BY r.no DESC LIMIT 1",
        (no,),
    )
    if row is None:
        return False
    run, host, pid, settings, outcome, holder, token = row
    known = json.loads(settings)
    order = known.get("order")
    if holder is not None or outcome != "finished" or order is None:
        return False
    tx.execute(
        "UPDATE jobs SET token = ?, holder = ?, lease_until = ? WHERE no = ?",
        (token + 1, json.dumps({"host": host, "pid": pid, "fleet": run}), FOR_EVER, no),
    )
    tx.execute(
        "UPDATE runs SET token = ?, outcome = NULL, ended_at = NULL WHERE job = ? AND no = ?", (token + 1, no, run)
    )
    tx.execute("DELETE FROM controls WHERE job = ? AND run = ?", (no, run))
    tx.execute(
        "INSERT INTO fleets (job, run, token, work, queue, slots, most, pass) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (no, run, token + 1, order["work"], known["queue"], known["slots"], order["most"], int(order["pass"])),
    )
    log.info("the fleet's run goes on", job=recorder.id)
    return True


def note(database: Database, job: int, run: int, text: str) -> None:
    """Record why a worker refused to take part, for display."""
    database.run(
        lambda tx: tx.execute(
            "UPDATE fleets SET note = ?, noted_at = ? WHERE job = ? AND run = ?", (text[:500], tx.now(), job, run)
        ),
        operation="fleet.note",
    )


def attend(database: Database, job: int) -> bool:
    """End the job's run if it is complete, or was asked to stop and no slot is working.

    Returns whether slots should be working. The sweeper calls this, but any process may.
    """
    if read(database, job) is None:
        return False

    def work(tx: Tx) -> bool:
        found = tx.one(f"{SELECT_FLEET} WHERE job = ?", (job,))
        if found is None:
            return False
        fleet = fleet_of(found)
        recorder = Recorder(tx, job, token=fleet.token)
        asked = control.read_in(tx, job, fleet.run)
        if asked.stopping or fleet.stopped:
            _shorten_all(recorder)
            if not _is_active(tx, job, recorder.now):
                end(recorder, fleet, "stopped" if fleet.stopped else "interrupted")
            return False
        if settle(recorder, fleet):
            return False
        return not asked.paused and _has_work(recorder, fleet)

    return database.run(work, operation="fleet.attend")


def _is_active(tx: Tx, job: int, now: float) -> bool:
    """Return whether a live slot has a block or an item of the job."""
    return any(not has_ended(holder, until, now) for holder, until in (*_of_blocks(tx, job), *_of_items(tx, job)))


def _shorten_all(recorder: Recorder) -> None:
    """Shorten claims that end too late (see `headway._lease.shorten`), before checking for live slots."""
    shorten(recorder.tx, "blocks", "job = ?", (recorder.no,))
    claims.shorten_all(recorder)


def _of_blocks(tx: Tx, job: int) -> list[Row]:
    """Return (holder, end of lease) of each block."""
    return tx.all("SELECT holder, lease_until FROM blocks WHERE job = ?", (job,))


def _of_items(tx: Tx, job: int) -> list[Row]:
    """Return (holder, end of lease) of the items that slots claimed one by one."""
    return tx.all(
        f"SELECT holder, max(lease_until) FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL "
        "AND holder IS NOT NULL GROUP BY holder",
        (job,),
    )


def _has_work(recorder: Recorder, fleet: Fleet) -> bool:
    """Return whether there is something to claim now or within 2 seconds."""
    tx, no, soon = recorder.tx, recorder.no, recorder.now + 2.0
    if tx.one("SELECT 1 FROM input_products WHERE job = ? AND idx >= ? LIMIT 1", (no, recorder.frontier)) is not None:
        return True
    _shorten_all(recorder)
    blocks = _of_blocks(tx, no)
    if any(has_ended(holder, until, recorder.now) for holder, until in (*blocks, *_of_items(tx, no))):
        return True
    due = tx.one(f"SELECT 1 FROM progress WHERE job = ? AND {OPEN} AND next_attempt_at <= ? LIMIT 1", (no, soon))
    if due is not None:
        return True
    if not blocks and fleet.has_pass and _is_recorded(recorder):
        waiting = tx.one(
            "SELECT 1 FROM dead_letters d JOIN progress p ON p.job = d.job AND p.idx = d.idx "
            "WHERE d.job = ? AND d.last_pass = 0 AND p.lease_until IS NULL LIMIT 1",
            (no,),
        )
        return waiting is not None
    return not blocks and not recorder.failed and not is_busy(tx, no)


def is_busy(tx: Tx, job: int) -> bool:
    """Return whether anything is claimed, by a live slot or a dead one."""
    return tx.one("SELECT 1 FROM blocks WHERE job = ? LIMIT 1", (job,)) is not None or tx.one(
        f"SELECT 1 FROM progress WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL LIMIT 1", (job,)
    ) is not None  # fmt: skip


def settle(recorder: Recorder, fleet: Fleet) -> bool:
    """End the run and finish the job if nothing is left to do. Return whether it did."""
    if recorder.tx.one("SELECT 1 FROM blocks WHERE job = ? LIMIT 1", (recorder.no,)) is not None:
        return False
    if not _is_through(recorder, fleet):
        return False
    end(recorder, fleet, "finished")
    return True


def _is_recorded(recorder: Recorder) -> bool:
    """Return whether every item is done or dead."""
    return bool(recorder.sealed) and recorder.done + recorder.dead >= recorder.total


def _is_through(recorder: Recorder, fleet: Fleet) -> bool:
    """Return whether every item is done or dead, and every dead letter had its last pass."""
    if not _is_recorded(recorder):
        return False
    waiting = "SELECT 1 FROM dead_letters WHERE job = ? AND last_pass = 0 LIMIT 1"
    return not fleet.has_pass or recorder.tx.one(waiting, (recorder.no,)) is None


def end(recorder: Recorder, fleet: Fleet, outcome: str) -> None:
    """End the run and release the job. Claims without a recorded outcome are undone.

    An interrupted run counts as finished if everything was recorded.
    """
    tx, no = recorder.tx, recorder.no
    for first, done, seconds in tx.all("SELECT first, done, seconds FROM blocks WHERE job = ?", (no,)):
        recorder.count_done(done, seconds)
        recorder.frontier = min(recorder.frontier, first)
    tx.execute(
        "UPDATE progress SET lease_until = NULL, holder = NULL, next_attempt_at = CASE WHEN EXISTS (SELECT 1 FROM "
        "dead_letters d WHERE d.job = progress.job AND d.idx = progress.idx) THEN NULL ELSE CAST(? AS DOUBLE PRECISION) END "
        f"WHERE job = ? AND {OPEN} AND lease_until IS NOT NULL",
        (recorder.now, no),
    )
    if outcome == "interrupted" and _is_through(recorder, fleet):
        outcome = "finished"
    recorder.close(settle=outcome == "finished")
    tx.execute("DELETE FROM blocks WHERE job = ?", (no,))
    tx.execute("DELETE FROM fleets WHERE job = ?", (no,))
    tx.execute("UPDATE jobs SET holder = NULL, lease_until = NULL WHERE no = ? AND token = ?", (no, fleet.token))
    tx.execute(
        "UPDATE runs SET outcome = ?, ended_at = CASE WHEN started_at > ? THEN started_at ELSE ? END "
        "WHERE job = ? AND no = ?",
        (outcome, recorder.now, recorder.now, no, fleet.run),
    )
    log.info("the fleet's run has ended", job=recorder.id, reason=outcome)


def refuse_engine(database: Database) -> None:
    """Raise `Refused` unless the database is PostgreSQL."""
    if database.engine != "postgresql":
        raise Refused(
            "A fleet needs PostgreSQL: a SQLite file is one machine's.",
            hint="Give it one: HEADWAY_DATABASE=postgresql://user@host/name",
        )
