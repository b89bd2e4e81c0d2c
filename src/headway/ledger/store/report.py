"""Queries about a job. Counts come from its row; lists are read page by page along an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from headway._lease import has_ended
from headway._sql import Database, Row, Tx, Value, listed
from headway.errors import InvalidInput, NotFound
from headway.ledger.store import items as stored
from headway.ledger.store import jobs
from headway.ledger.store.contract import item_store
from headway.ledger.store.items import OPEN, last_of, rows_at, stretches
from headway.ledger.values import (
    NOTED,
    OF_THE_CAUSE,
    SAME_AS_CAUSE,
    Attempt,
    Cause,
    DeadLetter,
    ItemInfo,
    JobInfo,
    Postponed,
    Progress,
    Run,
    check_index,
    maybe_utc,
    utc,
)

#: Rows read at a time by the iterators.
PAGE = 1000
#: Some of this many last tried items may be running and have no row yet.
STRETCH = 2000
#: First chunk size when scanning for items in one state.
WALK = 500

#: Item state -> SQL condition. `Live` supplies {live}.
STATES = {
    "pending": "(p.idx IS NULL OR p.status = 'pending') AND NOT {live}",
    "processing": "{live}",
    "retrying": "p.status = 'failed' AND d.idx IS NULL AND NOT {live}",
    "done": "p.status = 'done'",
    "dead": "d.idx IS NOT NULL",
}

#: The few items that are not done. It selects only ``idx``: with another column SQLite would scan all items of the job.
_OPEN = f"SELECT o.idx FROM progress o WHERE o.job = ? AND {OPEN}"
#: State -> subquery that finds its candidates after an index without reading the others. The state's condition still
#: decides.
_AMONG = {
    # The unary plus keeps the planner from scanning the index on idx, past every done item.
    "processing": f"{_OPEN} AND +o.idx > ?",
    "retrying": f"{_OPEN} AND +o.idx > ?",
    "dead": "SELECT o.idx FROM dead_letters o WHERE o.job = ? AND o.idx > ?",
}

_JOB = (
    "SELECT no, id, function, source, command, keyed_by, digest, sealed, archived, generation, version, max_retries, total, "
    # Items that a fleet's slots have recorded but not yet added to the job's row.
    "done + (SELECT CAST(coalesce(sum(b.done), 0) AS BIGINT) FROM blocks b WHERE b.job = jobs.no), "
    "failed, dead, failures, created_at, updated_at, finished_at, holder, lease_until, "
    "CASE WHEN finished_at IS NULL AND holder IS NULL THEN "
    "(SELECT r.outcome FROM runs r WHERE r.job = jobs.no ORDER BY r.no DESC LIMIT 1) END, "
    "CASE WHEN holder IS NOT NULL THEN (SELECT c.paused FROM controls c WHERE c.job = jobs.no "
    "AND c.run = (SELECT max(r.no) FROM runs r WHERE r.job = jobs.no)) END, wait_since, wait_until, wait_reason FROM jobs"
)


def _item(tx: Tx) -> str:
    return item_store(tx.engine).item_query


def _traceback(detail: str | None, of_cause: str | None) -> str | None:
    """Return the traceback of an attempt: its own, or that of its cause with a note."""
    if detail == SAME_AS_CAUSE:
        return of_cause
    if detail is None and of_cause is not None:
        return f"{OF_THE_CAUSE}\n{of_cause}"
    return detail or None


def job_info(row: Row, now: float) -> JobInfo:
    """Build a `JobInfo` from a row of ``_JOB``. ``now`` is the database's Unix time."""
    (no, id, function, source, command, keyed_by, digest, sealed, archived, generation, version, max_retries, total, done,
     failed, dead, failures, created_at, updated_at, finished_at, holder, lease_until, last_outcome, paused,
     wait_since, wait_until, wait_reason) = row  # fmt: skip
    waits = wait_until is not None and finished_at is None and jobs.waits(wait_since, wait_until, now)
    return JobInfo(
        no, id, function, source, command, keyed_by, digest, bool(sealed), bool(archived), generation, version, max_retries,
        total, done, failed, dead, failures,
        # The clock may have been set back: do not show an end before the start.
        utc(created_at), utc(max(created_at, updated_at)),
        None if finished_at is None else utc(max(created_at, finished_at)),
        json.loads(holder) if holder else None, maybe_utc(lease_until),
        held=holder is not None and not has_ended(holder, lease_until, now), last_outcome=last_outcome, paused=bool(paused),
        wait_until=utc(wait_until) if waits else None, wait_reason=wait_reason if waits else "",
    )  # fmt: skip


