"""The parent of a run: one process that owns the ledger, hands items to workers and commits what they report in groups.

`Pool.run` is a single-threaded loop, so nothing here needs a lock and forking a replacement worker is safe. If all of
it is killed, the ledger alone says what is left to do.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.errors import HeadwayError
from headway.ledger import Done, Failed, Failure, Hold, Item, Job, Ledger, Outcome, Recorded
from headway.ledger.control import Control
from headway.ledger.job import DAMAGED
from headway.ledger.values import FailedOutcome
from headway.lifecycle import Budget, Shutdown
from headway.retry import RetryPolicy
from headway.run.backlog import Backlog
from headway.run.console import Console
from headway.run.crew import Crew, WorkerHandle
from headway.run.display import Display, RunSnapshot
from headway.run.output import CsvOutput, Output
from headway.run.program import TERM_SECONDS as PROGRAM_TERM_SECONDS
from headway.run.program import TIMED_OUT, Program, Work
from headway.run.results import Keep
from headway.telemetry import Log, metrics

log = Log("run")

#: A batch is meant to keep a worker busy for about this long: short items share a round trip, long ones travel alone.
BATCH_SECONDS = 0.05
BATCH_MOST = 1000
BATCH_BYTES = 2**20
#: A worker that is busy with one item for this long gives the others it holds back.
RECALL_SECONDS = 0.5
#: An item that runs this long is written down as running, so that others see it and a killed run leaves a trace.
NOTE_SECONDS = 1.0
#: How often a run looks whether somebody asks something of it from elsewhere.
ASKED_SECONDS = 0.3
COMMIT_SECONDS = 0.02
COMMIT_MOST = 4000
#: After SIGTERM (not Ctrl-C) items in progress get this long before they are abandoned.
TERM_SECONDS = 4.0
#: Workers that die one after the other without having begun an item.
STILLBORN_MOST = 5


class Feed(Protocol):
    """Items that keep arriving while the run goes on (a pipe on stdin)."""

    @property
    def ended(self) -> bool: ...

    def fileno(self) -> int: ...

    def take(self) -> int:
        """Register what has arrived; how many items were new."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is to be done."""

    workers: int
    mode: str = "process"
    policy: RetryPolicy = field(default_factory=lambda: RetryPolicy(2, 1.0, jitter=0.5, cap=300.0))
    timeout: float | None = None
    rate: float | None = None
    max_failures: int | None = None
    last_pass: bool = True


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


