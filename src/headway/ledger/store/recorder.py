"""The recorder of a job: writes its outcomes and counters in one transaction.

Opening a recorder locks the job (SQLite: the write lock; PostgreSQL: its row), so the writer sees every earlier
outcome. Counting by identity is therefore exact: the recorder knows each item's old and new state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway._lease import Owner, is_anothers
from headway._sql import Tx
from headway.core.failure import Failure, bounded_error, normalise, shortened
from headway.core.retry import RetryPolicy
from headway.core.text import duration
from headway.errors import LedgerRestored, NotFound, StaleClaim
from headway.ledger.store import items, jobs
from headway.ledger.store.audit import audit
from headway.ledger.store.completion import update_completion
from headway.ledger.store.contract import Prior, item_store
from headway.ledger.values import SAME_AS_CAUSE, Done, Failed, Later, Outcome, Recorded
from headway.telemetry import Log

log = Log("ledger")

#: Bytes kept of an error in an item's first failure, in each later one, in its dead letter, and in meta. With these
#: limits an item that fails three times takes less than 1 KB on SQLite.
ERROR_KEPT, REPEATED_ERROR_KEPT, DEAD_ERROR_KEPT, META_ERROR_KEPT = 128, 64, 240, 40
#: Causes per job that keep a whole traceback. Later causes keep only the last characters of theirs.
WHOLE_TRACEBACKS, TRACEBACK_END = 20, 400


_JOB_COLUMNS = (
    "id, origin, version, generation, sealed, finished_at, max_retries, total, done, failed, dead, failures, frontier, "
    "token, holder, minute, minute_done, minute_failed, minute_dead, minute_seconds, archived, retry_base, retry_factor, "
    "retry_cap, retry_jitter"
)


@dataclass(slots=True)
class JobRow:
    """A job's row, locked by the transaction ``tx``. `save` writes the counters back."""

    tx: Tx
    no: int
    id: str
    origin: str
    version: int
    generation: int
    sealed: int
    finished_at: float | None
    max_retries: int
    total: int
    done: int
    failed: int
    dead: int
    failures: int
    frontier: int
    token: int
    holder: str | None
    minute: int
    minute_done: int
    minute_failed: int
    minute_dead: int
    minute_seconds: float
    archived: int
    retry_base: float
    retry_factor: float
    retry_cap: float
    retry_jitter: float
    now: float

    @classmethod
    def lock(cls, tx: Tx, no: int) -> JobRow:
        """Read the row and lock it until the transaction ends. Raises `NotFound`."""
        row = tx.one(f"SELECT {_JOB_COLUMNS}, {tx.clock} FROM jobs WHERE no = ?{tx.for_update}", (no,))
        if row is None:
            raise NotFound("The job was deleted while it was in use.")
        return cls(tx, no, *row)

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy that the job's last run has set."""
        return RetryPolicy(self.max_retries, self.retry_base, self.retry_factor, self.retry_cap, self.retry_jitter)

    def set_policy(self, policy: RetryPolicy) -> None:
        """Store the retry policy for later failures, which another process may record."""
        self.retry_base, self.retry_factor = policy.base, policy.factor
        self.retry_cap, self.retry_jitter = policy.cap, policy.jitter
        self.tx.execute(
            "UPDATE jobs SET retry_base = ?, retry_factor = ?, retry_cap = ?, retry_jitter = ? WHERE no = ?",
            (policy.base, policy.factor, policy.cap, policy.jitter, self.no),
        )

    def leave(self, status: str | None, dead: bool) -> None:
        """Remove an item from the counter of its old state. Pending has none: it is the rest of the total."""
        if dead:
            self.dead -= 1
        elif status == "failed":
            self.failed -= 1

    def count_done(self, count: int, seconds: float) -> None:
        """Count ``count`` items as done, which took ``seconds`` in total. `save` must follow."""
        self._turn_minute()
        self.done += count
        self.minute_done += count
        self.minute_seconds += seconds

    def count_failure(self, seconds: float, *, is_dead: bool, was_dead: bool) -> None:
        """Count a failed run, and the item's new state: dead, or waiting for a retry. `save` must follow."""
        self._turn_minute()
        self.failures += 1
        self.minute_failed += 1
        self.minute_seconds += seconds
        if is_dead:
            self.dead += 1
            self.minute_dead += not was_dead
        else:
            self.failed += 1

    def recount(self) -> bool:
        """Recompute the counters from the items' rows. Return whether they were wrong."""
        before = (self.total, self.done, self.failed, self.dead)
        counted = self.tx.one(
            "SELECT (SELECT count(*) FROM input_products WHERE job = ?), "
            "(SELECT count(*) FROM progress WHERE job = ? AND status = 'done'), "
            "(SELECT count(*) FROM progress p WHERE p.job = ? AND p.status = 'failed' AND NOT EXISTS "
            "(SELECT 1 FROM dead_letters d WHERE d.job = p.job AND d.idx = p.idx)), "
            "(SELECT count(*) FROM dead_letters WHERE job = ?)",
            (self.no, self.no, self.no, self.no),
        )
        assert counted is not None
        self.total, self.done, self.failed, self.dead = counted
        return before != counted

    def save(self) -> None:
        """Write the counters back."""
        self._turn_minute()
        self.tx.execute(
            "UPDATE jobs SET version = version + 1, sealed = ?, generation = ?, total = ?, done = ?, failed = ?, dead = ?, "
            "failures = ?, frontier = ?, finished_at = ?, updated_at = ?, minute = ?, minute_done = ?, minute_failed = ?, "
            "minute_dead = ?, minute_seconds = ? WHERE no = ?",
            (self.sealed, self.generation, self.total, self.done, self.failed, self.dead, self.failures,
             self.frontier, self.finished_at, self.now, self.minute, self.minute_done, self.minute_failed,
             self.minute_dead, self.minute_seconds, self.no),
        )  # fmt: skip

    def _turn_minute(self) -> None:
        """Store the sums of a past minute in their own row.

        `save` must follow, because it writes the sums of the new minute. Otherwise the next transaction would store the
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


class Recorder:
    """Records the outcomes of one job while this transaction has its row locked. `close` writes the counters back."""

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
        self.tx, self.no = tx, no
        self.row = row = JobRow.lock(tx, no)
        self.id, self.now = row.id, row.now
        #: Tracebacks by cause that this transaction has read or written.
        self._tracebacks: dict[int, str] = {}
        if row.archived and not archived_too:
            raise StaleClaim(
                f"Job {self.id} was archived by a fresh start; nothing was recorded.",
                hint="Stop this process: another one began the job again.",
            )
        if token is not None and row.token < token:  # tokens only grow
            raise LedgerRestored(f"The database was restored to a moment before this run of job {self.id} began.")
        if (token is not None and token != row.token) or (
            owner is not None and row.holder and is_anothers(row.holder, owner)
        ):
            raise StaleClaim(
                f"Job {self.id} was taken over by another process while this one was not responding.",
                hint="Nothing was recorded by this one since. See which process runs it: headway show JOB",
            )

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def write(
        self,
        outcomes: Sequence[Outcome],
        policy: RetryPolicy | None = None,
        *,
        register: bool = False,
        compare: bool = False,
    ) -> Recorded:
        """Record outcomes. ``policy`` overrides the job's retry policy.

        Successes of untried items are written without reading earlier states. That may raise `TriedBefore`; the caller
        then rolls back and calls again with ``compare``.
        """
        successes = [] if compare else plain_successes(outcomes)
        if successes and item_store(self.tx.engine).insert_done(self.tx, self.no, self.now, successes):
            self._count_done(successes)
            return Recorded(len(successes), 0, 0, 0, False, {}, (), self.row.failed, self.row.dead, ())
        return self._compare_and_write(outcomes, policy or self.row.policy, register=register)

    def _compare_and_write(self, outcomes: Sequence[Outcome], policy: RetryPolicy, *, register: bool) -> Recorded:
        row, prior = self.row, self._prior([outcome.idx for outcome in outcomes], register=register)
        done: list[Done] = []
        postponed: list[Later] = []
        rerun: list[int] = []  # done items that failed or were postponed before
        repeated, stale, due, died = 0, [], dict[int, float](), []
        for outcome in outcomes:
            known = self._known(prior, outcome.idx)
            if known.status == "done":
                # Done is final: a late failure or a second success of the same item changes nothing.
                repeated += 1
                if isinstance(outcome, Failed):
                    log.info("a failure of an item that is done was ignored", job=self.id, idx=outcome.idx)
            elif outcome.token is not None and (known.token != outcome.token or known.lease_until is None):
                stale.append(outcome.idx)
            elif isinstance(outcome, Done):
                done.append(outcome)
                rerun += [outcome.idx] if known.status == "failed" else []
                self._leave_for_done(outcome, known, prior)
            elif isinstance(outcome, Later):
                postponed.append(outcome)
            elif outcome.seen is not None and outcome.seen != known.attempts:
                repeated += 1
            elif (at := self._record_failure(outcome, prior, policy)) is None:
                died.append(outcome.idx)
            else:
                due[outcome.idx] = at
        if done:
            items.put_done(self.tx, self.no, self.now, done)
            items.forget_delays(self.tx, self.no, rerun)
            self._count_done(done)
        failed, until = len(due), dict[int, float]()
        if postponed:
            until, beyond, again = self._postpone(postponed, prior)
            repeated += again
            died += [failure.idx for failure in beyond]
            for failure in beyond:
                self._record_failure(failure, prior, policy)
        return Recorded(
            len(done), failed, len(died), repeated, False, due | until, died, row.failed, row.dead, stale, len(until)
        )

    def _known(self, prior: Mapping[int, Prior], idx: int) -> Prior:
        try:
            return prior[idx]
        except KeyError:
            raise NotFound(
                f"Item {idx} is not registered in job {self.id}.",
                hint="If the database was restored during a run, run the same command again.",
            ) from None

    def _leave_for_done(self, outcome: Done, known: Prior, prior: dict[int, Prior]) -> None:
        prior[outcome.idx] = Prior(known.key, "done", known.attempts, known.token, None, False)
        self.row.leave(known.status, known.dead)
        if known.dead:
            self._rescue(outcome.idx)

    def _record_failure(self, outcome: Failed, prior: dict[int, Prior], policy: RetryPolicy) -> float | None:
        """Record a failed run. Return when the item may run again, or None if it is dead."""
        name, status, attempts, token, _, dead = prior[outcome.idx]
        self.row.leave(status, dead)
        dies = dead or not outcome.retryable or attempts + 1 > self.row.max_retries
        at = None if dies else self.now + policy.delay(attempts + 1)
        self._fail(outcome, name, attempts + 1, at, was_dead=dead)
        prior[outcome.idx] = Prior(name, "failed", attempts + 1, token, None, dies)
        return at

    def _postpone(
        self, outcomes: Sequence[Later], prior: Mapping[int, Prior]
    ) -> tuple[dict[int, float], list[Failed], int]:
        """Record postponed runs.

        Return when each item may run again, the failures of items beyond their limit, and how many reports were
        recorded before.

        A dead letter that is postponed in its last pass waits like any other item, and is dead again if it fails.
        """
        known = items.delays_of(self.tx, self.no, [outcome.idx for outcome in outcomes])
        row, now, until, beyond, repeated = self.row, self.now, dict[int, float](), list[Failed](), 0
        written: list[tuple[Later, int, float, bool]] = []
        for outcome in outcomes:
            idx = outcome.idx
            times, since, report = known.get(idx, (0, now, None))
            if report == outcome.report or idx in until:
                repeated += 1
                continue
            if outcome.limit.exceeded(times + 1, now - since):
                text = f"postponed {times} times in {duration(max(0.0, now - since))}, the limit is {outcome.limit}"
                failure = Failure("RetryLater", bounded_error(f"{outcome.reason} ({text})" if outcome.reason else text))
                beyond.append(Failed(idx, failure, seconds=outcome.seconds, worker=outcome.worker, retryable=False))
                continue
            if outcome.whole_job:
                jobs.wait(self.tx, self.no, now, now + outcome.delay, outcome.reason)
            was_dead = prior[idx].dead
            row.leave(prior[idx].status, was_dead)
            row.failed += 1
            if was_dead:
                items.delete_dead_letter(self.tx, self.no, idx)
            written.append((outcome, times + 1, min(since, now), bool(was_dead)))
            until[idx] = now + outcome.delay
        items.postpone(self.tx, self.no, now, written, {idx: prior[idx].attempts for idx in until})
        return until, beyond, repeated

    def _prior(self, indices: list[int], *, register: bool) -> dict[int, Prior]:
        """Return the items' states. With ``register``, register the unknown ones first."""
        store = item_store(self.tx.engine)
        prior = store.prior_states(self.tx, self.no, indices)
        if register and len(prior) < len(indices):
            self.row.total += self.tx.insert(items.REGISTER, [(self.no, idx) for idx in indices])
            prior = store.prior_states(self.tx, self.no, indices)
        return prior

    def _count_done(self, outcomes: Sequence[Done]) -> None:
        self.row.count_done(len(outcomes), sum(outcome.seconds or 0.0 for outcome in outcomes))

    def _rescue(self, idx: int) -> None:
        """Delete the dead letter of an item that succeeded after all."""
        items.delete_dead_letter(self.tx, self.no, idx)
        audit(self.tx, self.now, "headway", "rescued", self.id, {"idx": idx})

    def _fail(self, outcome: Failed, name: str | None, attempts: int, at: float | None, *, was_dead: bool) -> None:
        no, now, failure = self.no, self.now, outcome.failure
        cause = self._cause(failure, name)
        error = shortened(failure.text, ERROR_KEPT if attempts == 1 else REPEATED_ERROR_KEPT)
        self.row.count_failure(outcome.seconds or 0.0, is_dead=at is None, was_dead=was_dead)
        self.tx.execute(
            "INSERT INTO progress (job, idx, status, meta, attempts, updated_at, seconds, worker, next_attempt_at) "
            "VALUES (?, ?, 'failed', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET status = 'failed', "
            "meta = excluded.meta, attempts = excluded.attempts, updated_at = excluded.updated_at, "
            "seconds = excluded.seconds, worker = excluded.worker, next_attempt_at = excluded.next_attempt_at, "
            "lease_until = NULL, holder = NULL",
            (no, outcome.idx, outcome.meta, attempts, now, outcome.seconds, outcome.worker, at),
        )
        self.tx.execute(
            "INSERT INTO attempts (job, idx, no, outcome, error, detail, cause, worker, at, seconds, printed) "
            "SELECT ?, ?, coalesce(max(no), 0) + 1, ?, ?, ?, ?, ?, ?, ?, ? FROM attempts WHERE job = ? AND idx = ?",
            (no, outcome.idx, outcome.outcome, error, self._detail(cause, failure.detail), cause, outcome.worker, now,
             outcome.seconds, outcome.printed, no, outcome.idx),
        )  # fmt: skip
        if at is None:
            # An item that was dead before has just used its last pass. One that cannot succeed gets none.
            passed = int(was_dead or not outcome.retryable)
            last_error = shortened(failure.text, DEAD_ERROR_KEPT)
            self.tx.execute(
                "INSERT INTO dead_letters (job, idx, meta, error, created_at, cause, last_pass) "
                "VALUES (?, ?, ?, ?, ?, ?, CASE WHEN ? = 1 OR EXISTS (SELECT 1 FROM item_delays w WHERE w.job = ? "
                "AND w.idx = ? AND w.last_pass = 1) THEN 1 ELSE 0 END) "
                "ON CONFLICT (job, idx) DO UPDATE SET meta = excluded.meta, "
                "error = excluded.error, created_at = excluded.created_at, cause = excluded.cause, "
                "last_pass = excluded.last_pass",
                (no, outcome.idx, outcome.meta, last_error, now, cause, passed, no, outcome.idx),
            )
        log.info(
            "item failed" if at is not None else "item is dead",
            job=self.id, idx=outcome.idx, attempt=attempts, error=failure.text, cause=cause,
        )  # fmt: skip

    def _cause(self, failure: Failure, name: str | None) -> int:
        """Count a failure of its cause. Return the cause's number."""
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

    # ---- finishing -------------------------------------------------------------------------------------------------

    def close(self, *, settle: bool) -> bool:
        """Write the counters back. With ``settle``, finish a complete job. Return whether this call finished it."""
        completed = update_completion(self.row, settle=settle)
        self.row.save()
        return completed


def plain_successes(outcomes: Sequence[Outcome]) -> list[Done]:
    """Return ``outcomes`` if all are successes without a claim token, otherwise an empty list."""
    successes = [outcome for outcome in outcomes if isinstance(outcome, Done) and outcome.token is None]
    return successes if len(successes) == len(outcomes) else []