def shown_settings(text: str) -> dict[str, Any]:
    """Return a run's settings without the order that its fleet was given."""
    settings: dict[str, Any] = json.loads(text)
    settings.pop("order", None)
    return settings


def find_jobs(database: Database, where: str = "", parameters: Sequence[Value] = ()) -> list[JobInfo]:
    """Return the jobs that match a WHERE or ORDER BY clause."""
    with database.read() as tx:
        now = tx.now()
        return [job_info(row, now) for row in tx.all(f"{_JOB} {where}", parameters)]


class Live:
    """The items of a job that are running now: their claim, or their run, is still alive.

    SQL cannot tell whether a process is alive, so the few distinct claimants are checked in Python.
    """

    def __init__(self, tx: Tx, job: int) -> None:
        self.now, self._engine = tx.now(), tx.engine
        row = tx.one("SELECT holder, lease_until FROM jobs WHERE no = ?", (job,))
        self._held = row is not None and row[0] is not None and not has_ended(row[0], row[1], self.now)
        claims = tx.all(
            f"SELECT holder, max(lease_until) FROM progress WHERE job = ? AND idx IN ({_OPEN}) "
            "AND lease_until IS NOT NULL AND holder IS NOT NULL GROUP BY holder",
            (job, job),
        )
        self._claimants = {holder for holder, until in claims if not has_ended(holder, until, self.now)}

    def condition(self) -> tuple[str, list[Value]]:
        """Return the SQL condition and its parameters, for a query that names table progress ``p``."""
        them, claimants = listed(self._engine, list(self._claimants))  # every claim has its own holder text
        sql = (
            f"(p.lease_until IS NOT NULL AND p.status <> 'done' AND (p.holder IN ({them}) OR (p.holder IS NULL AND "
            "CASE WHEN p.worker LIKE ? THEN ? = 1 ELSE p.lease_until > ? END)))"
        )
        return sql, [claimants, f"{NOTED}%", int(self._held), self.now]

    def has(self, status: str | None, holder: str | None, worker: str | None, lease_until: float | None) -> bool:
        """Return whether the item of this progress row is running."""
        if lease_until is None or status in (None, "done"):
            return False
        if holder is not None:
            return holder in self._claimants
        return self._held if (worker or "").startswith(NOTED) else lease_until > self.now


def all_jobs(database: Database, *, archived: bool = False) -> list[JobInfo]:
    """Return all jobs, most recently updated first."""
    return find_jobs(database, f"{'' if archived else 'WHERE archived = 0 '}ORDER BY updated_at DESC, no DESC")


def _untouched_from(tx: Tx, job: int) -> int:
    """Return an index below which every item has a progress row, or 0 if unknown.

    A search for untried items can start there. Items are tried in order, so nearly all rows lie below the last tried
    item. The counters show, without reading the rows, whether all of them exist: the rows outside the last ``STRETCH``
    indices must number exactly the indices before it.
    """
    row = tx.one(
        "SELECT j.total, j.done, (SELECT max(i.idx) FROM input_products i WHERE i.job = j.no), "
        f"(SELECT max(p.idx) FROM progress p WHERE p.job = j.no), (SELECT count(*) FROM ({_OPEN}) open_ones) "
        "FROM jobs j WHERE j.no = ?",
        (job, job),
    )
    if row is None or row[3] is None or row[2] + 1 != row[0]:
        return 0  # nothing was tried yet, or the indices have gaps
    _, done, _, last, open_ = row
    first = max(0, last + 1 - STRETCH)
    counted = tx.one("SELECT count(*) FROM progress WHERE job = ? AND idx >= ?", (job, first))
    return int(first) if counted is not None and done + open_ - counted[0] == first else 0


