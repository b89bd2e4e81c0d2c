"""One job in the ledger: registers its items, yields them, and records each outcome exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from headway._lease import Owner, renewing, write_owner
from headway._sql import Database, Row, Tx, Value, listed
from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput, NotFound
from headway.ledger import control
from headway.ledger.content import is_intact
from headway.ledger.control import Control
from headway.ledger.fleet import claims
from headway.ledger.fleet.claims import DAMAGED, DUE
from headway.ledger.job_lease import Hold, renew
from headway.ledger.store.bulk import put_items
from headway.ledger.store.index_range import OPEN, next_untried
from headway.ledger.store.recorder import Recorder, audit, current_user, plain_successes, put_one_done
from headway.ledger.store.report import Reports
from headway.ledger.values import OF_ITEMS, Done, Failed, Item, NewItem, Outcome, Recorded, check_index, check_text
from headway.telemetry import Log

log = Log("ledger")

#: Rows written per transaction. It bounds the size of SQLite's write-ahead log.
CHUNK = 5000

#: Makes an unfinished item available again at once. A dead letter that was not run in its last pass stays a dead
#: letter.
GIVE_BACK = (
    "UPDATE progress SET lease_until = NULL, holder = NULL, next_attempt_at = CASE WHEN EXISTS (SELECT 1 FROM dead_letters d "
    "WHERE d.job = progress.job AND d.idx = progress.idx) THEN NULL ELSE CAST(? AS DOUBLE PRECISION) END"
)

#: Receives the recorded outcome of items whose payload was damaged.
OnDamaged = Callable[[Recorded], object]

#: It has no counts of waiting or dead items: only the job's holder needs them.
_ONE_DONE = Recorded(
    done=1, failed=0, dead=0, repeated=0, completed=False, due={}, died=(), waiting=0, given_up=0, stale=()
)


def ignore(_: Recorded) -> None:
    """Ignore damaged items (the default for ``on_damaged``)."""


def _checked_key(key: str | None) -> str | None:
    return None if key is None else check_text(key, "an item's key")


class _NotThatSimple(Exception):
    """Rolls back a fast path of recording."""


NewRow = tuple[int, int, str | None, str | None, int | None]


class Job(Reports):
    """A stateless handle of a job. `Reports` has the queries; this class has the changes."""

    def __init__(self, database: Database, no: int, id: str, hold: Hold | None = None) -> None:
        super().__init__(database, no, id)
        self._hold = hold

    def held_by(self, hold: Hold) -> Job:
        """Return a handle whose changes raise `StaleClaim` once the job has a newer holder.

        A process that was suspended for longer than its lease therefore changes nothing when it continues.
        """
        return Job(self._database, self.no, self.id, hold)

    def open(self, tx: Tx, hold: Hold | None = None) -> Recorder:
        """Open the recorder of this job. Checks that the handle's hold, if it has one, is still current."""
        hold = hold or self._hold
        recorder = Recorder(tx, self.no) if hold is None else Recorder(tx, self.no, token=hold.token, owner=hold.owner)
        if recorder.id != self.id:  # a restored database can assign a job number a second time
            raise NotFound(f"Job {self.id} is not in the database any more; another one has its number.")
        return recorder

    # ---- registering -----------------------------------------------------------------------------------------------

    def register(self, items: Iterable[NewItem]) -> int:
        """Register items and return how many are new. A known index is left unchanged.

        The hold is renewed meanwhile, because reading the items may take longer than its lease.
        """
        if self._hold is None:
            return self._register(items)
        with renewing(partial(renew, self._database, self._hold), self._hold.lease):
            return self._register(items)

    def _register(self, items: Iterable[NewItem]) -> int:
        new = 0
        rows = (
            (self.no, check_index(item.idx), _checked_key(item.key), item.payload, item.fingerprint) for item in items
        )
        while chunk := list(islice(rows, CHUNK)):
            new += self._database.run(partial(self._insert, rows=chunk), operation="register")
        if new:
            log.info("items registered", job=self.id, count=new)
        return new

    def _insert(self, tx: Tx, rows: list[NewRow]) -> int:
        recorder = self.open(tx)
        if tx.engine == "postgresql":
            new = put_items(tx, self.no, rows)
        else:
            new = tx.insert(
                "INSERT INTO input_products (job, idx, key, payload, fingerprint) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (job, idx) DO NOTHING",
                rows,
            )
        recorder.total += new
        recorder.frontier = min(recorder.frontier, *(row[1] for row in rows))
        recorder.close(settle=False)
        return new

    def seal(self, digest: str | None = None, *, settle: bool = True) -> bool:
        """Mark the item list as complete, so that the job can finish. Return whether it just did."""

        def work(tx: Tx) -> bool:
            recorder = self.open(tx)
            tx.execute("UPDATE jobs SET digest = ? WHERE no = ?", (digest, self.no))
            recorder.sealed = 1
            return recorder.close(settle=settle)

        return self._database.run(work, operation="seal")

    def replace_items(self, items: Sequence[NewItem]) -> None:
        """Replace the content of known items. They become pending again, and their history is kept."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx)
            tx.executemany(
                # The progress row is the only record of a successful run and is deleted below: copy it to the attempts.
                "INSERT INTO attempts (job, idx, no, outcome, error, worker, at, seconds) SELECT p.job, p.idx, "
                "coalesce((SELECT max(a.no) FROM attempts a WHERE a.job = p.job AND a.idx = p.idx), 0) + 1, "
                "'done', '', p.worker, p.updated_at, p.seconds FROM progress p "
                "WHERE p.job = ? AND p.idx = ? AND p.status = 'done'",
                [(self.no, item.idx) for item in items],
            )
            tx.executemany(
                "UPDATE input_products SET key = ?, payload = ?, fingerprint = ? WHERE job = ? AND idx = ?",
                [(item.key, item.payload, item.fingerprint, self.no, item.idx) for item in items],
            )
            for table in ("progress", "dead_letters", "results", "printed"):
                tx.executemany(
                    f"DELETE FROM {table} WHERE job = ? AND idx = ?", [(self.no, item.idx) for item in items]
                )
            recorder.frontier = min(recorder.frontier, *(item.idx for item in items))
            recorder.recount()
            self._lower_kept(tx, recorder.done)
            recorder.close(settle=False)

        if items:
            self._database.run(work, operation="replace_items")

    def drop(self, indices: Sequence[int]) -> None:
        """Remove items from the job, with everything recorded about them."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx)
            for table in OF_ITEMS:
                tx.executemany(f"DELETE FROM {table} WHERE job = ? AND idx = ?", [(self.no, idx) for idx in indices])
            recorder.recount()
            self._lower_kept(tx, recorder.done)
            recorder.close(settle=False)

        if indices:
            self._database.run(work, operation="drop")

    def _lower_kept(self, tx: Tx, done: int) -> None:
        """Lower the open run's count of kept items after items were removed or replaced."""
        tx.execute("UPDATE runs SET kept = ? WHERE job = ? AND outcome IS NULL AND kept > ?", (done, self.no, done))

    def put_empty_results(self) -> None:
        """Give every done item that returned nothing the result ``null``, so that result files list it."""

        def work(tx: Tx) -> None:
            self.open(tx)
            tx.execute(
                "INSERT INTO results (job, idx, result) SELECT p.job, p.idx, 'null' FROM progress p "
                "WHERE p.job = ? AND p.status = 'done' AND p.unkept IS NULL "
                "AND NOT EXISTS (SELECT 1 FROM results r WHERE r.job = p.job AND r.idx = p.idx) ORDER BY p.idx",
                (self.no,),
            )

        self._database.run(work, operation="put_empty_results")

    def rewrite_outputs(self) -> None:
        """Rewrite the result files at the next run, because they may list removed items."""

        def work(tx: Tx) -> None:
            self.open(tx)
            tx.execute("UPDATE outputs SET seq = 0, size = 0 WHERE job = ?", (self.no,))

        self._database.run(work, operation="rewrite_outputs")

    # ---- reading items to run --------------------------------------------------------------------------------------

    # These methods return payloads exactly as registered. An item with a damaged payload becomes a dead letter here,
    # and ``on_damaged`` receives what was recorded.

    def untouched(self, after: int, limit: int, *, on_damaged: OnDamaged = ignore) -> list[Item]:
        """Return untried items by index, starting after ``after``. Fewer than ``limit`` means that there are no more."""
        items: list[Item] = []
        while (wanted := limit - len(items)) > 0:
            rows, after = next_untried(self._database, self.no, after, wanted)
            if not rows:
                break
            intact = [Item(idx, key, payload) for idx, key, payload, mark in rows if is_intact(payload, mark)]
            self._give_up_damaged(rows, intact, on_damaged)
            items += intact
        return items

    def due(self, limit: int, *, within: float = 0.0, on_damaged: OnDamaged = ignore) -> list[tuple[Item, float]]:
        """Return items that wait for a retry, each with the seconds until it may run, soonest first.

        ``within`` also includes items that become due within this many seconds. Fewer than ``limit`` means that there
        are no more. An item whose failure lies in the future failed before the clock was set back. It has no wait left.
        """
        while True:
            with self._database.read() as tx:
                now = tx.now()
                rows = tx.all(
                    "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, p.next_attempt_at, p.updated_at "
                    "FROM progress p JOIN input_products i ON i.job = p.job AND i.idx = p.idx "
                    f"WHERE p.job = ? AND {OPEN} AND {DUE} ORDER BY p.next_attempt_at, p.idx LIMIT ?",
                    (self.no, now + within, now, limit),
                )
            intact = [
                (Item(idx, key, payload, attempts), at - now if failed_at <= now else 0.0)
                for idx, key, payload, mark, attempts, at, failed_at in rows
                if is_intact(payload, mark)
            ]
            # Damaged items are dead letters now. Query again to fill their places.
            if not self._give_up_damaged(rows, [item for item, _ in intact], on_damaged):
                return sorted(intact, key=lambda each: each[1])

    def last_pass(self, limit: int, *, on_damaged: OnDamaged = ignore) -> list[Item]:
        """Return dead letters that have not had their last pass and may succeed on a retry."""
        while True:
            rows = self._database.all(
                "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts FROM dead_letters d "
                "JOIN input_products i ON i.job = d.job AND i.idx = d.idx "
                "JOIN progress p ON p.job = d.job AND p.idx = d.idx "
                "WHERE d.job = ? AND d.last_pass = 0 ORDER BY d.idx LIMIT ?",
                (self.no, limit),
            )
            intact = [
                Item(idx, key, payload, attempts)
                for idx, key, payload, mark, attempts in rows
                if is_intact(payload, mark)
            ]
            if not self._give_up_damaged(rows, intact, on_damaged):
                return intact

    def _give_up_damaged(self, rows: Sequence[Row], intact: Sequence[Item], on_damaged: OnDamaged) -> bool:
        """Turn the damaged items in ``rows`` into dead letters. Return whether there were any."""
        if len(intact) == len(rows):
            return False
        sound = {item.idx for item in intact}
        damaged = [row[0] for row in rows if row[0] not in sound]
        log.error("payloads in the database are damaged", job=self.id, count=len(damaged), idx=damaged[0])
        on_damaged(self.record([Failed(idx, DAMAGED, retryable=False) for idx in damaged], settle=False))
        return True

    def claim(self, worker: str, *, limit: int = 1, lease: float = 30.0) -> list[Item]:
        """Claim up to ``limit`` items for ``lease`` seconds.

        Each item carries a fencing token: once its lease has expired and another worker has claimed it, the old worker
        can no longer record it. An expired claim costs the item an attempt.
        """
        if limit < 1 or not 0 < lease < 10**9:
            raise InvalidInput("A claim needs a limit of at least 1 and a lease above 0 seconds.")
        check_text(worker, "a worker's name")
        owner = Owner.current()

        def work(tx: Tx) -> list[Item]:
            recorder = self.open(tx)
            items = claims.take(recorder, limit)
            # Computed inside the transaction: the lease starts now, not before the wait for a busy database.
            claims.write(recorder, items, worker, write_owner(owner, lease), lease)
            recorder.close(settle=True)  # an expired claim may have used the last attempt of the last open item
            return items

        return self._database.run(work, operation="claim")

    def renew(self, items: Sequence[Item], *, lease: float = 30.0) -> int:
        """Renew claims for ``lease`` seconds. Return how many are still valid."""
        if not 0 < lease < 10**9:
            raise InvalidInput("A claim needs a lease above 0 seconds.")
        owner = Owner.current()

        def work(tx: Tx) -> int:
            until, holder = tx.now() + lease, write_owner(owner, lease)
            return tx.executemany(
                "UPDATE progress SET lease_until = ?, next_attempt_at = ?, holder = ? "
                "WHERE job = ? AND idx = ? AND token = ? AND lease_until IS NOT NULL AND status <> 'done'",
                [(until, until, holder, self.no, item.idx, item.token) for item in items],
            )

        return self._database.run(work, operation="renew")

    def note_running(self, hold: Hold, items: Sequence[tuple[int, str]]) -> None:
        """Record (idx, worker) of long-running items under a hold, for other processes to see.

        If the whole run is killed, the runs of these items count as lost; see `Hold`.
        """

        def work(tx: Tx) -> None:
            recorder = self.open(tx, hold)
            until = recorder.now + hold.lease
            tx.executemany(
                "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, lease_until) "
                "VALUES (?, ?, 'pending', ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET worker = excluded.worker, "
                "next_attempt_at = excluded.next_attempt_at, lease_until = excluded.lease_until, holder = NULL "
                "WHERE progress.status <> 'done'",
                [(self.no, idx, recorder.now, worker, until, until) for idx, worker in items],
            )

        if items:
            self._database.run(work, operation="note_running")

    def give_back(self, indices: Sequence[int], hold: Hold | None = None) -> None:
        """Release items that were noted or claimed but not finished, as in a shutdown. No attempt is counted."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx, hold)
            tx.executemany(
                f"{GIVE_BACK} WHERE job = ? AND idx = ? AND status <> 'done' AND lease_until IS NOT NULL",
                [(recorder.now, self.no, idx) for idx in indices],
            )

        if indices:
            self._database.run(work, operation="give_back")

    # ---- recording -------------------------------------------------------------------------------------------------

    def record(
        self,
        outcomes: Sequence[Outcome],
        *,
        hold: Hold | None = None,
        policy: RetryPolicy | None = None,
        settle: bool = True,
        register: bool = False,
    ) -> Recorded:
        """Record outcomes, all of them or none.

        Repeating a call changes nothing: a done item stays done, and a failure names its run (``seen`` or ``token``).
        With ``settle``, the call that records the last item also finishes the job and appends its event. With
        ``register``, unknown indices are registered first. ``policy`` overrides the job's retry policy.
        """
        if len(outcomes) == 1 and (hold or self._hold) is None and self._put_one_done(outcomes[0], register=register):
            return _ONE_DONE

        if (recorded := self._put_new_done(outcomes, hold, settle=settle)) is not None:
            return recorded

        def work(tx: Tx) -> Recorded:
            recorder = self.open(tx, hold)
            recorded = recorder.write(outcomes, policy, register=register)
            return replace(recorded, completed=recorder.close(settle=settle))

        return self._database.run(work, operation="record")

    def _put_new_done(self, outcomes: Sequence[Outcome], hold: Hold | None, *, settle: bool) -> Recorded | None:
        """Record a batch of successes of untried items (PostgreSQL). Returns None if it is not such a batch."""
        successes = [] if self._database.engine == "sqlite" else plain_successes(outcomes)
        if not successes:
            return None

        def work(tx: Tx) -> Recorded:
            recorder = self.open(tx, hold)
            if not recorder.write_new(successes):
                raise _NotThatSimple
            completed = recorder.close(settle=settle)
            return Recorded(len(successes), 0, 0, 0, completed, {}, (), recorder.failed, recorder.dead, ())

        try:
            return self._database.run(work, operation="record")
        except _NotThatSimple:
            return None

    def _put_one_done(self, outcome: Outcome, *, register: bool) -> bool:
        # SQLite only, where the transaction holds the write lock from its start. On PostgreSQL, writing an item before
        # locking the job's row could deadlock with a transaction that locks them in the other order.
        if self._database.engine != "sqlite":
            return False
        if not isinstance(outcome, Done) or outcome.result is not None or outcome.token is not None:
            return False

        def work(tx: Tx) -> None:
            if not put_one_done(tx, self.no, outcome, register=register):
                raise _NotThatSimple

        try:
            self._database.run(work, operation="record")
        except _NotThatSimple:
            return False
        return True

    def finish(self, hold: Hold | None = None) -> bool:
        """Finish the job if every item is done or dead. Return whether this call finished it."""

        def work(tx: Tx) -> bool:
            return self.open(tx, hold).close(settle=True)

        return self._database.run(work, operation="finish")

    # ---- controlling the current run -------------------------------------------------------------------------------

    def pause(self, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to complete its current items and start no more. Raises `Refused` if there is no run.

        The run obeys within a second and reports who asked. The request is in the audit trail.
        """
        return control.ask(self._database, self.no, "pause", actor=actor or current_user(), paused=True, reason=reason)

    def resume(self, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask a paused run to continue."""
        return control.ask(
            self._database, self.no, "resume", actor=actor or current_user(), paused=False, reason=reason
        )

    def stop(self, *, now: bool = False, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to end after its current items. With ``now``, it abandons them."""
        level = 2 if now else 1
        asked = control.ask(
            self._database, self.no, "stop", actor=actor or current_user(), stopping=level, reason=reason
        )
        self.on_stop()
        return asked

    def on_stop(self) -> None:
        """End a fleet's run if none of its slots is working, because no process would end it."""
        from headway.ledger.fleet import fleet

        fleet.attend(self._database, self.no)

    def scale(self, workers: int, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to work on ``workers`` items at once."""
        return control.ask(
            self._database, self.no, "scale", actor=actor or current_user(), workers=workers, reason=reason
        )

    def asked(self, run: int) -> Control:
        """Return the current control requests for a run."""
        return control.read(self._database, self.no, run)

    # ---- dead letters ----------------------------------------------------------------------------------------------

    def retry_dead(
        self,
        *,
        cause: int | None = None,
        indices: Sequence[int] | None = None,
        actor: str = "headway",
        reason: str = "",
    ) -> int:
        """Make dead letters pending again, with no attempts counted. Return how many.

        Selects all of them, those of one ``cause``, or those at ``indices``. A run in progress retries them, and so
        does the fleet of a finished run. Otherwise they wait for the next run.
        """
        from headway.ledger.fleet import fleet

        def work(tx: Tx) -> int:
            recorder = self.open(tx)
            where = "job = ?"
            parameters: list[Value] = [self.no]
            if cause is not None:
                where, parameters = f"{where} AND cause = ?", [*parameters, cause]
            if indices is not None:
                them, numbers = listed(tx.engine, list(indices), "bigint")
                where, parameters = f"{where} AND idx IN ({them})", [*parameters, numbers]
            dead = tx.all(f"SELECT idx FROM dead_letters WHERE {where}", parameters)
            if not dead:
                return 0
            tx.execute(f"DELETE FROM dead_letters WHERE {where}", parameters)
            tx.executemany(
                "UPDATE progress SET status = 'pending', attempts = 0, next_attempt_at = ?, lease_until = NULL, "
                "holder = NULL, updated_at = ? WHERE job = ? AND idx = ?",
                [(recorder.now, recorder.now, self.no, idx) for (idx,) in dead],
            )
            recorder.dead -= len(dead)
            audit(tx, recorder.now, actor, "retry", self.id, {"count": len(dead), "cause": cause, "reason": reason})
            recorder.close(settle=False)
            fleet.reopen(recorder)
            return len(dead)

        count = self._database.run(work, operation="retry_dead")
        if count:
            log.info("dead letters are tried again", job=self.id, count=count, cause=cause)
        return count