class Pool:
    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        hold: Hold,
        function: Work,
        settings: Settings,
        *,
        display: Display,
        shutdown: Shutdown,
        output: Output | CsvOutput | None = None,
        keep: Keep,
        feed: Feed | None = None,
        backlog: Callable[[Job, Callable[[Recorded], object]], Backlog] = Backlog,
    ) -> None:
        self._ledger, self._job, self._hold, self._settings = ledger, job, hold, settings
        self._display, self._shutdown, self._output, self._feed = display, shutdown, output, feed
        self._console = Console() if display.live and Console.is_needed() else None
        self._selector = selectors.DefaultSelector()
        self._backlog = backlog(job, self._count_damaged)
        self._crew = Crew(
            self._selector, function,
            mode=settings.mode, size=settings.workers, mark=hold.mark, timeout=settings.timeout,
            keep=keep, console=self._console,
        )  # fmt: skip
        # Who sees to the time of each item itself is ended from here only if it does not come to that.
        self._slack = 2.0 if settings.mode == "async" else 0.0
        if isinstance(function, Program):
            self._slack = PROGRAM_TERM_SECONDS + 5.0
        self._keep = keep
        self._unkept = 0
        self._asked = Control()
        self._look_at = 0.0
        self._inbox: list[Outcome] = []
        self._unrecorded_failures = 0
        self._noted: set[int] = set()
        self._stillborn = 0
        self._item_seconds: float | None = None
        self._allowance = 0.0
        self._allowance_at = time.monotonic()
        self._passing = False  # the pass over dead letters at the end
        self._stop_reason: str | None = None
        info = job.info()
        self._total, self._kept, self._dead, self._failed = info.total, info.done, info.dead, info.failed
        self._done = self._died = self._failures = self._rescued = 0
        self._completed = False
        self._errors: Counter[str] = Counter()
        self._last_error = ""

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> Ending:
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
            self._loop(wake_out)
            self._commit()
            if self._output is not None:
                self._output.write()
            self._job.give_back(sorted(self._noted), self._hold)
            if self._stop_reason is None:
                self._completed = self._job.finish(self._hold)
        finally:
            self._crew.close()
            for line in self._console.close() if self._console is not None else ():
                self._display.say(line)
            self._selector.close()
            wake_in.close()
            wake_out.close()
            self._display.end(self._snapshot())
        if self._unkept:
            self._display.say(
                f"The results of {_items(self._unkept)} were not kept: they are not JSON, or longer than a megabyte."
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
                return
            if self._inbox and (now >= commit_at or len(self._inbox) >= COMMIT_MOST or self._failures_left() == 0):
                self._commit()
                commit_at = time.monotonic() + COMMIT_SECONDS
            if self._stop_reason is None:
                self._backlog.refill(now)
            if self._stop_reason is None:
                self._dispatch(now)
                if self._is_through():
                    return
            elif self._crew.idle:
                return
            if now >= chores_at:
                chores_at = now + 0.1
                self._chores(now)
            if now >= renew_at:
                renew_at = now + self._hold.lease / 3
                self._ledger.renew(self._hold)
            self._listen(wake, self._patience(now, commit_at if self._inbox else None))

    def _patience(self, now: float, commit_at: float | None) -> float:
        """How long there is nothing to do but wait for news."""
        until = now + 0.1
        if commit_at is not None:
            until = min(until, commit_at)
        if self._backlog.next_due is not None and not self._backlog.ready:
            until = min(until, self._backlog.next_due)
        if self._settings.rate and self._backlog.ready:
            until = min(until, now + 1 / self._settings.rate)
        return max(0.0, until - now)

    def _listen(self, wake: socket.socket, patience: float) -> None:
        for key, events in self._selector.select(patience):
            if key.data is None:
                wake.recv(4096)
            elif key.data == "feed":
                self._take_feed()
            elif key.data == "console":
                self._relay_console()
            else:
                self._attend(key.data, events)

    def _attend(self, worker: WorkerHandle, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with suppress(OSError):  # the end of its stream says the rest
                worker.wire.push()
            self._crew.watch(worker)
        if events & selectors.EVENT_READ:
            alive = worker.wire.receive()
            for frame in worker.wire.frames():
                self._take(worker, frame)
            if not alive:
                self._worker_ended(worker)

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
        """Whether nothing is left to do: the last thing is the pass over dead letters."""
        if not self._backlog.empty or self._inbox or self._feed_is_open():
            return False
        if not self._settings.last_pass:
            return True
        self._passing = True  # before the first is taken: what is found to be damaged then was dead already
        return not self._backlog.take_last_pass()

    def _feed_is_open(self) -> bool:
        return self._feed is not None and not self._feed.ended

    # ---- handing out -----------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        backlog = self._backlog
        if self._asked.paused:
            return
        if not backlog.suspects and not backlog.ready:
            return
        if self._failures_left() == 0:
            return  # as many failures wait to be recorded as there may be deaths: first see how many are
        if backlog.suspects:
            examiner = self._crew.examiner()
            if not examiner.out:
                self._crew.give(examiner, [backlog.suspects.popleft()])
        if not backlog.ready:
            return
        batch = self._batch_size()
        # Those with least to do first, so that the last items of a job are spread over all of them.
        for worker in sorted(self._crew.common(len(backlog.held)), key=lambda each: len(each.out)):
            if worker.stopping or worker.wire.pending:
                continue
            slots = worker.slots.count
            room = slots * (2 * batch if batch > 1 else 1) - len(worker.out)
            if room >= slots * batch / 2:
                fair = -(-len(backlog.ready) // self._crew.processes)
                count = self._allowed(min(room, slots * batch, max(slots, fair), len(backlog.ready)), now)
                self._give(worker, count)
            if not backlog.ready:
                return

    def _give(self, worker: WorkerHandle, count: int) -> None:
        """Send up to ``count`` items, fewer if they are large."""
        items: list[Item] = []
        size = 0
        while len(items) < count and size < BATCH_BYTES:
            items.append(self._backlog.ready.popleft())
            size += len(items[-1].payload or "")
        if items:
            self._crew.give(worker, items, may_fail=self._may_fail(worker))

    def _failures_left(self) -> int | None:
        """How many items may still die before ``max_failures`` ends the run, if every failure that is not recorded yet
        were a death; None without a limit."""
        most = self._settings.max_failures
        if most is None or self._passing:
            return None
        return max(0, most - self._died - self._unrecorded_failures)

    def _may_fail(self, worker: WorkerHandle) -> int | None:
        """This worker's share of what may still fail: after that it gives back what it has not begun. Shares never add
        up to more than is left, except that each worker may always run one item per slot."""
        left = self._failures_left()
        if left is None:
            return None
        others = [each for each in self._crew if each is not worker]
        idle = sum(1 for each in others if not each.out)
        return max(1, (left - sum(each.may_fail for each in others)) // (idle + 1))

    def _allowed(self, count: int, now: float) -> int:
        """At most ``count``, fewer if the rate says so."""
        rate = self._settings.rate
        if rate is None:
            return count
        # At most a tenth of a second's worth is saved up: a pause does not allow a burst.
        self._allowance = min(max(1.0, rate / 10), self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        count = min(count, int(self._allowance))
        self._allowance -= count
        return count

    def _batch_size(self) -> int:
        if self._item_seconds is None or self._item_seconds > BATCH_SECONDS / 2:
            return 1
        return max(1, min(BATCH_MOST, int(BATCH_SECONDS / max(self._item_seconds, 1e-5))))

    # ---- what workers say ------------------------------------------------------------------------------------------

    def _take(self, worker: WorkerHandle, frame: Any) -> None:
        if "back" in frame:
            worker.recalled = False
            self._backlog.put_back(worker.out.pop(idx) for idx in frame["back"] if idx in worker.out)
            if self._stop_reason is not None:
                self._backlog.release()
            return
        if "alone" in frame:
            self._backlog.suspects.extend(worker.out.pop(idx) for idx in frame["alone"] if idx in worker.out)
            if self._stop_reason is not None:
                self._backlog.release()
            return
        worker.reported, self._stillborn = True, 0
        worker.failures += len(frame["failed"])
        name, seconds = worker.name, 0.0
        worker.printed.update(frame["printed"])
        for idx, took, result in frame["done"]:
            if worker.out.pop(idx, None) is not None:
                unkept = result is False or not self._keep.results
                self._unkept += result is False
                self._inbox.append(
                    Done(idx, None, result or None, took, name, None, unkept, worker.printed.pop(idx, None))
                )
                seconds += took
        for idx, attempts, took, kind, message, where, detail, retryable, said in frame["failed"]:
            if worker.out.pop(idx, None) is not None:
                how: FailedOutcome = "timeout" if kind == TIMED_OUT else "failed"
                self._fail(
                    idx,
                    attempts,
                    Failure(kind, message, where, detail),
                    how,
                    took,
                    name,
                    retryable=retryable,
                    printed=said,
                )
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

    def _worker_ended(self, worker: WorkerHandle) -> None:
        """A worker has ended: find out why, charge the item that killed it and nobody else."""
        how, cut_off = self._crew.remove(worker)
        running, begun = dict(worker.running()), worker.begun()
        worker.slots.close()
        if begun or not worker.stopping:
            log.warning("a worker died", worker=worker.name, reason=how, count=len(running))
            metrics.count("headway_worker_deaths")
        # What ran when it was cut off, or when it ended by itself between two items, need not be what did that.
        suspects = list(running) if running and not cut_off else begun
        if len(suspects) == 1:
            (idx,) = suspects
            item = worker.out.pop(idx)
            why = " (did the function close file descriptors that are not its own?)" if cut_off else ""
            failure = Failure("WorkerDied", f"the worker process {how} while it ran this item{why}")
            seconds = time.monotonic() - running[idx] if idx in running else None
            self._fail(idx, item.attempts, failure, "failed", seconds, worker.name)
        elif suspects:
            # One of several items is to blame: each runs again, alone, at no cost to the others.
            self._backlog.suspects.extend(worker.out.pop(idx) for idx in suspects)
        elif not worker.reported and not worker.stopping:
            self._stillborn += 1
            if self._stillborn >= STILLBORN_MOST:
                raise HeadwayError(
                    f"{self._stillborn} workers in a row {how} before they began an item.",
                    hint="Run the function once by hand in a fresh process to see why.",
                )
        self._backlog.put_back(worker.out.values())

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def _chores(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + ASKED_SECONDS
            self._obey(self._job.asked(self._hold.run))
        for worker in self._crew.dead():
            for frame in worker.last_frames():
                self._take(worker, frame)
            self._worker_ended(worker)
        to_note: list[tuple[int, str]] = []
        for worker in self._crew:
            running = worker.running()
            longest = max((now - began for _, began in running), default=0.0)
            if longest > RECALL_SECONDS and len(worker.out) > len(running):
                self._crew.recall(worker)
            self._end_overdue(worker, running, now)
            to_note += [
                (idx, worker.name) for idx, began in running if now - began > NOTE_SECONDS and idx not in self._noted
            ]
            if worker.alone and not worker.out and not self._backlog.suspects:
                self._crew.dismiss(worker)
        if to_note:
            self._noted.update(idx for idx, _ in to_note)
            self._job.note_running(self._hold, to_note)
        if self._output is not None:
            self._output.write_sometimes()
        self._display.show(self._snapshot())

    def _end_overdue(self, worker: WorkerHandle, running: list[tuple[int, float]], now: float) -> None:
        limit = self._settings.timeout
        if limit is None:
            return
        limit += self._slack
        overdue = [(idx, began) for idx, began in running if now - began > limit]
        if not overdue:
            return
        worker.kill()
        worker.stopping = True
        for frame in worker.last_frames():
            self._take(worker, frame)
        if self._settings.mode == "async" and len(running) > 1:
            # Its loop is blocked, by which item nobody can tell: each runs again, alone, at no cost to the others.
            self._backlog.suspects.extend(worker.out.pop(idx) for idx, _ in running if idx in worker.out)
            overdue = []
        for idx, began in overdue:
            item = worker.out.pop(idx, None)
            if item is not None:  # it did not report in the last moment
                failure = Failure(TIMED_OUT, f"no result within {self._settings.timeout:g} s")
                self._fail(idx, item.attempts, failure, "timeout", now - began, worker.name)
        # What else ran in that process did nothing wrong: it runs again and is charged nothing.
        self._backlog.put_back(worker.out.values())
        worker.out.clear()

    # ---- what is asked from elsewhere ------------------------------------------------------------------------------

    def _obey(self, asked: Control) -> None:
        before, self._asked = self._asked, asked
        if asked.version == before.version:
            return
        if asked.stopping and not self._shutdown.stop.is_set():
            self._shutdown.request(signal.SIGTERM)
        if asked.stopping == 2:
            self._shutdown.abandon.set()
        if asked.workers is not None and asked.workers != before.workers:
            self._display.say(f"{asked.actor} asks for {_items(asked.workers)} at once.")
            self._crew.resize(asked.workers)
        if asked.paused and not before.paused:
            self._display.say(
                f"Paused by {asked.actor}: finishing {_items(self._crew.busy)}. Go on:  headway resume {self._job.id}"
            )
            for worker in self._crew:
                self._crew.recall(worker)
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
        """The ledger gave items up instead of handing them out: no worker reports these."""
        self._errors[DAMAGED.type] += recorded.dead
        self._last_error = DAMAGED.type
        self._count(recorded)

    def _count(self, recorded: Recorded) -> None:
        self._done += recorded.done
        self._failures += recorded.failed + recorded.dead
        self._failed = recorded.waiting
        if self._passing:
            self._rescued += recorded.done
            self._dead -= recorded.done
        else:
            self._died += recorded.dead
            self._dead += recorded.dead
        if recorded.due:
            left = min(recorded.due.values()) - self._ledger.database.now()
            self._backlog.due_at(time.monotonic() + left)
        most = self._settings.max_failures
        if most is not None and self._died >= most and self._stop_reason is None:
            self._stop_reason = "stopped"
            self._recall_all()

    def _snapshot(self) -> RunSnapshot:
        return RunSnapshot(
            total=None if self._feed_is_open() else self._total,
            kept=self._kept,
            done=self._done,
            running=self._crew.busy,
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
        busy = self._crew.busy
        self._recall_all()
        if self._asked.stopping:
            self._display.say(f"Stopping, as {self._asked.actor} asked: finishing {_items(busy)} ...")
            return Budget(10**9)
        if self._shutdown.signum == signal.SIGINT:
            self._display.say(f"Stopping: finishing {_items(busy)} (Ctrl-C again to abandon them) ...")
            return Budget(10**9)
        self._display.say(f"Stopping: finishing {_items(busy)} for up to {TERM_SECONDS:g} s ...")
        return Budget(TERM_SECONDS)

    def _recall_all(self) -> None:
        self._backlog.release()
        for worker in self._crew:
            self._crew.recall(worker)

    def _abandon(self) -> None:
        """Kill what still runs. Its items are as if they had not been begun: no attempt is counted."""
        for worker in self._crew:
            worker.kill()
            for frame in worker.last_frames():
                self._take(worker, frame)
        self._commit()


def _wake(wake: socket.socket) -> None:
    with suppress(OSError):  # full: then it is awake already
        wake.send(b"!")


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"
