"""The sweeper: finds what nobody else will. One is active in a whole deployment, under a lease.

It ends runs whose worker died, lets tasks run whose wait is over, gives RQ the ids it does not know (any more), marks
workers that are gone, and deletes what is older than it is to be kept. Everything it does, it decides by the rows alone, so
two sweepers would do no harm; the lease only spares the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeVar

from headway import events
from headway._lease import Lease, Owner, SqlLeases, shorten
from headway._sql import Tx
from headway.errors import HeadwayError, Held, NotFound, StaleClaim
from headway.failure import describe
from headway.queue import claims, hinting, settling, workers
from headway.queue.changing import SKIP_LOCKED
from headway.queue.records import add_up_minutes
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Priority, Task
from headway.retry import RetryPolicy
from headway.telemetry import Log, metrics

log = Log("queue")

T = TypeVar("T")

#: Seconds between two rounds.
INTERVAL = 2.0
LEASE = 8.0
#: Seconds by which the database's clock may run otherwise than ours between two rounds, and was not set.
CLOCK_SET = 3.0
#: Seconds for which the database may let a round wait. After more, workers may have had no answer for as long as a lease.
SILENCE = claims.LEASE / 3
#: Seconds after which a hint that led to no claim is looked for in RQ.
HINT_SECONDS = 10.0
#: Counts of minutes, and allowances, are kept for a day at least.
COUNTS_KEPT = 86_400.0
_BATCH = 500
#: Of what is deleted in one round: a worker that died meanwhile is to be found in time.
_PAGES = 20
_AWAY = RetryPolicy(retries=0, base=1.0, cap=30.0, jitter=0.2)


class Hints(Protocol):
    """Who tells workers that there is something to claim."""

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        """Pass ids on, in this order; those that were."""
        ...

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        """Those that were passed on and are lost; None while that cannot be known."""
        ...

    def look_at_memory(self) -> bool:
        """Whether there is no room for more."""
        ...

    def show_ended(self, tasks: Sequence[Task]) -> None:
        """Show what has ended without a worker to show it."""
        ...

    def forget_the_dead(self) -> None:
        """Clean up after workers that are gone."""
        ...


class Sweeper:
    """See the module. `tick` is one round."""

    def __init__(
        self,
        queue: TaskQueue,
        *,
        hints: Hints | None = None,
        retention: float = 30 * 86_400.0,
        clock: Callable[[], float] = time.monotonic,
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``chores``: what else is to be looked after once in a deployment, every round."""
        self._chores = chores
        self._queue, self._hints = queue, hints
        self.retention = retention  # seconds; may be changed while it runs
        self._clock = clock
        self._leases = SqlLeases()
        self._lease: Lease | None = None
        self._purged_at = clock()
        self._measure_at = clock()
        self._events_after = 0
        self._ahead: float | None = None  # the database's clock before ours, which nobody can set
        self._asked_at: float | None = None  # when the first round began that the database has not answered yet
        self._doubted_at: float | None = None  # when leases were not to be believed, and could not begin anew

    def run(self, stop: threading.Event) -> None:
        failures, delay = 0, 0.0
        while not stop.wait(delay):
            try:
                delay, failures = self.tick(), 0
            except Exception as error:  # noqa: BLE001 - a sweeper that ended would be missed only when tasks are
                failures += 1
                delay = _AWAY.delay(failures)
                log.warning(
                    "a round of the sweeper failed; it is tried again", attempt=failures, error=describe(error).text
                )
        self.release()

    def tick(self) -> float:
        """One round, if this is the active sweeper; seconds until the next."""
        if self._asked_at is None:
            self._asked_at = self._clock()
        if not self._acquire():
            self._stand_by()
            return INTERVAL
        ended, begun_anew = self._end_lapsed()
        if self._hints is not None:
            self._hints.show_ended(ended)
        promoted = self._ask(lambda tx: claims.promote(tx, tx.now()), "queue.promote")
        hinted = self._hint()
        begun_anew = begun_anew or self._doubted_at is not None
        self._ask(lambda tx: workers.mark_lost(tx, begun_anew=begun_anew), "queue.workers")
        for chore in self._chores:
            chore()
        if self._clock() - self._purged_at > 60.0:
            if self.purge(pages=_PAGES) < _PAGES * _BATCH and not self._events_after:
                self._purged_at = self._clock()  # else it goes on in the next round: what else it does is not to wait
            if self._hints is not None:
                self._hints.forget_the_dead()
        if self._clock() >= self._measure_at:
            began = self._clock()
            self._measure()
            # Counting a million that wait takes a while: never more than a twentieth of the time.
            self._measure_at = self._clock() + 20 * (self._clock() - began)
        more = len(ended) == _BATCH or hinted == _BATCH or promoted >= claims.PROMOTED
        return 0.0 if more else INTERVAL

    def _ask(self, work: Callable[[Tx], T], operation: str) -> T:
        with self._heed_silence():
            return self._queue.database.run(work, operation=operation)

    @contextmanager
    def _heed_silence(self) -> Iterator[None]:
        """Also a database that falls silent in the middle of a round is one by which nobody could renew a lease: the next round
        is to know it. Around one question at a time: many that take long together are no silence."""
        began = self._clock()
        try:
            yield
        finally:
            if self._clock() - began > SILENCE:
                self._doubted_at = self._clock()

    def _end_lapsed(self) -> tuple[list[Task], bool]:
        """End the runs whose worker is gone; (those tasks, whether leases had to begin anew).

        They do where they are not to be believed (`_look`): else all that runs on other machines would be taken for dead at
        once. Where the clock was set back before that, those that end too late do.
        """

        def work(tx: Tx) -> tuple[float, str, list[Task]]:
            ahead, doubt = self._look(tx)
            if not doubt and self._doubted_at is not None and self._clock() - self._doubted_at < claims.LEASE:
                doubt = "a moment ago they were not to be believed"
            if doubt:
                claims.begin_leases_anew(tx)
            shorten(tx, "tasks", "status = 'RUNNING'", least=claims.LEASE)
            return ahead, doubt, settling.lapsed(tx, limit=_BATCH)

        self._ahead, doubt, ended = self._queue.database.run(work, operation="queue.sweep")
        self._asked_at = self._doubted_at = None
        if doubt:
            log.warning(f"the leases of tasks begin anew: {doubt}")
        for task in ended:
            log.warning("the worker of a task is gone", taskID=task.id, worker=task.worker, new=task.status.value)
        return ended, bool(doubt)

    def _stand_by(self) -> None:
        """Look as the active sweeper does: where its lease is over because the clock was set forward, or because nobody had an
        answer for long, this may be the next one."""
        with self._queue.database.read() as tx:
            self._ahead, doubt = self._look(tx)
        self._asked_at = None
        if doubt:
            self._doubted_at = self._clock()

    def _look(self, tx: Tx) -> tuple[float, str]:
        """(by how much the database's clock is before ours, why leases are not to be believed or nothing).

        Who lives renews its lease; not by a clock that was set since, and not while the database answers nobody.
        """
        before = self._clock()
        at = tx.now()
        # A slow answer is no clock that was set: by how much it is ahead is known to within the time of the question.
        least, most = at - self._clock(), at - before
        doubt = ""
        if self._ahead is not None and not least - CLOCK_SET < self._ahead < most + CLOCK_SET:
            doubt = "the clock of the database was set"
        elif self._asked_at is not None and self._clock() - self._asked_at > SILENCE:
            doubt = "the database gave no answer for long"
        return (least + most) / 2, doubt

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._queue.database.run(lambda tx: self._leases.release(tx, lease), operation="queue.sweeper")
            except HeadwayError as error:  # it lapses by itself
                log.warning("the sweeper's lease could not be given back", error=str(error))

    def purge(self, *, pages: int | None = None) -> int:
        """Delete tasks that ended longer ago than they are kept, and their events that every sink has, in steps; how many
        tasks. At most so many ``pages`` of each."""
        gone = 0
        for _ in count() if pages is None else range(pages):
            found = self._ask(
                # The limit is not told to PostgreSQL's planner: it would take it for more tasks than ever ended, while it has
                # no statistics, and read the whole table instead of its index.
                # What somebody tries again at this moment is locked and passed over. PostgreSQL would wait for it, and then
                # delete it: of a row that changed meanwhile it asks only whether its number is among those found before.
                lambda tx: tx.execute(
                    "DELETE FROM tasks WHERE no IN (SELECT no FROM tasks WHERE ended_at IS NOT NULL AND ended_at < ? "
                    "AND status IN ('COMPLETED', 'FAILED', 'CANCELLED') ORDER BY ended_at "
                    f"LIMIT (SELECT ?){SKIP_LOCKED[tx.engine]})",
                    (tx.now() - self.retention, _BATCH),
                ),
                "queue.purge",
            )
            gone += found
            if found < _BATCH:
                break
        self._purge_events(pages)
        kept = max(self.retention, COUNTS_KEPT)
        self._ask(add_up_minutes, "queue.totals")
        self._ask(lambda tx: _forget_counts(tx, tx.now() - kept), "queue.purge")
        return gone

    def _purge_events(self, pages: int | None) -> None:
        """On from where it stopped; at the end it begins anew, because a sink may have taken more meanwhile."""
        for _ in count() if pages is None else range(pages):
            reached = self._ask(
                lambda tx: events.purge_page(
                    tx, "headway.queue", tx.now() - self.retention, after=self._events_after, limit=_BATCH
                ),
                "queue.purge",
            )
            self._events_after = reached or 0
            if reached is None:
                break

    def _acquire(self) -> bool:
        try:
            if self._lease is not None:
                lease = self._lease
                self._queue.database.run(lambda tx: self._leases.renew(tx, lease), operation="queue.sweeper")
                return True
            owner = Owner.current()
            found = self._queue.database.run(
                lambda tx: self._leases.acquire(tx, "queue.sweeper", owner, LEASE), operation="queue.sweeper"
            )
            if isinstance(found, Held):
                return False
            self._lease = found
        except (StaleClaim, NotFound):
            self._lease = None  # somebody else sweeps now, or the database was put back to before anybody did
            return False
        log.info("this is the active sweeper")
        return True

    def _hint(self) -> int:
        """Tell RQ of tasks it does not know: those never told of, and those whose hint was lost on the way."""
        if self._hints is None:
            return 0
        hints = self._hints
        full = hints.look_at_memory()
        # Also while it is full: one that throws keys away when it is has lost hints, and workers find the rows without one.
        old = self._ask(lambda tx: hinting.doubtful(tx, older_than=HINT_SECONDS, limit=_BATCH), "queue.doubtful")
        missing = hints.missing(old) if old else []
        if missing is None:
            return 0
        if old:
            lost = {task_id for task_id, _ in missing}
            present = [task_id for task_id, _ in old if task_id not in lost]
            self._ask(lambda tx: hinting.hinted(tx, present), "queue.hinted")  # looked at again later
            self._ask(lambda tx: hinting.unhint(tx, lost), "queue.unhint")
        if full:
            return 0
        waiting = self._ask(lambda tx: hinting.unhinted(tx, limit=_BATCH), "queue.unhinted")
        done = hints.push(waiting)
        if done:
            self._ask(lambda tx: hinting.hinted(tx, done), "queue.hinted")
        return len(done)

    def _measure(self) -> None:
        with self._heed_silence():
            found = self._queue.stats()
        for info in found:
            metrics.gauge("headway_tasks_waiting", info.waiting, queue=info.priority.value)
            metrics.gauge("headway_tasks_running", info.running, queue=info.priority.value)
            metrics.gauge("headway_tasks_oldest_seconds", info.oldest_wait or 0.0, queue=info.priority.value)


def _forget_counts(tx: Tx, before: float) -> None:
    # A day of minutes at a time, so that the first purge of a year is no long statement.
    tx.execute(
        "DELETE FROM task_minutes WHERE minute < ? AND minute <= (SELECT min(minute) + 1440 FROM task_minutes) "
        "AND minute <= (SELECT min(counted_until) FROM task_queues)",
        (int(before // 60),),
    )
    tx.execute("DELETE FROM task_causes WHERE last_seen < ?", (before,))
    # An allowance that has had the time to be full again is what one is without a row.
    tx.execute(
        "DELETE FROM task_rates WHERE at < CAST(? AS DOUBLE PRECISION) - coalesce((SELECT max(1.0 / rate) "
        "FROM task_limits WHERE rate IS NOT NULL), 0.0)",
        (before,),
    )
