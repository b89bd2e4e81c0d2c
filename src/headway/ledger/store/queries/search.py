"""Find jobs, items and causes: lists with filters, and search by a text.

The cost is bounded: an index leads to the rows, or at most `RECENT` jobs are examined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from headway._lease import has_ended
from headway._sql import Database, Row, Tx, Value, marks
from headway.ledger.store.report import find_jobs
from headway.ledger.values import NOTED, JobInfo

#: Jobs that are searched for an item, the most recently changed first.
RECENT = 100
#: Newest entries of the audit trail that are searched.
AUDITED = 5000


class JobFilter(NamedTuple):
    """Which jobs a list shows."""

    #: One of the words of `JobInfo.status`, or None for all.
    status: str | None = None
    #: Part of an id or a function.
    text: str = ""
    archived: bool = False
    #: Whether a process must hold the job.
    running: bool = False


def list_jobs(
    database: Database, chosen: JobFilter, *, by_creation: bool = False, below: int | None = None, limit: int
) -> tuple[list[JobInfo], JobInfo | None]:
    """Return a page of jobs and, if there are more, the last job that was examined.

    The most recently changed come first, or with ``by_creation`` the newest. ``below`` is a job number that the page
    continues from. SQL narrows the status as far as it can; whether a holder is alive is decided here.
    """
    where, values = ["true" if chosen.archived else "archived = 0"], list[Value]()
    if chosen.text:
        where.append("(lower(id) LIKE ? ESCAPE '!' OR lower(function) LIKE ? ESCAPE '!')")
        values += [containing(chosen.text)] * 2
    if chosen.running or chosen.status in ("processing", "paused"):
        where.append("holder IS NOT NULL")
    elif chosen.status == "completed":
        where.append("finished_at IS NOT NULL AND holder IS NULL")
    elif chosen.status is not None:
        where.append("finished_at IS NULL")
    if below is not None:
        where.append("no < ?")
        values.append(below)
    order = "no DESC" if by_creation else "updated_at DESC, no DESC"
    found = find_jobs(database, f"WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?", (*values, limit + 1))
    page = [
        info for info in found[:limit] if chosen.status in (None, info.status) and (info.held or not chosen.running)
    ]
    return page, found[limit - 1] if len(found) > limit else None


def count_jobs(database: Database, *, archived: bool = False) -> dict[str, int]:
    """Return the number of jobs by status. Only jobs with a holder are read one by one."""
    where = "true" if archived else "archived = 0"
    counts: dict[str, int] = {}
    for info in find_jobs(database, f"WHERE {where} AND holder IS NOT NULL"):
        counts[info.status] = counts.get(info.status, 0) + 1
    rows = database.all(
        "SELECT CASE WHEN finished_at IS NOT NULL THEN 'completed' "
        "WHEN (SELECT r.outcome FROM runs r WHERE r.job = jobs.no ORDER BY r.no DESC LIMIT 1) = 'finished' "
        "THEN 'needs a run' WHEN done + (SELECT coalesce(sum(b.done), 0) FROM blocks b WHERE b.job = jobs.no) "
        "+ failed + dead = 0 THEN 'pending' ELSE 'interrupted' END AS state, count(*) "
        f"FROM jobs WHERE {where} AND holder IS NULL GROUP BY 1"
    )
    for status, count in rows:
        counts[status] = counts.get(status, 0) + int(count)
    return counts


def similar_ids(database: Database, id: str, limit: int) -> list[str]:
    """Return ids that a mistyped id may stand for: its neighbours in the index, and the newest; up to ``limit`` of each."""
    found: dict[str, None] = {}
    for rest, values in (
        ("WHERE id > ? ORDER BY id", (id,)),
        ("WHERE id < ? ORDER BY id DESC", (id,)),
        ("ORDER BY no DESC", ()),
    ):
        found |= dict.fromkeys(
            str(id) for (id,) in database.all(f"SELECT id FROM jobs {rest} LIMIT ?", (*values, limit))
        )
    return list(found)


# ---- search ------------------------------------------------------------------------------------------------------------


def containing(text: str) -> str:
    """Return the LIKE pattern (with ESCAPE '!') of lower-case texts that contain ``text``."""
    for special in "!%_":
        text = text.replace(special, f"!{special}")
    return f"%{text.lower()}%"


class FoundItem(NamedTuple):
    """An item that a search found."""

    job: str
    key: str
    idx: int


def items_by_key(tx: Tx, prefix: str, limit: int) -> list[FoundItem]:
    """Return items whose key begins with ``prefix``, exact matches first, then by the job that changed last.

    Each job is entered by the index on keys. At most ``limit`` keys are read from each of the `RECENT` jobs.
    """
    jobs = tx.all(f"SELECT no, id FROM jobs WHERE archived = 0 ORDER BY updated_at DESC LIMIT {RECENT}")
    if not jobs or not prefix:
        return []
    each = "SELECT * FROM (SELECT job, idx, key FROM input_products WHERE job = ? AND key >= ? ORDER BY key LIMIT ?) AS q{}"
    sql = " UNION ALL ".join(each.format(place) for place in range(len(jobs)))
    rows = tx.all(sql, [value for no, _ in jobs for value in (no, prefix, limit)])
    ids: dict[int, str] = dict(jobs)
    order = {no: place for place, (no, _) in enumerate(jobs)}
    rows = [row for row in rows if str(row[2]).startswith(prefix)]
    rows.sort(key=lambda row: (row[2] != prefix, order[row[0]], row[2]))
    return [FoundItem(ids[job], key, int(idx)) for job, idx, key in rows[:limit]]


def causes_by_text(tx: Tx, text: str, limit: int) -> list[Row]:
    """Return (job, no, type, message, dead) of causes whose type, message or frame contains ``text``."""
    pattern = containing(text)
    return tx.all(
        "SELECT j.id, c.no, c.type, c.message, (SELECT count(*) FROM dead_letters d WHERE d.job = c.job AND d.cause = c.no) "
        "FROM causes c JOIN jobs j ON j.no = c.job WHERE j.archived = 0 AND (lower(c.type) LIKE ? ESCAPE '!' "
        "OR lower(c.message) LIKE ? ESCAPE '!' OR lower(c.frame) LIKE ? ESCAPE '!') "
        "ORDER BY c.last_seen DESC, c.job DESC, c.no LIMIT ?",
        (pattern, pattern, pattern, limit),
    )


# ---- failures by host, marks, stops ------------------------------------------------------------------------------------


def failures_by_worker(tx: Tx, since: float) -> list[tuple[str, str, int]]:
    """Return (worker, host, failed attempts) of items since a Unix time. The host is empty if the run does not tell it.

    Attempts have no index by time. The causes tell which jobs had failures since; the time of each attempt decides.
    """
    jobs = [
        no
        for (no,) in tx.all(
            "SELECT DISTINCT c.job FROM causes c JOIN jobs j ON j.no = c.job WHERE c.last_seen >= ? AND j.updated_at >= ?",
            (since, since),
        )
    ]
    rows = tx.all(
        f"SELECT job, worker, count(*) FROM attempts WHERE job IN ({marks(len(jobs))}) AND at >= ? GROUP BY job, worker",
        (*jobs, since),
    )
    hosts = {
        (job, f"{NOTED}{no}"): host
        for job, no, host in tx.all(f"SELECT job, no, host FROM runs WHERE job IN ({marks(len(jobs))})", jobs)
    }
    found = []
    for job, worker, count in rows:
        run = " ".join((worker or "").split(" ", 2)[:2])  # "run 3 worker 1"
        found.append((worker or "", hosts.get((job, run), ""), int(count)))
    return found


def runs_between(tx: Tx, start: float, end: float, job: str | None, limit: int) -> list[Row]:
    """Return (job, no, host, settings, started_at, ended_at, outcome) of runs that started or ended in a period."""
    rows = tx.all(
        "SELECT j.id, r.no, r.host, r.settings, r.started_at, r.ended_at, r.outcome, j.holder, j.lease_until, j.updated_at "
        "FROM runs r JOIN jobs j ON j.no = r.job "
        f"WHERE {'j.id = ? AND ' if job is not None else ''}j.updated_at >= ? AND r.started_at <= ? "
        "ORDER BY r.started_at DESC LIMIT ?",
        (*(() if job is None else (job,)), start, end, limit),
    )
    now, found = tx.now(), []
    for id, no, host, settings, started, ended, outcome, holder, until, updated in rows:
        if outcome is None and (holder is None or has_ended(holder, until, now)):
            found.append((id, no, host, settings, started, max(started, updated), "lost"))
        else:
            found.append((id, no, host, settings, started, ended, outcome))
    return found


def audited_between(tx: Tx, start: float, end: float, actions: Sequence[str], job: str | None, limit: int) -> list[Row]:
    """Return (at, actor, action, job, detail) of these actions in a period, newest first."""
    return tx.all(
        f"SELECT at, actor, action, job, detail FROM (SELECT * FROM audit ORDER BY seq DESC LIMIT {AUDITED}) AS newest "
        f"WHERE at >= ? AND at <= ? AND action IN ({marks(len(actions))}) "
        f"{'AND job = ? ' if job is not None else ''}ORDER BY seq DESC LIMIT ?",
        (start, end, *actions, *(() if job is None else (job,)), limit),
    )


def stops_of(tx: Tx, job: str) -> dict[int, tuple[str, str]]:
    """Return who stopped each run of a job, and the reason: run -> (actor, reason)."""
    found: dict[int, tuple[str, str]] = {}
    for _, actor, _, _, detail in audited_between(tx, 0.0, tx.now(), ("stop",), job, AUDITED):
        facts = json.loads(detail)
        found.setdefault(int(facts.get("run", 0)), (actor, str(facts.get("reason", ""))))
    return found
