"""The parent of a run: one process that owns the ledger, hands items to workers and commits what they report in groups.

`Pool.run` is a single-threaded loop, so nothing here needs a lock and forking a replacement worker is safe. An item is
always in exactly one place: untouched or waiting in the ledger, ``ready`` here, or ``out`` with one worker. If all of
this is killed, the ledger alone says what is left to do.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.errors import HeadwayError
from headway.ledger import Done, Failed, Fault, Hold, Item, Job, Ledger, Outcome
from headway.ledger.values import Miss
from headway.lifecycle import Budget, Shutdown
from headway.retry import RetryPolicy
from headway.run import worker as worker_process
from headway.run.display import Display, Snapshot
from headway.run.output import Output
from headway.run.talk import Talk
from headway.run.wire import Slots, Wire
from headway.telemetry import Log, metrics

log = Log("run")

#: A batch is meant to keep a worker busy for about this long: short items share a round trip, long ones travel alone.
BATCH_SECONDS = 0.05
BATCH_MOST = 1000
#: A worker that is busy with one item for this long gives the others it holds back.
RECALL_SECONDS = 0.5
#: An item that runs this long is written down as running, so that others see it and a killed run leaves a trace.
NOTE_SECONDS = 1.0
COMMIT_SECONDS = 0.02
COMMIT_MOST = 4000
READ_AHEAD = 4000
#: After SIGTERM (not Ctrl-C) items in progress get this long before they are abandoned.
TERM_SECONDS = 4.0
#: Workers that die one after the other without having begun an item.
STILLBORN_MOST = 5

TIMED_OUT = "TimedOut"


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


class _Worker:
    """One worker process as its parent sees it."""

    def __init__(self, pid: int, wire: Wire, slots: Slots, name: str, *, alone: bool) -> None:
        self.pid, self.wire, self.slots, self.name = pid, wire, slots, name
        #: Runs suspects, one at a time, to find the item that kills its process.
        self.alone = alone
        self.out: dict[int, Item] = {}
        self.began = False
        self.recalled = False
        self.stopping = False

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Pool:
    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        hold: Hold,
        function: Callable[..., object],
        settings: Settings,
        *,
        display: Display,
        shutdown: Shutdown,
        output: Output | None = None,
        feed: Feed | None = None,
    ) -> None:
        self._ledger, self._job, self._hold = ledger, job, hold
        self._function, self._settings = function, settings
        self._display, self._shutdown, self._output, self._feed = display, shutdown, output, feed
        self._talk = Talk() if display.live and Talk.is_needed() else None
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._ready: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._held: set[int] = set()  # everything that is ready, suspect or out
        self._inbox: list[Outcome] = []
        self._noted: set[int] = set()
        self._cursor = -1
        self._untouched_left = True
        self._stillborn = 0
        self._names = 0
        self._item_seconds: float | None = None
        self._allowance = 0.0
        self._allowance_at = time.monotonic()
        self._next_due: float | None = 0.0  # monotonic; None: nothing waits for another try
        self._passing = False  # the pass over dead letters at the end
        self._stop_reason: str | None = None
        info = job.info()
        self._total, self._kept, self._dead, self._failed = info.total, info.done, info.dead, info.failed
        self._done = self._died = self._failures = self._rescued = 0
        self._completed = False
        self._causes: Counter[str] = Counter()

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> Ending:
        began = time.monotonic()
        wake_in, wake_out = socket.socketpair()
        wake_in.setblocking(False)
        wake_out.setblocking(False)
        self._shutdown.on_request(lambda: _poke(wake_in))
        self._selector.register(wake_out, selectors.EVENT_READ, None)
        if self._feed is not None and not self._feed.ended:
            self._selector.register(self._feed.fileno(), selectors.EVENT_READ, "feed")
        if self._talk is not None:
            self._selector.register(self._talk, selectors.EVENT_READ, "talk")
        try:
            self._loop(wake_out)
            self._commit()
            if self._output is not None:
                self._output.write()
            if self._stop_reason is None:
                self._completed = self._job.finish(self._hold) or self._completed
        finally:
            self._end_workers()
            for line in self._talk.close() if self._talk is not None else ():
                self._display.say(line)
            self._selector.close()
            wake_in.close()
            wake_out.close()
            self._display.end(self._snapshot())
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
            if self._inbox and (now >= commit_at or len(self._inbox) >= COMMIT_MOST):
                self._commit()
                commit_at = time.monotonic() + COMMIT_SECONDS
            if self._stop_reason is None:
                self._refill(now)
                self._dispatch(now)
                if self._is_through():
                    return
            elif not any(worker.out for worker in self._workers.values()):
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
        if self._next_due is not None and not self._ready:
            until = min(until, self._next_due)
        if self._settings.rate and self._ready:
            until = min(until, now + 1 / self._settings.rate)
        return max(0.0, until - now)

    def _listen(self, wake: socket.socket, patience: float) -> None:
        for key, _ in self._selector.select(patience):
            if key.data is None:
                wake.recv(4096)
            elif key.data == "feed":
                self._take_feed()
            elif key.data == "talk":
                self._relay_talk()
            else:
                self._hear(key.data)

    def _relay_talk(self) -> None:
        assert self._talk is not None
        for line in self._talk.lines():
            self._display.say(line)

    # ---- where items come from -------------------------------------------------------------------------------------

    def _refill(self, now: float) -> None:
        if self._next_due is not None and now >= self._next_due and len(self._ready) < READ_AHEAD // 2:
            self._take_due(now)
        if self._untouched_left and len(self._ready) < READ_AHEAD // 2:
            page = self._job.untouched(self._cursor, READ_AHEAD)
            self._untouched_left = len(page) == READ_AHEAD
            if page:
                self._cursor = page[-1].idx
                self._hold_items(page)
        if self._settings.last_pass and self._is_idle() and not self._waiting():
            self._commit()  # what died last must be in the ledger to be found
            if not self._waiting():
                self._hold_items(self._job.last_pass(READ_AHEAD))
                self._passing = bool(self._ready)

    def _take_due(self, now: float) -> None:
        """Fetch items whose wait is over, and learn when the next one's is."""
        most = READ_AHEAD + len(self._held)
        rows = self._job.due(most, within=10**8)
        self._next_due = now if len(rows) == most else None
        for item, left in rows:
            if item.idx in self._held:
                continue
            if left > 0:
                self._next_due = now + left
                return
            self._hold_items([item])

    def _hold_items(self, items: Sequence[Item]) -> None:
        self._ready.extend(items)
        self._held.update(item.idx for item in items)

    def _take_feed(self) -> None:
        assert self._feed is not None
        self._total += self._feed.take()
        self._untouched_left = True
        if self._feed.ended:
            self._selector.unregister(self._feed.fileno())

    def _waiting(self) -> bool:
        """Whether the ledger still has something that will come to us by itself."""
        open_feed = self._feed is not None and not self._feed.ended
        return open_feed or self._untouched_left or self._next_due is not None

    def _is_idle(self) -> bool:
        return not self._ready and not self._suspects and not self._held

    def _is_through(self) -> bool:
        return self._is_idle() and not self._waiting() and not self._inbox

    # ---- handing out -----------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        if self._suspects:
            self._examine()
        if not self._ready:
            return
        batch = self._batch_size()
        common = [worker for worker in self._workers.values() if not worker.alone]
        wanted = min(self._processes(), len(self._ready) + sum(len(worker.out) for worker in common))
        for _ in range(wanted - len(common)):
            self._start_worker(alone=False)
        # Those with least to do first, so that the last items of a job are spread over all of them.
        for worker in sorted(self._workers.values(), key=lambda each: len(each.out)):
            if worker.alone or worker.stopping:
                continue
            slots = worker.slots.count
            room = slots * (2 * batch if batch > 1 else 1) - len(worker.out)
            if room >= slots * batch / 2:
                fair = -(-len(self._ready) // len(self._workers))
                count = self._allowed(min(room, slots * batch, max(slots, fair)), now)
                if count:
                    self._send(worker, [self._ready.popleft() for _ in range(count)])
            if not self._ready:
                return

    def _allowed(self, count: int, now: float) -> int:
        """At most ``count``, fewer if the rate says so."""
        count = min(count, len(self._ready))
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

    def _send(self, worker: _Worker, items: list[Item]) -> None:
        for item in items:
            worker.out[item.idx] = item
        work = ",".join(f"[{item.idx},{item.attempts},{item.payload or 'null'}]" for item in items)
        self._tell(worker, f'{{"work":[{work}]}}')

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _processes(self) -> int:
        return self._settings.workers if self._settings.mode == "process" else 1

    def _start_worker(self, *, alone: bool) -> _Worker:
        count = 1 if alone or self._settings.mode == "process" else self._settings.workers
        ours, theirs = socket.socketpair()
        slots = Slots(count)
        self._names += 1
        pid = os.fork()
        if pid == 0:
            self._be_worker(ours, theirs, slots)
        theirs.close()
        worker = _Worker(pid, Wire(ours), slots, f"{self._hold.mark} worker {self._names}", alone=alone)
        self._workers[pid] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _be_worker(self, ours: socket.socket, theirs: socket.socket, slots: Slots) -> None:
        """In the child. Every other end of ours must be closed here, or siblings would not notice our death."""
        try:
            os.setpgid(0, 0)
            ours.close()
            for sibling in self._workers.values():
                sibling.wire.close()
            self._selector.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self._talk is not None:
                self._talk.enter_worker()
            mode, timeout = self._settings.mode, self._settings.timeout
            keep = self._output is not None
            worker_process.main(Wire(theirs), slots, self._function, mode=mode, timeout=timeout, keep=keep)
        finally:
            os._exit(70)

    def _hear(self, worker: _Worker) -> None:
        try:
            alive = worker.wire.receive()
        except OSError:
            alive = False
        for frame in worker.wire.frames():
            self._take(worker, frame)
        if not alive:
            self._bury(worker)

    def _take(self, worker: _Worker, frame: Any) -> None:
        if "back" in frame:
            self._take_back(worker, frame["back"])
            return
        worker.began, self._stillborn = True, 0
        name = worker.name
        seconds = 0.0
        for idx, took, result in frame["done"]:
            if worker.out.pop(idx, None) is not None:
                self._inbox.append(Done(idx, None, result, took, name))
                seconds += took
        for idx, attempts, took, kind, message, where, detail, retryable in frame["failed"]:
            if worker.out.pop(idx, None) is None:
                continue
            fault = Fault(kind, message, where, detail)
            self._fail(idx, attempts, fault, "failed", took, name, retryable=bool(retryable))
            seconds += took
        count = len(frame["done"]) + len(frame["failed"])
        if count:
            average = seconds / count
            known = self._item_seconds
            self._item_seconds = average if known is None else 0.7 * known + 0.3 * average

    def _fail(
        self,
        idx: int,
        attempts: int,
        fault: Fault,
        outcome: Miss,
        seconds: float | None,
        name: str,
        *,
        retryable: bool = True,
    ) -> None:
        self._causes[fault.type] += 1
        self._inbox.append(
            Failed(idx, fault, outcome, None, seconds, name, seen=attempts, retryable=retryable and not self._passing)
        )

    def _take_back(self, worker: _Worker, indices: list[int]) -> None:
        worker.recalled = False
        items = [worker.out.pop(idx) for idx in indices if idx in worker.out]
        self._ready.extendleft(reversed(items))
        if self._stop_reason is not None:
            self._let_go(items)

    def _let_go(self, items: Sequence[Item]) -> None:
        for item in items:
            self._held.discard(item.idx)

    def _bury(self, worker: _Worker, status: int | None = None) -> None:
        """A worker has ended: find out why, charge the item that killed it and nobody else."""
        self._selector.unregister(worker.wire.socket)
        del self._workers[worker.pid]
        if status is None:
            worker.kill()  # its stream has ended, so it cannot report any more; it must not go on either
            _, status = os.waitpid(worker.pid, 0)
        running = [(idx, began) for idx, began in worker.slots.running() if idx in worker.out]
        worker.wire.close()
        worker.slots.close()
        if worker.stopping and not running:
            self._return(worker.out.values())
            return
        how = _how_it_died(status)
        log.warning("a worker died", worker=worker.name, reason=how, count=len(running))
        metrics.count("headway_worker_deaths")
        if len(running) == 1:
            idx = running[0][0]
            item = worker.out.pop(idx)
            fault = Fault("WorkerDied", f"the worker process {how} while it ran this item")
            self._fail(idx, item.attempts, fault, "failed", time.monotonic() - running[0][1], worker.name)
        elif running:
            # Several items ran in it and one of them is to blame: each runs again, alone, at no cost to the others.
            self._suspects.extend(worker.out.pop(idx) for idx, _ in running)
        elif not worker.began:
            self._stillborn += 1
            if self._stillborn >= STILLBORN_MOST:
                raise HeadwayError(
                    f"{self._stillborn} workers in a row {how} before they began an item.",
                    hint="Run the function once by hand in a fresh process to see why.",
                )
        self._return(worker.out.values())

    def _return(self, items: Iterable[Item]) -> None:
        self._ready.extendleft(reversed(list(items)))

    def _examine(self) -> None:
        """Run one suspect by itself."""
        alone = [worker for worker in self._workers.values() if worker.alone]
        worker = alone[0] if alone else self._start_worker(alone=True)
        if not worker.out and self._suspects:
            self._send(worker, [self._suspects.popleft()])

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def _chores(self, now: float) -> None:
        to_note: list[tuple[int, str]] = []
        for worker in list(self._workers.values()):
            # Its stream need not end with it: what the function started may have inherited our socket.
            ended, status = os.waitpid(worker.pid, os.WNOHANG)
            if ended:
                self._drain(worker)
                self._bury(worker, status)
                continue
            running = [(idx, began) for idx, began in worker.slots.running() if idx in worker.out]
            longest = max((now - began for _, began in running), default=0.0)
            if longest > RECALL_SECONDS and len(worker.out) > len(running) and not worker.recalled:
                worker.recalled = True
                self._tell(worker, '{"recall":true}')
            self._end_overdue(worker, running, now)
            for idx, began in running:
                if now - began > NOTE_SECONDS and idx not in self._noted:
                    to_note.append((idx, worker.name))
            if worker.alone and not worker.out and not self._suspects and not worker.stopping:
                worker.stopping = True
                self._tell(worker, '{"stop":true}')
        if to_note:
            self._noted.update(idx for idx, _ in to_note)
            self._job.note_running(self._hold, to_note)
        if self._output is not None:
            self._output.write_sometimes()
        self._display.show(self._snapshot())

    def _end_overdue(self, worker: _Worker, running: list[tuple[int, float]], now: float) -> None:
        limit = self._settings.timeout
        if limit is None:
            return
        # A loop cancels its own overdue items; only one that is blocked altogether is ended from here.
        limit = limit + 2.0 if self._settings.mode == "async" else limit
        overdue = [(idx, began) for idx, began in running if now - began > limit]
        if not overdue:
            return
        worker.kill()
        self._drain(worker)
        for idx, began in overdue:
            item = worker.out.pop(idx, None)
            if item is not None:  # it did not report in the last moment
                fault = Fault(TIMED_OUT, f"no result within {self._settings.timeout:g} s")
                self._fail(idx, item.attempts, fault, "timeout", now - began, worker.name)
        # What else ran in that process did nothing wrong: it runs again and is charged nothing.
        worker.stopping = True
        self._return(worker.out.values())
        worker.out.clear()

    def _drain(self, worker: _Worker) -> None:
        """Hear what a worker that is no more had still sent."""
        worker.wire.socket.settimeout(0.2)  # all of it is here already; only the end of the stream may not come
        with suppress(OSError):
            while worker.wire.receive():
                pass
        for frame in worker.wire.frames():
            self._take(worker, frame)

    def _tell(self, worker: _Worker, frame: str) -> None:
        with suppress(OSError):  # it has just died: the end of its stream tells us, and what it held comes back then
            worker.wire.send(frame)

    # ---- recording -------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        if not self._inbox:
            return
        outcomes, self._inbox = self._inbox, []
        recorded = self._job.record(outcomes, hold=self._hold, policy=self._settings.policy, settle=False)
        now = time.monotonic()
        for outcome in outcomes:
            self._held.discard(outcome.idx)
            self._noted.discard(outcome.idx)
        self._done += recorded.done
        self._failures += recorded.failed + recorded.dead
        if self._passing:
            self._rescued += recorded.done
            self._dead -= recorded.done
        else:
            self._died += recorded.dead
            self._dead += recorded.dead
        if recorded.due:
            soonest = now + min(recorded.due.values()) - self._ledger.database.now()
            self._next_due = soonest if self._next_due is None else min(self._next_due, soonest)
        self._failed = recorded.waiting
        most = self._settings.max_failures
        if most is not None and self._died >= most and self._stop_reason is None:
            self._stop_reason = "stopped"
            self._recall_all()

    def _snapshot(self) -> Snapshot:
        most = self._causes.most_common(1)
        open_feed = self._feed is not None and not self._feed.ended
        return Snapshot(
            total=None if open_feed else self._total,
            kept=self._kept,
            done=self._done,
            running=sum(len(worker.slots.running()) for worker in self._workers.values()),
            retrying=self._failed,
            dead=self._dead,
            failures=self._failures,
            last_error=most[0][0] if most else "",
            last_error_count=most[0][1] if most else 0,
        )

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> Budget:
        self._stop_reason = "interrupted"
        self._recall_all()
        self._let_go(self._ready)
        self._ready.clear()
        busy = sum(len(worker.slots.running()) for worker in self._workers.values())
        if self._shutdown.signum == signal.SIGINT:
            self._display.say(f"Stopping: finishing {_items(busy)} (Ctrl-C again to abandon them) ...")
            return Budget(10**9)
        self._display.say(f"Stopping: finishing {_items(busy)} for up to {TERM_SECONDS:g} s ...")
        return Budget(TERM_SECONDS)

    def _recall_all(self) -> None:
        for worker in self._workers.values():
            worker.recalled = True
            self._tell(worker, '{"recall":true}')

    def _abandon(self) -> None:
        """Kill what still runs. Its items are as if they had not been begun: no attempt is counted."""
        for worker in list(self._workers.values()):
            worker.kill()
            self._drain(worker)
        self._commit()

    def _end_workers(self) -> None:
        """Let every worker go, by force if it holds something, and leave nothing noted as running."""
        for worker in self._workers.values():
            if worker.out:
                worker.kill()
            else:
                self._tell(worker, '{"stop":true}')
        deadline = Budget(2.0)
        for worker in self._workers.values():
            while not os.waitpid(worker.pid, os.WNOHANG)[0]:
                if deadline.spent:
                    worker.kill()
                    os.waitpid(worker.pid, 0)
                    break
                time.sleep(0.002)
            worker.wire.close()
            worker.slots.close()
        self._workers.clear()
        self._job.give_back(sorted(self._noted), self._hold)


def _poke(wake: socket.socket) -> None:
    with suppress(OSError):  # full: then it is awake already
        wake.send(b"!")


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"


def _how_it_died(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        return f"was killed by {name}" + (" (out of memory?)" if number == signal.SIGKILL else "")
    return f"ended by itself with code {os.WEXITSTATUS(status)}"
