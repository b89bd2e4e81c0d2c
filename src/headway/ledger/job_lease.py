"""Who runs a job. At most one process at a time; the lease is freed by itself when that process dies."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway._sql import Database, Tx
from headway.errors import JobHeld, NotFound
from headway.ledger.recorder import Recorder, audit
from headway.ledger.values import Failed, Failure
from headway.retry import ITEM
from headway.telemetry import Log

log = Log("ledger")

#: A killed holder's job is free again after so many seconds at the latest.
LEASE = 25.0

#: Claims that `Job.note_running` wrote begin with this; they end with the hold.
NOTED = "run "

RUN_LOST = Failure("RunLost", "the whole run was killed while it worked on this item")


@dataclass(frozen=True, slots=True)
class Hold:
    """The right to record for a whole job. ``token`` fences: once somebody else holds the job, this one is refused."""

    job: int
    token: int
    run: int
    lease: float

    @property
    def mark(self) -> str:
        """How workers of this run are named in the ledger."""
        return f"{NOTED}{self.run}"


def take(database: Database, job: int, settings: dict[str, Any], *, lease: float = LEASE) -> Hold:
    """Hold the job, or raise `JobHeld` and say who does.

    Taking over from a run that was killed also writes down the runs of items that were lost with it, puts right what
    the known corrections can put right, and counts anew.
    """
    me = _identity()

    def work(tx: Tx) -> Hold:
        recorder = Recorder(tx, job)
        row = tx.one("SELECT holder, lease_until, token FROM jobs WHERE no = ?", (job,))
        assert row is not None
        holder, until, token = row
        if holder is not None and until > recorder.now and not _is_dead(json.loads(holder), me):
            who = json.loads(holder)
            raise JobHeld(
                f"Job {recorder.id} is being run by process {who['pid']} on {who['host']}.",
                hint=f"See how far it is: headway show {recorder.id}. It is freed within 30 s of that process's death.",
            )
        token += 1
        tx.execute(
            "UPDATE jobs SET holder = ?, token = ?, lease_until = ? WHERE no = ?",
            (json.dumps(me), token, recorder.now + lease, job),
        )
        tx.execute(
            "UPDATE runs SET outcome = 'lost', ended_at = (SELECT updated_at FROM jobs WHERE no = ?) "
            "WHERE job = ? AND outcome IS NULL",
            (job, job),
        )
        _correct(recorder)
        _charge_lost(recorder)
        run = tx.one("SELECT coalesce(max(no), 0) + 1 FROM runs WHERE job = ?", (job,))
        assert run is not None
        tx.execute(
            "INSERT INTO runs (job, no, token, host, pid, settings, kept, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (job, run[0], token, me["host"], me["pid"], json.dumps(settings), recorder.done, recorder.now),
        )
        recorder.close(settle=False)
        return Hold(job, token, run[0], lease)

    return database.run(work, operation="hold")


def renew(database: Database, hold: Hold) -> None:
    """Prolong the lease and the notes on long-running items; raises `StaleClaim` if the job was taken over."""

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token)
        until = recorder.now + hold.lease
        tx.execute("UPDATE jobs SET lease_until = ? WHERE no = ?", (until, hold.job))
        tx.execute(
            "UPDATE progress SET lease_until = ?, next_attempt_at = ? "
            "WHERE job = ? AND status <> 'done' AND lease_until IS NOT NULL AND worker LIKE ?",
            (until, until, hold.job, f"{hold.mark} %"),
        )

    database.run(work, operation="renew")


def release(database: Database, hold: Hold, outcome: str) -> None:
    """End the run and let go of the job."""

    def work(tx: Tx) -> None:
        recorder = Recorder(tx, hold.job, token=hold.token)
        tx.execute("UPDATE jobs SET holder = NULL, lease_until = NULL WHERE no = ?", (hold.job,))
        tx.execute(
            "UPDATE runs SET ended_at = ?, outcome = ? WHERE job = ? AND no = ?",
            (recorder.now, outcome, hold.job, hold.run),
        )

    try:
        database.run(work, operation="release")
    except NotFound:
        log.info("the job was forgotten while it ran")


def _charge_lost(recorder: Recorder) -> None:
    """What an earlier run noted as running was lost with it: one attempt each."""
    rows = recorder.tx.all(
        "SELECT idx, worker FROM progress WHERE job = ? AND status <> 'done' AND lease_until IS NOT NULL AND worker LIKE ?",
        (recorder.no, f"{NOTED}%"),
    )
    if rows:
        lost = [Failed(idx, RUN_LOST, outcome="lost", worker=worker) for idx, worker in rows]
        recorder.write(lost, ITEM)
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
        "UPDATE progress SET next_attempt_at = ? WHERE job = ? AND status <> 'done' AND next_attempt_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.job = progress.job AND d.idx = progress.idx)",
        (recorder.now, recorder.no),
    )
    if waiting:
        _say_corrected(recorder, f"{waiting} items waited for no moment at all; they may be tried now")
    if recorder.recount():
        _say_corrected(recorder, "the counters did not agree with the items and were counted anew")


def _say_corrected(recorder: Recorder, what: str) -> None:
    audit(recorder.tx, recorder.now, "headway", "corrected", recorder.id, {"what": what})
    log.warning(f"corrected: {what}", job=recorder.id)


# ---------------------------------------------------------------------------------------------------------------------
# Who is who


def _identity() -> dict[str, Any]:
    return {"host": socket.gethostname(), "space": _pid_space(), "pid": os.getpid(), "born": _born(os.getpid())}


def _is_dead(holder: dict[str, Any], me: dict[str, Any]) -> bool:
    """Whether the holder can be *seen* to be gone. Only for a process of this machine; others are waited for."""
    if (holder["host"], holder["space"]) != (me["host"], me["space"]) or not holder["space"]:
        return False
    return bool(_born(holder["pid"]) != holder["born"])


def _pid_space() -> str:
    """Two containers may share a host name and each have a process 7: their pid namespaces differ."""
    try:
        return os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When the process began, as the kernel counts: a reused pid is another process. Empty if there is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state[0] in "ZX" else state[19]
