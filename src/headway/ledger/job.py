"""One job in the ledger: registers its items, yields them, and records each outcome exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from headway._lease import Owner, renewing, write_owner
from headway._sql import Database, Row, Tx
from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput, NotFound, Refused
from headway.ledger.content import is_intact
from headway.ledger.control import ControlledJob
from headway.ledger.fleet import claims
from headway.ledger.fleet.claims import DAMAGED
from headway.ledger.job_lease import Hold, renew
from headway.ledger.store import items as stored
from headway.ledger.store import jobs
from headway.ledger.store.audit import audit
from headway.ledger.store.contract import NewRow, TriedBefore, item_store
from headway.ledger.store.items import next_untried
from headway.ledger.store.recorder import Recorder
from headway.ledger.store.report import Reports
from headway.ledger.values import (
    NOTHING_RECORDED,
    Done,
    Failed,
    Item,
    NewItem,
    Outcome,
    Recorded,
    check_index,
    check_text,
)
from headway.telemetry import Log

log = Log("ledger")

#: Rows written per transaction. It bounds the size of SQLite's write-ahead log.
CHUNK = 5000

#: Receives the recorded outcome of items whose payload was damaged.
OnDamaged = Callable[[Recorded], object]

#: It has no counts of waiting or dead items: only the job's holder needs them.
_ONE_DONE = replace(NOTHING_RECORDED, done=1)


def ignore(_: Recorded) -> None:
    """Ignore damaged items (the default for ``on_damaged``)."""


def _checked_key(key: str | None) -> str | None:
    return None if key is None else check_text(key, "an item's key")


class Job(Reports, ControlledJob):
    """A stateless handle of a job.

    `Reports` has the queries and `ControlledJob` the requests to the current run; this class has the changes.
    """

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
            raise NotFound(f"Job {self.id} was deleted; another job has its number.")
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
        new = item_store(tx.engine).insert_items(tx, rows)
        recorder.row.total += new
        recorder.row.frontier = min(recorder.row.frontier, *(row[1] for row in rows))
        recorder.close(settle=False)
        return new

    def seal(self, digest: str | None = None, *, settle: bool = True) -> bool:
        """Mark the item list as complete, so that the job can finish. Return whether it just did."""

        def work(tx: Tx) -> bool:
            recorder = self.open(tx)
            jobs.set_digest(tx, self.no, digest)
            recorder.row.sealed = 1
            return recorder.close(settle=settle)

        return self._database.run(work, operation="seal")

    def replace_items(self, items: Sequence[NewItem]) -> None:
        """Replace the content of known items. They become pending again, and their history is kept."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx)
            stored.replace(tx, self.no, items)
            recorder.row.frontier = min(recorder.row.frontier, *(item.idx for item in items))
            self._recount(recorder)

        if items:
            self._database.run(work, operation="replace_items")

    def drop(self, indices: Sequence[int]) -> None:
        """Remove items from the job, with everything recorded about them."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx)
            stored.delete(tx, self.no, indices)
            self._recount(recorder)

        if indices:
            self._database.run(work, operation="drop")

    def _recount(self, recorder: Recorder) -> None:
        """Recompute the counters after items were removed or replaced."""
        recorder.row.recount()
        jobs.lower_kept(recorder.tx, self.no, recorder.row.done)
        recorder.close(settle=False)

    def put_empty_results(self) -> None:
        """Give every done item that returned nothing the result ``null``, so that result files list it."""

        def work(tx: Tx) -> None:
            self.open(tx)
            stored.put_null_results(tx, self.no)

        self._database.run(work, operation="put_empty_results")

    def rewrite_outputs(self) -> None:
        """Rewrite the result files at the next run, because they may list removed items."""

        def work(tx: Tx) -> None:
            self.open(tx)
            jobs.rewrite_outputs(tx, self.no)

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
                rows = stored.due(tx, self.no, now, within, limit)
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
            rows = stored.last_pass(self._database, self.no, limit)
            intact = [
                Item(idx, key, payload, attempts)
                for idx, key, payload, mark, attempts, _ in rows
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
            raise InvalidInput(f"A claim needs limit >= 1 and a lease above 0 seconds (got {limit!r} and {lease!r}).")
        check_text(worker, "a worker's name")
        owner = Owner.current()

        def work(tx: Tx) -> list[Item]:
            recorder = self.open(tx)
            items = claims.take(recorder, limit)
            # Computed inside the transaction: the lease starts now, not before the wait for a busy database.
            holder, now = write_owner(owner, lease), recorder.now
            stored.claim(tx, self.no, items, worker, holder, now, now + lease)
            recorder.close(settle=True)  # an expired claim may have used the last attempt of the last open item
            return items

        return self._database.run(work, operation="claim")

    def renew(self, items: Sequence[Item], *, lease: float = 30.0) -> int:
        """Renew claims for ``lease`` seconds. Return how many are still valid."""
        if not 0 < lease < 10**9:
            raise InvalidInput(f"A claim needs a lease above 0 seconds (got {lease!r}).")
        owner = Owner.current()

        def work(tx: Tx) -> int:
            return stored.renew_claims(tx, self.no, items, write_owner(owner, lease), tx.now() + lease)

        return self._database.run(work, operation="renew")

    def note_running(self, hold: Hold, items: Sequence[tuple[int, str]]) -> None:
        """Record (idx, worker) of long-running items under a hold, for other processes to see.

        If the whole run is killed, the runs of these items count as lost; see `Hold`.
        """

        def work(tx: Tx) -> None:
            recorder = self.open(tx, hold)
            stored.note_running(tx, self.no, items, recorder.now, recorder.now + hold.lease)

        if items:
            self._database.run(work, operation="note_running")

    def give_back(self, indices: Sequence[int], hold: Hold | None = None) -> None:
        """Release items that were noted or claimed but not finished, as in a shutdown. No attempt is counted."""

        def work(tx: Tx) -> None:
            recorder = self.open(tx, hold)
            stored.release(tx, self.no, indices, recorder.now)

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
        if len(outcomes) == 1 and (hold or self._hold) is None and self._record_one(outcomes[0], register=register):
            return _ONE_DONE

        def work(tx: Tx, *, compare: bool) -> Recorded:
            recorder = self.open(tx, hold)
            recorded = recorder.write(outcomes, policy, register=register, compare=compare)
            return replace(recorded, completed=recorder.close(settle=settle))

        try:
            return self._database.run(partial(work, compare=False), operation="record")
        except TriedBefore:
            return self._database.run(partial(work, compare=True), operation="record")

    def _record_one(self, outcome: Outcome, *, register: bool) -> bool:
        """Record a plain success by the shortest path, if the engine has one."""
        if not isinstance(outcome, Done) or outcome.token is not None or outcome.unkept:
            return False
        if outcome.result is not None or outcome.printed is not None:
            return False
        return item_store(self._database.engine).record_one(self._database, self.no, outcome, register=register)

    def finish(self, hold: Hold | None = None) -> bool:
        """Finish the job if every item is done or dead. Return whether this call finished it."""

        def work(tx: Tx) -> bool:
            return self.open(tx, hold).close(settle=True)

        return self._database.run(work, operation="finish")

    # ---- dead letters ----------------------------------------------------------------------------------------------

    def continue_run(self, *, actor: str = "headway", reason: str = "") -> None:
        """Continue the last run of a fleet, which was interrupted or stopped.

        The caller submits its slots, or the sweeper of any worker does. Raises `Refused` for a job that runs, is complete
        or was run by a process, which needs its command.
        """
        from headway.ledger.fleet import fleet

        def work(tx: Tx) -> None:
            recorder = self.open(tx)
            if not fleet.reopen(recorder, ("interrupted", "stopped")):
                raise Refused(
                    f"Job {self.id} has no interrupted run of a fleet.", hint="Start it again with its command."
                )
            audit(tx, recorder.now, actor, "continue", self.id, {"reason": reason})

        self._database.run(work, operation="continue_run")
        log.info("the fleet's run continues", job=self.id, reason=reason)

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
            count = stored.revive(tx, self.no, recorder.now, cause=cause, indices=indices)
            if not count:
                return 0
            recorder.row.dead -= count
            audit(tx, recorder.now, actor, "retry", self.id, {"count": count, "cause": cause, "reason": reason})
            recorder.close(settle=False)
            fleet.reopen(recorder)
            return count

        count = self._database.run(work, operation="retry_dead")
        if count:
            log.info("dead letters are retried", job=self.id, count=count, cause=cause)
        return count
