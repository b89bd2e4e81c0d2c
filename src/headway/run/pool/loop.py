"""The parent of a run: it owns the ledger, hands out items and commits outcomes in groups.

`Pool.run` is a single-threaded loop, so it needs no locks and can safely fork a replacement worker. If the whole run
is killed, the ledger alone determines what is left to do. Subclasses run the items: `headway.run.pool.local` in worker
processes, `headway.run.pool.executor` in the user's executor.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headway.core.lifecycle import STANDSTILL_SECONDS, Budget, Shutdown
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError
from headway.ledger import Done, Failed, Failure, Hold, Item, Job, Ledger, Outcome, Recorded
from headway.ledger.control import Control
from headway.ledger.fleet.claims import DAMAGED
from headway.ledger.values import FailedOutcome
from headway.run.display.display import Display, RunSnapshot
from headway.run.function import FORK, Start
from headway.run.output.console import Console
from headway.run.output.files import CsvOutput, Output
from headway.run.output.results import Keep
from headway.run.pool.backlog import Backlog, MakeBacklog
from headway.run.program import TIMED_OUT

#: Target duration of a batch. Short items share a round trip, long ones travel alone.
BATCH_SECONDS = 0.05
BATCH_MOST = 1000
BATCH_BYTES = 2**20
#: An item that runs this long is noted as running in the ledger. Others can see it, and a killed run leaves a trace.
NOTE_SECONDS = 1.0
#: Chores run ten times a second. After a gap this long, the process was certainly suspended: no commit takes that
#: long. After `STANDSTILL_SECONDS` it may have been, and the running items with it.
STOPPED_SECONDS = 20.0
#: Interval for polling the ledger for control requests, seconds.
ASKED_SECONDS = 0.3
#: Minimum pause between two commits, so that outcomes accumulate.
COMMIT_PAUSE = 0.02
COMMIT_MOST = 4000
#: Seconds that running items get after SIGTERM (not Ctrl-C) before they are abandoned.
TERM_SECONDS = 4.0


class Feed(Protocol):
    """Items that arrive during the run, for example on stdin."""

    @property
    def ended(self) -> bool: ...

    def fileno(self) -> int: ...

    def take(self) -> int:
        """Register the items that have arrived; return how many are new."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run."""

    workers: int
    mode: str = "process"
    policy: RetryPolicy = field(default_factory=lambda: RetryPolicy(2, 1.0, jitter=0.5, cap=300.0))
    timeout: float | None = None
    rate: float | None = None
    max_failures: int | None = None
    last_pass: bool = True
    start: Start = FORK
    #: Minimum interval between the starts of two commits, seconds.
    commit_seconds: float = COMMIT_PAUSE
    #: The ``--database`` option for suggested commands, if the database is not the configured one.
    database_option: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    outcome: str  # finished, interrupted, stopped (by max_failures)
    done: int
    kept: int
    dead: int
    died: int
    failures: int
    rescued: int
    completed: bool
    seconds: float


