"""The sweeper recovers tasks whose worker died. One sweeper is active per deployment, under a lease.

It ends runs of dead workers, promotes delayed tasks, sends missing RQ hints, marks lost workers and deletes expired data.
Every decision is based on the rows alone, so two active sweepers would do no harm. The lease only avoids duplicate work.
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
from headway.core.failure import describe
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, Held, NotFound, StaleClaim
from headway.queue.store import administration, claim, complete, workers
from headway.queue.store import hints as hint_marks
from headway.queue.task import Priority, Task
from headway.queue.task_queue import TaskQueue
from headway.telemetry import Log, metrics

log = Log("queue")

T = TypeVar("T")

#: Seconds between rounds.
INTERVAL = 2.0
LEASE = 8.0
#: Seconds by which the database clock may drift from ours between rounds before it counts as adjusted.
CLOCK_SET = 3.0
#: Seconds the database may take to answer a round. After longer, workers may have been unable to renew for a whole lease.
SILENCE = claim.LEASE / 3
#: Seconds after which a hint without a claim is checked in RQ.
HINT_SECONDS = 10.0
#: Least number of seconds for which minute counters and rate allowances are kept.
COUNTS_RETENTION = 86_400.0
_BATCH = 500
#: Maximum batches deleted in one round, so that a worker that dies meanwhile is still found in time.
_PAGES = 20
_AWAY = RetryPolicy(retries=0, base=1.0, cap=30.0, jitter=0.2)


class Hints(Protocol):
    """Notifies workers of claimable tasks."""

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        """Send hints in this order; return the ids that were sent."""
        ...

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        """Return the tasks whose hint was lost; None if Redis cannot be asked."""
        ...

    def check_memory(self) -> bool:
        """Return whether Redis is too full for more hints."""
        ...

    def show_ended(self, tasks: Sequence[Task]) -> None:
        """Show tasks that ended without a worker reporting it."""
        ...

    def remove_dead_workers(self) -> None:
        """Clean up after dead workers."""
        ...


class Sweeper:
    """Recovers tasks and cleans up; see the module. `tick` runs one round."""

    def __init__(
        self,
        queue: TaskQueue,
        *,
        hints: Hints | None = None,
        retention: float = 30 * 86_400.0,
        clock: Callable[[], float] = time.monotonic,
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``retention``: seconds to keep ended tasks. ``chores``: called every round by the active sweeper."""
        self._chores = chores
        self._queue, self._hints = queue, hints
        self.retention = retention  # may be changed while the sweeper runs
        self._clock = clock
        self._leases = SqlLeases()
        self._lease: Lease | None = None
        self._purged_at = clock()
        self._measure_at = clock()
        self._events_after = 0
        self._clock_offset: float | None = (
            None  # the database clock minus our monotonic clock, which cannot be adjusted
        )
        self._waiting_since: float | None = None  # start of the first round that the database has not answered yet
        self._leases_doubted_at: float | None = None  # when leases became unreliable and could not be restarted yet

    def run(self, stop: threading.Event) -> None:
        """Run rounds until ``stop`` is set. A failed round is logged and retried with backoff."""
        failures, delay = 0, 0.0
        while not stop.wait(delay):
            try:
                delay, failures = self.tick(), 0
            except Exception as error:  # noqa: BLE001 - if the sweeper exited, it would go unnoticed until tasks are lost
                failures += 1
                delay = _AWAY.delay(failures)
                log.warning("a round of the sweeper failed; retrying", attempt=failures, error=describe(error).text)
        self.release()

    def tick(self) -> float:
        """Run one round if this sweeper is active; return the seconds until the next."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        if not self._acquire():
            self._observe()
            return INTERVAL
        ended, restarted = self._end_lapsed()
        if self._hints is not None:
            self._hints.show_ended(ended)
        promoted = self._run(lambda tx: claim.promote(tx, tx.now()), "queue.promote")
        hinted = self._hint()
        restarted = restarted or self._leases_doubted_at is not None
        self._run(lambda tx: workers.mark_lost(tx, restarted=restarted), "queue.workers")
        for chore in self._chores:
            chore()
        if self._clock() - self._purged_at > 60.0:
            if self.purge(pages=_PAGES) < _PAGES * _BATCH and not self._events_after:
                self._purged_at = self._clock()  # otherwise purging continues next round, so other work is not delayed
            if self._hints is not None:
                self._hints.remove_dead_workers()
        if self._clock() >= self._measure_at:
            began = self._clock()
            self._measure()
            # Counting a million waiting tasks is slow: spend at most a twentieth of the time on it.
            self._measure_at = self._clock() + 20 * (self._clock() - began)
        more = len(ended) == _BATCH or hinted == _BATCH or promoted >= claim.PROMOTED
        return 0.0 if more else INTERVAL

    def _run(self, work: Callable[[Tx], T], operation: str) -> T:
        with self._noting_silence():
            return self._queue.database.run(work, operation=operation)

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """Note a database that stops answering in the middle of a round, for the next round.

        Workers could not renew their leases meanwhile. This wraps one query at a time, because many slow queries in a row
        do not mean that the database stopped answering.
        """
        began = self._clock()
        try:
            yield
        finally:
            if self._clock() - began > SILENCE:
                self._leases_doubted_at = self._clock()

    def _end_lapsed(self) -> tuple[list[Task], bool]:
        """End the runs of dead workers; return (their tasks, whether leases were restarted).

        Leases are restarted if they are unreliable (`_check_clock`). Otherwise every task on other machines would be considered
        dead at once. Leases that end too late, because the clock was set back earlier, are shortened.
        """

        def work(tx: Tx) -> tuple[float, str, list[Task]]:
            ahead, doubt = self._check_clock(tx)
            if (
                not doubt
                and self._leases_doubted_at is not None
                and self._clock() - self._leases_doubted_at < claim.LEASE
            ):
                doubt = "they were unreliable a moment ago"
            if doubt:
                claim.restart_leases(tx)
            shorten(tx, "tasks", "status = 'RUNNING'", least=claim.LEASE)
            return ahead, doubt, complete.lapsed(tx, limit=_BATCH)

        self._clock_offset, doubt, ended = self._queue.database.run(work, operation="queue.sweep")
        self._waiting_since = self._leases_doubted_at = None
        if doubt:
            log.warning(f"the leases of all running tasks are restarted: {doubt}")
        for task in ended:
            log.warning("the worker of a task is lost", taskID=task.id, worker=task.worker, new=task.status.value)
        return ended, bool(doubt)

    def _observe(self) -> None:
        """Check the clock and the database like the active sweeper does.

        This sweeper may be the next active one if the other's lease expired because of a clock change or an outage.
        """
        with self._queue.database.read() as tx:
            self._clock_offset, doubt = self._check_clock(tx)
        self._waiting_since = None
        if doubt:
            self._leases_doubted_at = self._clock()

    def _check_clock(self, tx: Tx) -> tuple[float, str]:
        """Return (database clock minus ours, why leases are unreliable or "").

        A live worker's lease can seem expired after the clock was adjusted, or after the database stopped answering.
        """
        before = self._clock()
        at = tx.now()
        # A slow answer is not a clock change: the offset is known only to within the duration of the query.
        least, most = at - self._clock(), at - before
        doubt = ""
        if self._clock_offset is not None and not least - CLOCK_SET < self._clock_offset < most + CLOCK_SET:
            doubt = "the database clock was adjusted"
        elif self._waiting_since is not None and self._clock() - self._waiting_since > SILENCE:
            doubt = "the database did not answer for a long time"
        return (least + most) / 2, doubt

    def release(self) -> None:
        """Release the sweeper's lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._queue.database.run(lambda tx: self._leases.release(tx, lease), operation="queue.sweeper")
            except HeadwayError as error:  # the lease expires by itself
                log.warning("the sweeper's lease could not be released", error=str(error))

    def purge(self, *, pages: int | None = None) -> int:
        """Delete expired tasks in batches, and their events once every sink has them; return the number of tasks.

        ``pages``: maximum batches of each to delete; None for all.
        """
        gone = 0
        for _ in count() if pages is None else range(pages):
            found = self._run(
                lambda tx: administration.delete_ended(tx, retention=self.retention, limit=_BATCH), "queue.purge"
            )
            gone += found
            if found < _BATCH:
                break
        self._purge_events(pages)
        self._run(administration.add_up_minutes, "queue.totals")
        retention = max(self.retention, COUNTS_RETENTION)
        self._run(lambda tx: administration.delete_counts(tx, retention=retention), "queue.purge")
        return gone

    def _purge_events(self, pages: int | None) -> None:
        """Continue from the last position. At the end start over, because sinks may have received more events since."""
        for _ in count() if pages is None else range(pages):
            reached = self._run(
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
            self._lease = None  # another sweeper took over, or the database was restored from an older backup
            return False
        log.info("this is the active sweeper")
        return True

    def _hint(self) -> int:
        """Send hints for tasks that never had one and for those whose hint was lost; return how many."""
        if self._hints is None:
            return 0
        hints = self._hints
        full = hints.check_memory()
        # This also runs while Redis is full: an evicting Redis may have lost hints, and marking their rows as unhinted
        # lets workers find them.
        old = self._run(lambda tx: hint_marks.doubtful(tx, older_than=HINT_SECONDS, limit=_BATCH), "queue.doubtful")
        missing = hints.missing(old) if old else []
        if missing is None:
            return 0
        if old:
            lost = {task_id for task_id, _ in missing}
            present = [task_id for task_id, _ in old if task_id not in lost]
            self._run(lambda tx: hint_marks.hinted(tx, present), "queue.hinted")  # checked again in a later round
            self._run(lambda tx: hint_marks.unhint(tx, lost), "queue.unhint")
        if full:
            return 0
        waiting = self._run(lambda tx: hint_marks.unhinted(tx, limit=_BATCH), "queue.unhinted")
        done = hints.push(waiting)
        if done:
            self._run(lambda tx: hint_marks.hinted(tx, done), "queue.hinted")
        return len(done)

    def _measure(self) -> None:
        with self._noting_silence():
            found = self._queue.stats()
        for info in found:
            metrics.gauge("headway_tasks_waiting", info.waiting, queue=info.priority.value)
            metrics.gauge("headway_tasks_running", info.running, queue=info.priority.value)
            metrics.gauge("headway_tasks_oldest_seconds", info.oldest_wait or 0.0, queue=info.priority.value)
