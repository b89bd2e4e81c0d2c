"""The recorder of a job: writes its outcomes and counters in one transaction.

Opening a recorder locks the job (SQLite: the write lock; PostgreSQL: its row), so the writer sees every earlier
outcome. Counting by identity is therefore exact: the recorder knows each item's old and new state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from headway._lease import Owner, is_anothers
from headway._sql import NOW, Tx, array, marks
from headway.core.failure import Failure, normalise, shortened
from headway.core.retry import RetryPolicy
from headway.errors import LedgerRestored, NotFound, StaleClaim
from headway.events import Event, append
from headway.ledger.store.bulk import put_new_done
from headway.ledger.values import SAME_AS_CAUSE, Done, Failed, Outcome, Recorded
from headway.telemetry import Log

log = Log("ledger")

#: Items looked up by one statement. Some SQLite builds allow only 32,766 parameters.
PAGE = 1000

#: Bytes kept of an error in an item's first failure, in each later one, in its dead letter, and in meta. With these
#: limits an item that fails three times takes less than 1 KB on SQLite.
ERROR_KEPT, REPEATED_ERROR_KEPT, DEAD_ERROR_KEPT, META_ERROR_KEPT = 128, 64, 240, 40
#: Causes per job that keep a whole traceback. Later causes keep only the last characters of theirs.
WHOLE_TRACEBACKS, TRACEBACK_END = 20, 400

_COLUMNS = (
    "id, origin, version, generation, sealed, finished_at, max_retries, total, done, failed, dead, failures, frontier, token, "
    "holder, minute, minute_done, minute_failed, minute_dead, minute_seconds, archived, retry_base, retry_factor, retry_cap, "
    "retry_jitter"
)
_OPEN = {
    # On SQLite, BEGIN IMMEDIATE already holds the write lock. PostgreSQL locks the row.
    "sqlite": f"SELECT {_COLUMNS}, {NOW['sqlite']} FROM jobs WHERE no = ?",
    "postgresql": f"SELECT {_COLUMNS}, {NOW['postgresql']} FROM jobs WHERE no = ? FOR UPDATE",
}


#: Reads the state of items before they are recorded. On PostgreSQL, LATERAL forces one lookup by key per item. Without
#: statistics the planner might execute a plain join as a scan of the whole job or as a nested loop over the batch.
_PRIOR = {
    "sqlite": "SELECT i.idx, i.key, p.status, p.attempts, p.token, p.lease_until, d.idx FROM input_products i "
    "LEFT JOIN progress p ON p.job = i.job AND p.idx = i.idx LEFT JOIN dead_letters d ON d.job = i.job AND d.idx = i.idx "
    "WHERE i.job = ? AND i.idx IN ({marks})",
    "postgresql": "SELECT i.idx, i.key, p.status, p.attempts, p.token, p.lease_until, d.idx "
    "FROM unnest(CAST(? AS BIGINT[])) AS wanted (at) "
    "CROSS JOIN LATERAL (SELECT job, idx, key FROM input_products WHERE job = ? AND idx = wanted.at LIMIT 1) i "
    "LEFT JOIN LATERAL (SELECT * FROM progress o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) p ON true "
    "LEFT JOIN LATERAL (SELECT o.idx FROM dead_letters o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) d ON true",
}
_UNTOUCHED = (
    "SELECT count(*) FROM input_products i WHERE NOT EXISTS "
    "(SELECT 1 FROM progress p WHERE p.job = i.job AND p.idx = i.idx) AND i.job = ? AND i.idx IN "
)
_PUT_ITEM = "INSERT INTO input_products (job, idx) VALUES (?, ?) ON CONFLICT (job, idx) DO NOTHING"
_PUT_ONE_DONE = (
    "INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker) "
    "SELECT job, idx, 'done', ?, ?, ?, ? FROM input_products WHERE job = ? AND idx = ? "
    "ON CONFLICT (job, idx) DO NOTHING"
)
_PUT_DONE = (
    "INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker, unkept) "
    "VALUES (?, ?, 'done', ?, ?, ?, ?, ?) "
    "ON CONFLICT (job, idx) DO UPDATE SET status = 'done', meta = excluded.meta, updated_at = excluded.updated_at, "
    "seconds = excluded.seconds, worker = excluded.worker, next_attempt_at = NULL, lease_until = NULL, holder = NULL, "
    "unkept = excluded.unkept"
)
_PUT_FAILED = (
    "INSERT INTO progress (job, idx, status, meta, attempts, updated_at, seconds, worker, next_attempt_at) "
    "VALUES (?, ?, 'failed', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET status = 'failed', "
    "meta = excluded.meta, attempts = excluded.attempts, updated_at = excluded.updated_at, seconds = excluded.seconds, "
    "worker = excluded.worker, next_attempt_at = excluded.next_attempt_at, lease_until = NULL, holder = NULL"
)
_PUT_ATTEMPT = (
    "INSERT INTO attempts (job, idx, no, outcome, error, detail, cause, worker, at, seconds, printed) "
    "SELECT ?, ?, coalesce(max(no), 0) + 1, ?, ?, ?, ?, ?, ?, ?, ? FROM attempts WHERE job = ? AND idx = ?"
)
_PUT_DEAD = (
    "INSERT INTO dead_letters (job, idx, meta, error, created_at, cause, last_pass) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (job, idx) DO UPDATE SET meta = excluded.meta, error = excluded.error, "
    "created_at = excluded.created_at, cause = excluded.cause, last_pass = excluded.last_pass"
)


class Recorder:
    """Counters of one job while this transaction has its row locked. `close` writes them back."""

    def __init__(
        self, tx: Tx, no: int, *, token: int | None = None, owner: Owner | None = None, archived_too: bool = False
    ) -> None:
        """Lock the job's row and check that the caller may still record.

        ``token`` is the fencing token of the caller's hold, if it has one. It is refused once a newer hold exists.
        ``owner`` is refused if another owner holds the job with the same token, which can happen after the database was
        restored.

        An archived job is refused unless ``archived_too`` is set (for deletion). A process that was suspended while a
        fresh start replaced its job must not go on beside the new one.
        """
        row = tx.one(_OPEN[tx.engine], (no,))
        if row is None:
            raise NotFound("The job was forgotten while it was in use.")
        self.tx, self.no = tx, no
        #: Tracebacks by cause that this transaction has read or written.
        self._tracebacks: dict[int, str] = {}
        self.id: str
        (self.id, self.origin, self.version, self.generation, self.sealed, self.finished_at, self.max_retries,
         self.total, self.done, self.failed, self.dead, self.failures, self.frontier, held, holder,
         self.minute, self.minute_done, self.minute_failed, self.minute_dead, self.minute_seconds, archived,
         *self._retry, self.now) = row  # fmt: skip
        if archived and not archived_too:
            raise StaleClaim(
                f"Job {self.id} was put aside by a fresh start; nothing was recorded.",
                hint="Stop this process: another one began the job anew.",
            )
        if token is not None and held < token:  # tokens only grow
            raise LedgerRestored(f"The database was restored to a moment before this run of job {self.id} began.")
        if (token is not None and token != held) or (owner is not None and holder and is_anothers(holder, owner)):
            raise StaleClaim(
                f"Job {self.id} was taken over by another process while this one was not responding.",
                hint="Nothing was recorded by this one since. See who runs it: headway show JOB",
            )

    @property
    def policy(self) -> RetryPolicy:
        """Return the retry policy that the job's last run has set."""
        base, factor, cap, jitter = self._retry
        return RetryPolicy(self.max_retries, base, factor, cap, jitter)

    def set_policy(self, policy: RetryPolicy) -> None:
        """Store the retry policy for later failures, which another process may record."""
        self._retry = [policy.base, policy.factor, policy.cap, policy.jitter]
        self.tx.execute(
            "UPDATE jobs SET retry_base = ?, retry_factor = ?, retry_cap = ?, retry_jitter = ? WHERE no = ?",
            (*self._retry, self.no),
        )

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def write(
        self, outcomes: Sequence[Outcome], policy: RetryPolicy | None = None, *, register: bool = False
    ) -> Recorded:
        """Record outcomes. ``policy`` overrides the job's retry policy."""
        # On PostgreSQL, `write_new` has already tried this with one statement.
        successes = plain_successes(outcomes) if self.tx.engine == "sqlite" else []
        if successes and self._all_untouched([success.idx for success in successes]):
            # The common case: none of the items has a row yet, so there is nothing to compare with.
            self._succeed(successes)
            return Recorded(len(successes), 0, 0, 0, False, {}, (), self.failed, self.dead, ())
        return self._compare_and_write(outcomes, policy or self.policy, register=register)

    def write_new(self, successes: Sequence[Done]) -> bool:
        """Record successes of items that were never tried (PostgreSQL only).

        Returns False if an item was tried before. The caller must then roll the transaction back.
        """
        if not put_new_done(self.tx, self.no, self.now, successes):
            return False
        self._count_done(successes)
        return True

    def _compare_and_write(self, outcomes: Sequence[Outcome], policy: RetryPolicy, *, register: bool) -> Recorded:
        indices = [outcome.idx for outcome in outcomes]
        prior = self._prior(indices)
        if register and len(prior) < len(indices):
            self.total += self.tx.insert(_PUT_ITEM, [(self.no, idx) for idx in indices])
            prior = self._prior(indices)
        done: list[Done] = []
        repeated, stale, due, died = 0, [], {}, []
        for outcome in outcomes:
            try:
                name, status, attempts, token, lease_until, dead = prior[outcome.idx]
            except KeyError:
                raise NotFound(
                    f"Item {outcome.idx} is not registered in job {self.id}.",
                    hint="If the database was restored during a run, run the same command again.",
                ) from None
            if status == "done":
                # Done is final: a late failure or a second success of the same item changes nothing.
                repeated += 1
                if isinstance(outcome, Failed):
                    log.info("a failure of an item that is done was ignored", job=self.id, idx=outcome.idx)
                continue
            if outcome.token is not None and (token != outcome.token or lease_until is None):
                stale.append(outcome.idx)
                continue
            if isinstance(outcome, Done):
                done.append(outcome)
                prior[outcome.idx] = (name, "done", attempts, token, None, False)
                self._leave(status, dead)
                if dead:
                    self._rescue(outcome.idx)
                continue
            if outcome.seen is not None and outcome.seen != attempts:
                repeated += 1
                continue
            self._leave(status, dead)
            dies = dead or not outcome.retryable or attempts + 1 > self.max_retries
            at = None if dies else self.now + policy.delay(attempts + 1)
            self._fail(outcome, name, attempts + 1, at, was_dead=dead)
            prior[outcome.idx] = (name, "failed", attempts + 1, token, None, dies)
            if at is None:
                died.append(outcome.idx)
            else:
                due[outcome.idx] = at
        if done:
            self._succeed(done)
        return Recorded(len(done), len(due), len(died), repeated, False, due, died, self.failed, self.dead, stale)

    def _all_untouched(self, indices: list[int]) -> bool:
        """Return whether the items are distinct, registered, and were never tried."""
        for page in _pages(indices):
            row = self.tx.one(f"{_UNTOUCHED}({marks(len(page))})", (self.no, *page))
            assert row is not None
            if row[0] < len(page):
                return False
        return len(set(indices)) == len(indices)

    def _prior(
        self, indices: list[int]
    ) -> dict[int, tuple[str | None, str | None, int, int | None, float | None, bool]]:
        found = {}
        for page in _pages(indices):
            if self.tx.engine == "sqlite":
                rows = self.tx.all(_PRIOR["sqlite"].format(marks=marks(len(page))), (self.no, *page))
            else:
                rows = self.tx.all(_PRIOR["postgresql"], (array(page), self.no))
            for idx, key, status, attempts, token, lease_until, dead in rows:
                found[idx] = (key, status, attempts or 0, token, lease_until, dead is not None)
        return found

    def _leave(self, status: str | None, dead: bool) -> None:
        """Remove the item from the counter of its old state. Pending has none: it is the rest of the total."""
        if dead:
            self.dead -= 1
        elif status == "failed":
            self.failed -= 1

    def _succeed(self, outcomes: list[Done]) -> None:
        no, now = self.no, self.now
        self._turn_minute()
        self.tx.insert(
            _PUT_DONE, [(no, o.idx, o.meta, now, o.seconds, o.worker, 1 if o.unkept else None) for o in outcomes]
        )
        results = [(no, o.idx, o.result) for o in outcomes if o.result is not None]
        if results:
            self.tx.insert(
                "INSERT INTO results (job, idx, result) VALUES (?, ?, ?) "
                "ON CONFLICT (job, idx) DO UPDATE SET result = excluded.result",
                results,
            )
        printed = [(no, o.idx, o.printed) for o in outcomes if o.printed is not None]
        if printed:
            self.tx.insert(
                "INSERT INTO printed (job, idx, text) VALUES (?, ?, ?) "
                "ON CONFLICT (job, idx) DO UPDATE SET text = excluded.text",
                printed,
            )
        self._count_done(outcomes)

    def _count_done(self, outcomes: Sequence[Done]) -> None:
        self.count_done(len(outcomes), sum(outcome.seconds or 0.0 for outcome in outcomes))

    def count_done(self, count: int, seconds: float) -> None:
        """Count ``count`` items as done, which took ``seconds`` in total. `close` must follow."""
        self._turn_minute()
        self.done += count
        self.minute_done += count
        self.minute_seconds += seconds

    def _rescue(self, idx: int) -> None:
        """Delete the dead letter of an item that succeeded after all."""
        self.tx.execute("DELETE FROM dead_letters WHERE job = ? AND idx = ?", (self.no, idx))
        audit(self.tx, self.now, "headway", "rescued", self.id, {"idx": idx})

    def _fail(self, outcome: Failed, name: str | None, attempts: int, at: float | None, *, was_dead: bool) -> None:
        no, now, failure = self.no, self.now, outcome.failure
        cause = self._cause(failure, name)
        error = shortened(failure.text, ERROR_KEPT if attempts == 1 else REPEATED_ERROR_KEPT)
        self._turn_minute()
        self.tx.execute(
            _PUT_FAILED, (no, outcome.idx, outcome.meta, attempts, now, outcome.seconds, outcome.worker, at)
        )
        self.tx.execute(
            _PUT_ATTEMPT,
            (no, outcome.idx, outcome.outcome, error, self._detail(cause, failure.detail), cause, outcome.worker, now,
             outcome.seconds, outcome.printed, no, outcome.idx),
        )  # fmt: skip
        self.failures += 1
        self.minute_failed += 1
        self.minute_seconds += outcome.seconds or 0.0
        if at is None:
            # An item that was dead before has just used its last pass. One that cannot succeed gets none.
            passed = int(was_dead or not outcome.retryable)
            last_error = shortened(failure.text, DEAD_ERROR_KEPT)
            self.tx.execute(_PUT_DEAD, (no, outcome.idx, outcome.meta, last_error, now, cause, passed))
            self.dead += 1
            self.minute_dead += not was_dead
        else:
            self.failed += 1
        log.info(
            "item failed" if at is not None else "item is dead",
            job=self.id, idx=outcome.idx, attempt=attempts, error=failure.text, cause=cause,
        )  # fmt: skip

    def _cause(self, failure: Failure, name: str | None) -> int:
        key = (self.no, failure.type, normalise(failure.message, name), failure.frame)
        row = self.tx.one(
            "UPDATE causes SET count = count + 1, last_seen = ? "
            "WHERE job = ? AND type = ? AND message = ? AND frame = ? RETURNING no",
            (self.now, *key),
        ) or self.tx.one(
            "INSERT INTO causes (job, type, message, frame, no, count, first_seen, last_seen) "
            "SELECT ?, ?, ?, ?, coalesce(max(no), 0) + 1, 1, ?, ? FROM causes WHERE job = ? RETURNING no",
            (*key, self.now, self.now, self.no),
        )
        assert row is not None
        return int(row[0])

    def _detail(self, cause: int, traceback: str | None) -> str | None:
        """Return the ``detail`` of an attempt, and store its traceback if its cause has none.

        ``detail`` is empty for an attempt without a traceback. It is None if the traceback differs from the cause's; it
        is not kept.
        """
        if not traceback:
            return ""
        if cause > WHOLE_TRACEBACKS and len(traceback) > TRACEBACK_END:
            traceback = "...\n" + traceback[-TRACEBACK_END:]
        if cause not in self._tracebacks:
            row = self.tx.one("SELECT detail FROM tracebacks WHERE job = ? AND cause = ?", (self.no, cause))
            if row is None:
                self.tx.execute(
                    "INSERT INTO tracebacks (job, cause, detail) VALUES (?, ?, ?)", (self.no, cause, traceback)
                )
            self._tracebacks[cause] = row[0] if row else traceback
        return SAME_AS_CAUSE if traceback == self._tracebacks[cause] else None

    # ---- the counters ----------------------------------------------------------------------------------------------

    def close(self, *, settle: bool) -> bool:
        """Write the counters back. With ``settle``, finish a complete job.

        Returns whether this call finished the job.
        """
        self._turn_minute()
        completed = settle and bool(self.sealed) and self.finished_at is None and self.done + self.dead >= self.total
        if completed:
            self.finished_at = self.now
            append(self.tx, self._completion())
            log.info("job completed", job=self.id, total=self.total, done=self.done, dead=self.dead)
        elif self.finished_at is not None and self.done + self.dead < self.total:
            self.finished_at = None  # reopened: its next completion is a new event
            self.generation += 1
        self.tx.execute(
            "UPDATE jobs SET version = version + 1, sealed = ?, generation = ?, total = ?, done = ?, failed = ?, dead = ?, "
            "failures = ?, frontier = ?, finished_at = ?, updated_at = ?, minute = ?, minute_done = ?, minute_failed = ?, "
            "minute_dead = ?, minute_seconds = ? WHERE no = ?",
            (self.sealed, self.generation, self.total, self.done, self.failed, self.dead, self.failures,
             self.frontier, self.finished_at, self.now, self.minute, self.minute_done, self.minute_failed,
             self.minute_dead, self.minute_seconds, self.no),
        )  # fmt: skip
        return completed

    def _turn_minute(self) -> None:
        """Store the sums of a past minute in their own row.

        `close` must follow, because it writes the sums of the new minute. Otherwise the next recorder would store the
        old ones again.
        """
        if self.minute == int(self.now // 60):
            return
        if self.minute_done or self.minute_failed:
            self.tx.execute(
                "INSERT INTO minutes (job, minute, done, failed, dead, seconds) VALUES (?, ?, ?, ?, ?, ?) "
                # The clock may have been set back into a minute that already has a row.
                "ON CONFLICT (job, minute) DO UPDATE SET done = minutes.done + excluded.done, "
                "failed = minutes.failed + excluded.failed, dead = minutes.dead + excluded.dead, "
                "seconds = minutes.seconds + excluded.seconds",
                (self.no, self.minute, self.minute_done, self.minute_failed, self.minute_dead, self.minute_seconds),
            )
        self.minute = int(self.now // 60)
        self.minute_done = self.minute_failed = self.minute_dead = 0
        self.minute_seconds = 0.0

    def _completion(self) -> Event:
        return Event(
            id=f"{self.origin}-{self.no}-{self.generation}-completed",
            type="job.completed",
            at=datetime.fromtimestamp(self.now, UTC),
            source="headway.ledger",
            job=self.id,
            version=self.version + 1,
            data={"total": self.total, "succeeded": self.done, "failed": self.dead},
        )

    def recount(self) -> bool:
        """Recompute the counters from the rows. Return whether they were wrong."""
        before = (self.total, self.done, self.failed, self.dead)
        total = self.tx.one("SELECT count(*) FROM input_products WHERE job = ?", (self.no,))
        done = self.tx.one("SELECT count(*) FROM progress WHERE job = ? AND status = 'done'", (self.no,))
        dead = self.tx.one("SELECT count(*) FROM dead_letters WHERE job = ?", (self.no,))
        failed = self.tx.one(
            "SELECT count(*) FROM progress p WHERE p.job = ? AND p.status = 'failed' AND NOT EXISTS "
            "(SELECT 1 FROM dead_letters d WHERE d.job = p.job AND d.idx = p.idx)",
            (self.no,),
        )
        assert total is not None
        assert done is not None
        assert dead is not None
        assert failed is not None
        self.total, self.done, self.failed, self.dead = total[0], done[0], failed[0], dead[0]
        return before != (self.total, self.done, self.failed, self.dead)


def _pages(indices: list[int]) -> Iterator[list[int]]:
    return (indices[start : start + PAGE] for start in range(0, len(indices), PAGE))


def plain_successes(outcomes: Sequence[Outcome]) -> list[Done]:
    """Return ``outcomes`` if all are successes without a claim token, otherwise an empty list."""
    successes = [outcome for outcome in outcomes if isinstance(outcome, Done) and outcome.token is None]
    return successes if len(successes) == len(outcomes) else []


def put_one_done(tx: Tx, job: int, outcome: Done, *, register: bool = False) -> bool:
    """Record the most common outcome in two statements: an untried item is done and does not finish the job.

    Returns False if the case is not that simple. The caller must then roll the transaction back.
    """
    now = time.time()
    row = (outcome.meta, now, outcome.seconds, outcome.worker, job, outcome.idx)
    fresh, new = tx.execute(_PUT_ONE_DONE, row), 0
    if not fresh and register:
        new = tx.execute(_PUT_ITEM, (job, outcome.idx))
        fresh = tx.execute(_PUT_ONE_DONE, row) if new else 0
    return (
        fresh == 1
        and tx.execute(
            "UPDATE jobs SET version = version + 1, total = total + ?, done = done + 1, minute_done = minute_done + 1, "
            "minute_seconds = minute_seconds + ?, updated_at = ? WHERE no = ? AND minute = ? AND finished_at IS NULL "
            "AND archived = 0 "
            "AND (sealed = 0 OR done + dead + 1 < total + ?)",
            (new, outcome.seconds or 0.0, now, job, int(now // 60), new),
        )
        == 1
    )


def audit(tx: Tx, now: float, actor: str, action: str, job: str, detail: dict[str, object]) -> None:
    """Record who changed the ledger, in the transaction that changes it."""
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, ?, ?)",
        (now, actor, action, job, json.dumps(detail, ensure_ascii=False)),
    )


def current_user() -> str:
    """Return the operating system's user name, for the audit trail."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return "unknown"