class Reports:
    """Read-only queries about one job."""

    def __init__(self, database: Database, no: int, id: str) -> None:
        self._database = database
        self.no = no
        self.id = id

    @property
    def database(self) -> Database:
        """The database that keeps the job."""
        return self._database

    def info(self) -> JobInfo:
        """Return the job's row. Raises `NotFound` if the job was deleted."""
        found = find_jobs(self._database, "WHERE no = ?", (self.no,))
        if not found:
            raise NotFound(f"Job {self.id} was deleted.")
        return found[0]

    def progress(self) -> Progress:
        """Return the job's counters and the number of items running now."""
        info = self.info()
        with self._database.read() as tx:
            live, parameters = Live(tx, self.no).condition()
            running = tx.one(
                f"SELECT count(*) FROM progress p WHERE p.job = ? AND p.idx IN ({_OPEN}) AND {live}",
                (self.no, self.no, *parameters),
            )
        return Progress(
            status=info.status,
            total=info.total,
            done=info.done,
            errors=info.failures,
            percent=info.percent,
            retrying=info.failed,
            dead=info.dead,
            running=running[0] if running else 0,
        )

    def postponed(self) -> Postponed | None:
        """Return the items that `headway.errors.RetryLater` postponed and that still wait, or None if there are none."""
        with self._database.read() as tx:
            waiting = (
                "FROM item_delays w JOIN progress p ON p.job = w.job AND p.idx = w.idx AND p.next_attempt_at = w.until "
                "WHERE w.job = ? AND w.until > ?"
            )
            parameters = (self.no, tx.now())
            first = tx.one(f"SELECT w.until, w.reason {waiting} ORDER BY w.until LIMIT 1", parameters)
            counted = tx.one(f"SELECT count(*) {waiting}", parameters)
        return None if first is None or counted is None else Postponed(counted[0], utc(first[0]), first[1])

    def fleet_note(self) -> str | None:
        """Return why a worker refused to join the job's fleet, or None."""
        row = self._database.one("SELECT note FROM fleets WHERE job = ?", (self.no,))
        return None if row is None or row[0] is None else str(row[0])

    def is_done(self, idx: int) -> bool:
        """Return whether the item at ``idx`` is done."""
        sql = "SELECT 1 FROM progress WHERE job = ? AND idx = ? AND status = 'done'"
        return self._database.one(sql, (self.no, idx)) is not None

    # ---- items -----------------------------------------------------------------------------------------------------

    def items(
        self,
        *,
        status: str | None = None,
        cause: int | None = None,
        after: int = -1,
        limit: int = PAGE,
    ) -> list[ItemInfo]:
        """Return one page of items by index, starting after ``after``."""
        if status is not None and status not in STATES:
            raise InvalidInput(f"status must be {', '.join(STATES)} (got {status!r}).")
        with self._database.read() as tx:
            live = Live(tx, self.no)
            condition, values = "true", list[Value]()
            if status is not None:
                running, parameters = live.condition()
                condition = STATES[status].format(live=f"coalesce({running}, 1 = 0)")
                values += parameters if "{live}" in STATES[status] else []
            among: list[str] = []
            if status in _AMONG:
                among.append(_AMONG[status])
                values += [self.no, after]
            if cause is not None:
                among.append("SELECT a.idx FROM attempts a WHERE a.job = ? AND a.idx > ? AND a.cause = ?")
                values += [self.no, after, cause]

            if among:
                found = " AND ".join(f"i.idx IN ({each})" for each in among)
                sql = f"{_item(tx)} WHERE i.job = ? AND ({condition}) AND {found} ORDER BY i.idx LIMIT ?"
                rows = tx.all(sql, (self.no, *values, limit))
            elif status == "pending" and (first := _untouched_from(tx, self.no)) > after + 1:
                found = f"i.idx IN ({_OPEN} AND +o.idx > ? AND +o.idx < ?)"
                sql = f"{_item(tx)} WHERE i.job = ? AND ({condition}) AND {found} ORDER BY i.idx LIMIT ?"
                rows = tx.all(sql, (self.no, *values, self.no, after, first, limit))
                rows += self._walk(tx, condition, values, "input_products", first - 1, limit - len(rows))
            else:
                table = "progress" if status == "done" else "input_products"
                rows = self._walk(tx, condition, values, table, after, limit)
        return [_item_info(row, live) for row in rows]

    def _walk(self, tx: Tx, condition: str, values: Sequence[Value], table: str, after: int, limit: int) -> list[Row]:
        """Return matching items by index, scanning ``table`` in chunks.

        The cost depends on how many items must be examined, not on the size of the job.
        """
        rows: list[Row] = []
        size = limit if condition == "true" else max(limit, WALK)
        for near in stretches(tx, table, self.no, after, size):
            if (wanted := limit - len(rows)) <= 0:
                break
            rows += tx.all(
                f"{_item(tx)} WHERE i.job = ? AND i.idx > ? AND i.idx <= ? AND ({condition}) ORDER BY i.idx LIMIT ?",
                (self.no, *near, *values, wanted),
            )
        return rows

    def item(self, name: str | int) -> ItemInfo:
        """Return an item by its key or its index."""
        rows: list[Row] = []
        with self._database.read() as tx:
            live = Live(tx, self.no)
            if isinstance(name, str):
                rows = tx.all(f"{_item(tx)} WHERE i.job = ? AND i.key = ?", (self.no, name))
            if not rows and str(name).isdecimal():
                rows = tx.all(
                    f"{_item(tx)} WHERE i.job = ? AND i.idx = ?",
                    (self.no, check_index(int(name))),
                )
        if not rows:
            raise NotFound(f"Job {self.id} has no item {name!r}.", hint=f"List them: headway items {self.id}")
        return _item_info(rows[0], live)

    def history(self, idx: int) -> list[Attempt]:
        """Return every run of an item, oldest first. The successful run comes from the progress row."""
        rows = self._database.all(
            "SELECT a.no, a.outcome, a.at, a.seconds, a.worker, a.error, a.detail, a.cause, a.printed, c.detail "
            "FROM attempts a LEFT JOIN tracebacks c ON c.job = a.job AND c.cause = a.cause "
            "WHERE a.job = ? AND a.idx = ? ORDER BY a.no",
            (self.no, idx),
        )
        past = [
            Attempt(no, outcome, utc(at), seconds, worker, error or None, _traceback(detail, of_cause), cause, printed)
            for no, outcome, at, seconds, worker, error, detail, cause, printed, of_cause in rows
        ]
        done = self._database.one(
            "SELECT p.updated_at, p.seconds, p.worker, t.text FROM progress p "
            "LEFT JOIN printed t ON t.job = p.job AND t.idx = p.idx WHERE p.job = ? AND p.idx = ? AND p.status = 'done'",
            (self.no, idx),
        )
        if done is not None:
            at, seconds, worker, printed = done
            past.append(Attempt(len(past) + 1, "done", utc(at), seconds, worker, None, None, None, printed))
        return past

    def printed(self, idx: int) -> str | None:
        """Return the captured output of the item's last failed run."""
        row = self._database.one(
            "SELECT printed FROM attempts WHERE job = ? AND idx = ? ORDER BY no DESC LIMIT 1", (self.no, idx)
        )
        return row[0] if row else None

    def log(
        self, after: int = -1
    ) -> Iterator[tuple[int, str | None, str, float, float | None, str | None, str | None]]:
        """Yield every ended run of the items after ``after``, ordered by item.

        Each row is (idx, key, outcome, time, seconds, worker, error).
        """
        while True:
            # Every tried item has a row in one of the two tables. Untried items, possibly the whole rest, are not read.
            ends = [last_of(self._database, table, self.no, after, PAGE) for table in ("progress", "attempts")]
            upto = min((end for end in ends if end is not None), default=None)
            if upto is None:
                return
            rows = self._database.all(
                "SELECT i.idx, i.key, h.outcome, h.at, h.seconds, h.worker, nullif(h.error, '') FROM input_products i JOIN ("
                "SELECT job, idx, no, outcome, at, seconds, worker, error FROM attempts "
                "WHERE job = ? AND idx > ? AND idx <= ? "
                "UNION ALL SELECT job, idx, 2147483647, 'done', updated_at, seconds, worker, NULL FROM progress "
                "WHERE job = ? AND idx > ? AND idx <= ? AND status = 'done') h ON h.job = i.job AND h.idx = i.idx "
                "ORDER BY i.idx, h.no",
                (self.no, after, upto, self.no, after, upto),
            )
            yield from rows
            after = upto

    def fingerprints(self) -> Iterator[tuple[int, str | None, int | None]]:
        """Yield (idx, key, fingerprint) of every item, by index."""
        for page in self._database.pages(
            "SELECT idx, key, fingerprint FROM input_products WHERE job = ? AND idx > ? ORDER BY idx LIMIT (SELECT ?)",
            (self.no,), after=(-1,), size=5000,
        ):  # fmt: skip
            yield from page

    def not_done(self) -> Iterator[int]:
        """Yield the indices of items that are neither done nor dead."""
        for near in stretches(self._database, "input_products", self.no, -1, PAGE):
            yield from stored.not_done(self._database, self.no, *near)

    def worked_on(self, indices: Sequence[int]) -> set[int]:
        """Return those of ``indices`` that have been tried: done, failed or dead."""
        found: set[int] = set()
        for start in range(0, len(indices), PAGE):
            part = indices[start : start + PAGE]
            with self._database.read() as tx:
                found.update(idx for (idx,) in rows_at(tx, "idx", self.no, part))
        return found

    # ---- failures --------------------------------------------------------------------------------------------------

    def causes(self) -> list[Cause]:
        """Return the failures grouped by cause, those with the most dead letters first."""
        rows = self._database.all(
            "SELECT c.no, c.type, c.message, c.frame, c.count, coalesce(d.dead, 0), c.first_seen, c.last_seen, d.example "
            "FROM causes c LEFT JOIN (SELECT cause, count(*) AS dead, min(idx) AS example FROM dead_letters WHERE job = ? "
            "GROUP BY cause) d ON d.cause = c.no WHERE c.job = ? ORDER BY coalesce(d.dead, 0) DESC, c.count DESC, c.no",
            (self.no, self.no),
        )
        return [
            Cause(no, type, message, frame, count, dead, utc(first), utc(last), example)
            for no, type, message, frame, count, dead, first, last, example in rows
        ]

    def dead_letters(self, *, cause: int | None = None, after: int = -1, limit: int = PAGE) -> list[DeadLetter]:
        """Return one page of dead letters by index."""
        by_cause = "" if cause is None else "AND d.cause = ? "
        rows = self._database.all(
            "SELECT d.idx, i.key, d.error, d.meta, d.cause, p.attempts, d.created_at FROM dead_letters d "
            "JOIN input_products i ON i.job = d.job AND i.idx = d.idx JOIN progress p ON p.job = d.job AND p.idx = d.idx "
            f"WHERE d.job = ? AND d.idx > ? {by_cause}ORDER BY d.idx LIMIT ?",
            (self.no, after, *([] if cause is None else [cause]), limit),
        )
        return [
            DeadLetter(idx, key, error, meta, cause_no, attempts, utc(at))
            for idx, key, error, meta, cause_no, attempts, at in rows
        ]

    # ---- runs, rates and results -----------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """Return every run, oldest first. A killed run is ``lost`` at once, even before a takeover."""
        with self._database.read() as tx:
            now = tx.now()
            held = any(job_info(row, now).held for row in tx.all(f"{_JOB} WHERE no = ?", (self.no,)))
            rows = tx.all(
                "SELECT no, host, pid, settings, kept, started_at, ended_at, outcome FROM runs WHERE job = ? ORDER BY no",
                (self.no,),
            )
        return [
            Run(
                no, host, pid, shown_settings(settings), kept, utc(started),
                None if ended is None else utc(max(started, ended)),
                "lost" if outcome is None and not held else outcome,
            )
            for no, host, pid, settings, kept, started, ended, outcome in rows
        ]  # fmt: skip

    def minutes(self, since: int) -> list[tuple[int, int, int, int, float]]:
        """Return (minute, done, failed, dead, seconds spent) from the minute ``since`` (Unix time / 60) on."""
        rows = self._database.all(
            "SELECT minute, sum(done), sum(failed), sum(dead), sum(seconds) FROM ("
            "SELECT minute, done, failed, dead, seconds FROM minutes WHERE job = ? AND minute >= ? UNION ALL "
            "SELECT minute, minute_done, minute_failed, minute_dead, minute_seconds FROM jobs "
            "WHERE no = ? AND minute >= ? AND minute_done + minute_failed > 0) both_tables GROUP BY minute ORDER BY minute",
            (self.no, since, self.no, since),
        )
        # PostgreSQL sums bigints as Decimal, which cannot be mixed with floats.
        return [
            (minute, int(done), int(failed), int(dead), float(seconds)) for minute, done, failed, dead, seconds in rows
        ]

    def results_by_index(self, after: int = -1, limit: int = PAGE) -> list[tuple[int, str | None, str | None]]:
        """Return (idx, key, result as JSON) of done items by index.

        The result is "null" if the item returned nothing, and None if its result was not kept.
        """
        found: list[tuple[int, str | None, str | None]] = []
        for near in stretches(self._database, "progress", self.no, after, limit):
            # Query each table separately, so that PostgreSQL reads only this range even with wrong statistics.
            with self._database.read() as tx:
                where, values = "WHERE job = ? AND idx > ? AND idx <= ?", (self.no, *near)
                keys: dict[int, str | None] = dict(tx.all(f"SELECT idx, key FROM input_products {where}", values))
                results: dict[int, str] = dict(tx.all(f"SELECT idx, result FROM results {where}", values))
                done = tx.all(f"SELECT idx, unkept FROM progress {where} AND status = 'done' ORDER BY idx", values)
            found += [
                (idx, keys[idx], results.get(idx, None if unkept == 1 else "null"))
                for idx, unkept in done
                if idx in keys
            ]
            if len(found) >= limit:
                break
        return found[:limit]

    def unkept_results(self) -> int:
        """Return the number of done items whose result was not kept."""
        row = self._database.one("SELECT count(*) FROM progress WHERE job = ? AND unkept = 1", (self.no,))
        return row[0] if row else 0

    def results(self, after: int = 0, limit: int = PAGE) -> list[tuple[int, int, str | None, str]]:
        """Return (seq, idx, key, result as JSON) in the order of recording."""
        return self._database.all(
            "SELECT r.seq, r.idx, i.key, r.result FROM results r "
            "JOIN input_products i ON i.job = r.job AND i.idx = r.idx WHERE r.job = ? AND r.seq > ? ORDER BY r.seq LIMIT ?",
            (self.no, after, limit),
        )


def _item_info(row: Row, live: Live) -> ItemInfo:
    (idx, key, status, dead, lease_until, attempts, updated_at, seconds, worker, meta, next_at, payload, holder, error,
     cause) = row  # fmt: skip
    if dead is not None:
        word = "dead"
    elif status == "done":
        word = "done"
    elif live.has(status, holder, worker, lease_until):
        word = "processing"
    else:
        word = "retrying" if status == "failed" else "pending"
    return ItemInfo(
        idx, key, word, attempts, maybe_utc(updated_at), seconds, worker, meta,  # type: ignore[arg-type] # one of STATES
        error or None, cause, maybe_utc(next_at) if word == "retrying" else None, payload,
    )  # fmt: skip