class Pool(ABC):
    """The loop of a run. Subclasses provide the processes that run items."""

    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        hold: Hold,
        settings: Settings,
        *,
        display: Display,
        shutdown: Shutdown,
        output: Output | CsvOutput | None = None,
        keep: Keep,
        feed: Feed | None = None,
        backlog: MakeBacklog = Backlog,
    ) -> None:
        self._ledger, self._job, self._hold, self._settings = ledger, job, hold, settings
        self._display, self._shutdown, self._output, self._feed = display, shutdown, output, feed
        #: Captures output on the terminal of the bar, if a subclass needs that.
        self._console: Console | None = None
        self._selector = selectors.DefaultSelector()
        self._backlog = backlog(job, self._count_damaged)
        self._keep = keep
        self._unkept = 0
        self._asked = Control()
        self._look_at = 0.0
        self._chores_at = time.monotonic()
        #: (end, length) of recent standstills, when a wait returned too late. `_gap` is the last long gap between
        #: chores. That may have been a slow database, so only one is remembered.
        self._standstills: deque[tuple[float, float]] = deque(maxlen=100)
        self._gap = (0.0, 0.0)
        self._inbox: list[Outcome] = []
        self._unrecorded_failures = 0
        self._noted: set[int] = set()
        self._item_seconds: float | None = None
        self._allowance = 0.0
        self._allowance_at = time.monotonic()
        self._passing = False  # whether the final pass over dead letters is running
        self._stop_reason: str | None = None
        info = job.info()
        self._total, self._kept, self._dead, self._failed = info.total, info.done, info.dead, info.failed
        self._done = self._died = self._failures = self._rescued = 0
        self._completed = False
        self._errors: Counter[str] = Counter()
        self._last_error = ""

    # ---- implemented by subclasses ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _busy(self) -> int:
        """Number of items running now."""

    @property
    @abstractmethod
    def _idle(self) -> bool:
        """Whether no item is out."""

    @abstractmethod
    def _hand_out(self, now: float) -> None:
        """Give ready items and suspects to workers that have room."""

    @abstractmethod
    def _attend(self, source: Any, events: int) -> None:
        """Handle an event of ``source``, as registered with the selector."""

    @abstractmethod
    def _look_after(self, now: float) -> Iterable[tuple[int, str, float]]:
        """Check for dead workers and overdue items, ten times a second.

        Return (idx, worker, start) of every running item.
        """

    @abstractmethod
    def _recall(self) -> None:
        """Ask workers to return all items they have not begun."""

    @abstractmethod
    def _resize(self, size: int) -> None:
        """Change the number of items that run at once to ``size``."""

    @abstractmethod
    def _abandon(self) -> None:
        """Give up the running items. They count as not begun, without an attempt."""

    @abstractmethod
    def _close(self) -> None:
        """Release all resources, however the run ended."""

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> Ending:
        """Run the job to its end and return how it ended."""
        began = time.monotonic()
        wake_in, wake_out = socket.socketpair()
        wake_in.setblocking(False)
        wake_out.setblocking(False)
        self._shutdown.on_request(lambda: _wake(wake_in))
        self._selector.register(wake_out, selectors.EVENT_READ, None)
        if self._feed is not None and not self._feed.ended:
            self._selector.register(self._feed.fileno(), selectors.EVENT_READ, "feed")
        if self._console is not None:
            self._selector.register(self._console, selectors.EVENT_READ, "console")
        try:
            while True:
                self._loop(wake_out)
                self._commit()
                if self._output is not None:
                    self._output.write()
                self._job.give_back(sorted(self._noted), self._hold)
                if self._stop_reason is not None:
                    self._reconcile()
                    break
                self._completed = self._job.finish(self._hold)
                # Dead letters retried after `finish` belong to the next run. `look_again` may give up a damaged item
                # that was the last open one; then `finish` must run again.
                failures = self._failures
                more = self._backlog.look_again(time.monotonic())
                self._reconcile()
                if not more and self._failures == failures:
                    break
                self._passing = False
        finally:
            self._close()
            for line in self._console.close() if self._console is not None else ():
                self._display.say(line)
            self._selector.close()
            wake_in.close()
            wake_out.close()
            self._display.end(self._snapshot())
        if self._unkept:
            self._display.say(
                f"The results of {items_of(self._unkept)} were not kept: they are not JSON, or longer than a megabyte."
            )
        return Ending(
            outcome=self._stop_reason or "finished",
            done=self._done,
            kept=self._kept,
            dead=self._dead,
            died=self._died,
            failures=self._failures,
            rescued=self._rescued,
            completed=self._completed,
            seconds=time.monotonic() - began,
        )

    def _loop(self, wake: socket.socket) -> None:
        chores_at = commit_at = time.monotonic()
        renew_at = chores_at + self._hold.lease / 3
        grace: Budget | None = None
        while True:
            now = time.monotonic()
            if self._shutdown.stop.is_set() and grace is None:
                grace = self._begin_stop()
            if grace is not None and (self._shutdown.abandon.is_set() or grace.spent):
                self._abandon()
                self._commit()
                return
            if self._inbox and (now >= commit_at or self._is_urgent()):
                self._commit()
                commit_at = max(time.monotonic() + COMMIT_PAUSE, now + self._settings.commit_seconds)
            if self._stop_reason is None:
                self._backlog.refill(now)
            if self._stop_reason is None:
                if self._may_hand_out():
                    self._hand_out(now)
                if self._is_through():
                    return
            elif self._idle:
                return
            if now >= chores_at:
                chores_at = now + 0.1
                self._chores(now)
            if now >= renew_at:
                renew_at = now + self._hold.lease / 3
                self._ledger.renew(self._hold, self._noted)
            self._listen(wake, self._patience(now, commit_at if self._inbox else None))

    def _is_urgent(self) -> bool:
        """Return whether outcomes must be committed at once.

        - The inbox is full, or no other item is held here.
        - No further failure is allowed until these are recorded.
        - An outcome belongs to an item noted as running, which would be charged if this process were killed.
        """
        return (
            len(self._inbox) >= COMMIT_MOST
            or len(self._inbox) >= len(self._backlog.held)
            or self._failures_left() == 0
            or (bool(self._noted) and any(outcome.idx in self._noted for outcome in self._inbox))
        )

    def _patience(self, now: float, commit_at: float | None) -> float:
        """Return how many seconds the loop may wait for events."""
        until = now + 0.1
        if commit_at is not None:
            until = min(until, commit_at)
        if self._backlog.next_due is not None and not self._backlog.ready:
            until = min(until, self._backlog.next_due)
        if self._settings.rate and self._backlog.ready:
            until = min(until, now + 1 / self._settings.rate)
        return max(0.0, until - now)

    def _listen(self, wake: socket.socket, patience: float) -> None:
        began = time.monotonic()
        news = self._selector.select(patience)
        now = time.monotonic()
        if (late := now - began - patience) > STANDSTILL_SECONDS:
            self._standstills.append((now, late))
        for key, events in news:
            if key.data is None:
                wake.recv(4096)
            elif key.data == "feed":
                self._take_feed()
            elif key.data == "console":
                self._relay_console()
            else:
                self._attend(key.data, events)

    def _take_feed(self) -> None:
        assert self._feed is not None
        self._total += self._feed.take()
        self._backlog.more_arrived()
        if self._feed.ended:
            self._selector.unregister(self._feed.fileno())

    def _relay_console(self) -> None:
        assert self._console is not None
        for line in self._console.lines():
            self._display.say(line)

    def _is_through(self) -> bool:
        """Return whether nothing is left to do, including the final pass over dead letters."""
        if not self._backlog.empty or self._inbox or self._feed_is_open():
            return False
        if not self._settings.last_pass:
            return True
        self._passing = True  # set first: items found damaged in this pass were dead already
        return not self._backlog.take_last_pass()

    def _feed_is_open(self) -> bool:
        return self._feed is not None and not self._feed.ended

    # ---- how much may be handed out --------------------------------------------------------------------------------

    def _may_hand_out(self) -> bool:
        if self._asked.paused or not (self._backlog.ready or self._backlog.suspects or self._backlog.slot_suspects):
            return False
        # If unrecorded failures could reach the limit, commit them first.
        return self._failures_left() != 0

    def _failures_left(self) -> int | None:
        """Return how many items may still die before ``max_failures`` ends the run.

        Unrecorded failures count as deaths. None means no limit.
        """
        most = self._settings.max_failures
        if most is None or self._passing:
            return None
        return max(0, most - self._died - self._unrecorded_failures)

    def _allowed(self, count: int, now: float) -> int:
        """Return how many of ``count`` items the rate limit allows now."""
        rate = self._settings.rate
        if rate is None:
            return count
        # Save up at most a tenth of a second's worth, so that a pause does not allow a burst.
        self._allowance = min(max(1.0, rate / 10), self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        count = min(count, int(self._allowance))
        self._allowance -= count
        return count

    def _batch_size(self) -> int:
        if self._item_seconds is None or self._item_seconds > BATCH_SECONDS / 2:
            return 1
        return max(1, min(BATCH_MOST, int(BATCH_SECONDS / max(self._item_seconds, 1e-5))))

    # ---- outcomes -------------------------------------------------------------------------------------------------

    def _take_outcomes(self, out: dict[int, Item], frame: Any, name: str, printed: dict[int, str]) -> None:
        """Take the outcomes that worker ``name`` reports.

        Items not in ``out`` are ignored: they no longer belong to this worker.
        """
        seconds = 0.0
        for idx, took, result in frame["done"]:
            if out.pop(idx, None) is not None:
                unkept = result is False or not self._keep.results
                self._unkept += result is False
                self._inbox.append(Done(idx, None, result or None, took, name, None, unkept, printed.pop(idx, None)))
                seconds += took
        for idx, attempts, took, kind, message, where, detail, retryable, said in frame["failed"]:
            if out.pop(idx, None) is not None:
                how: FailedOutcome = "timeout" if kind == TIMED_OUT else "failed"
                failure = Failure(kind, message, where, detail)
                self._fail(idx, attempts, failure, how, took, name, retryable=retryable, printed=said)
                seconds += took
        count = len(frame["done"]) + len(frame["failed"])
        if count:
            average, known = seconds / count, self._item_seconds
            self._item_seconds = average if known is None else 0.7 * known + 0.3 * average

    def _fail(
        self,
        idx: int,
        attempts: int,
        failure: Failure,
        outcome: FailedOutcome,
        seconds: float | None,
        name: str,
        *,
        retryable: bool = True,
        printed: str | None = None,
    ) -> None:
        self._errors[failure.type] += 1
        self._last_error = failure.type
        self._unrecorded_failures += 1
        self._inbox.append(
            Failed(idx, failure, outcome, None, seconds, name, seen=attempts, retryable=retryable, printed=printed)
        )

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def _chores(self, now: float) -> None:
        before, self._chores_at = self._chores_at, now
        passed = now - before
        if passed > STANDSTILL_SECONDS and not (self._standstills and self._standstills[-1][0] > before):
            self._gap = (now, passed)
        if now >= self._look_at:
            self._look_at = now + ASKED_SECONDS
            self._obey(self._job.asked(self._hold.run))
        to_note = [
            (idx, name)
            for idx, name, began in self._look_after(now)
            if now - began > NOTE_SECONDS and idx not in self._noted
        ]
        if to_note:
            self._note(to_note)
        if self._output is not None:
            self._output.write_sometimes()
        self._display.show(replace(self._snapshot(), stopped=passed > STOPPED_SECONDS))

    def _note(self, items: list[tuple[int, str]]) -> None:
        """Record (idx, worker) pairs as running.

        If this process is killed, each of these items is charged an attempt.
        """
        self._noted.update(idx for idx, _ in items)
        self._job.note_running(self._hold, items)

    # ---- control requests ------------------------------------------------------------------------------------------

    def _obey(self, asked: Control) -> None:
        before, self._asked = self._asked, asked
        if asked.version == before.version:
            return
        if asked.stopping and not self._shutdown.stop.is_set():
            self._shutdown.request(signal.SIGTERM)
        if asked.stopping == 2:
            self._shutdown.abandon.set()
        if asked.workers is not None and asked.workers != before.workers:
            self._display.say(f"{asked.actor} asks for {items_of(asked.workers)} at once.")
            self._resize(asked.workers)
        if asked.paused and not before.paused:
            resume = f"headway resume {self._job.id} {self._settings.database_option}".rstrip()
            self._display.say(f"Paused by {asked.actor}: finishing {items_of(self._busy)}. Go on:  {resume}")
            self._recall()
        elif before.paused and not asked.paused:
            self._display.say(f"Resumed by {asked.actor}.")

    # ---- recording -------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        if not self._inbox:
            return
        outcomes, self._inbox, self._unrecorded_failures = self._inbox, [], 0
        recorded = self._job.record(outcomes, hold=self._hold, policy=self._settings.policy, settle=False)
        for outcome in outcomes:
            self._backlog.settled(outcome.idx)
            self._noted.discard(outcome.idx)
        self._count(recorded)

    def _count_damaged(self, recorded: Recorded) -> None:
        """Count damaged items, which the ledger gave up itself. No worker reports them."""
        self._errors[DAMAGED.type] += recorded.dead
        self._last_error = DAMAGED.type
        self._count(recorded)

    def _count(self, recorded: Recorded) -> None:
        self._done += recorded.done
        self._failures += recorded.failed + recorded.dead
        self._failed, self._dead = recorded.waiting, recorded.given_up
        if self._passing:
            self._rescued += recorded.done
        else:
            self._died += recorded.dead
        if recorded.due:
            left = min(recorded.due.values()) - self._ledger.database.now()
            self._backlog.due_at(time.monotonic() + left)
        most = self._settings.max_failures
        if most is not None and self._died >= most and self._stop_reason is None:
            self._stop_reason = "stopped"
            self._recall_all()

    def _reconcile(self) -> None:
        """Replace the counts in memory with those of the ledger.

        They differ if the database went back in time during the run: it was restored, or failed over to a lagging
        replica.
        """
        info = self._backlog.info()
        if info is None:
            return
        if lost := max(0, self._kept + self._done - info.done):
            self._display.say(
                f"The ledger no longer has the records of {items_of(lost)}: the database was restored to an earlier moment."
                + (" Running them again." if self._stop_reason is None else "")
            )
        self._kept = min(self._kept, info.done)
        self._done, self._failed, self._dead = info.done - self._kept, info.failed, info.dead
        if self._stop_reason is None and (info.total < self._total or not info.sealed):
            raise HeadwayError(
                f"The database was restored to a moment at which only {items_of(info.total)} of job {self._job.id} were "
                "registered.",
                hint="Run the same command again: it registers the missing items and runs them.",
            )

    def _snapshot(self) -> RunSnapshot:
        return RunSnapshot(
            total=None if self._feed_is_open() else self._total,
            kept=self._kept,
            done=self._done,
            running=self._busy,
            retrying=self._failed,
            dead=self._dead,
            failures=self._failures,
            last_error=self._last_error,
            last_error_count=self._errors[self._last_error],
            paused_by=self._asked.actor if self._asked.paused else "",
        )

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> Budget:
        self._stop_reason = "interrupted"
        busy = self._busy
        self._recall_all()
        if self._asked.stopping:
            self._display.say(f"Stopping, as {self._asked.actor} asked: finishing {items_of(busy)} ...")
            return Budget(10**9)
        if self._shutdown.signum == signal.SIGINT:
            self._display.say(f"Stopping: finishing {items_of(busy)} (Ctrl-C again to abandon them) ...")
            return Budget(10**9)
        self._display.say(f"Stopping: finishing {items_of(busy)} for up to {TERM_SECONDS:g} s ...")
        return Budget(TERM_SECONDS)

    def _recall_all(self) -> None:
        self._backlog.release()
        self._recall()


def _wake(wake: socket.socket) -> None:
    with suppress(OSError):  # full: the loop is already awake
        wake.send(b"!")


def items_of(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"
