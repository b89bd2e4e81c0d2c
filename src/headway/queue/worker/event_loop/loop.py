"""The event loop of a worker: a thread that runs coroutines of handlers, up to each kind's concurrency."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from headway.core.failure import Failure
from headway.core.setup import Opened, Setup, enter_async
from headway.errors import SetupFailed
from headway.queue.task import Claim
from headway.queue.worker.execution import CannotStart, Ended
from headway.queue.worker.heartbeat import Ending
from headway.telemetry import Log

log = Log("queue")

#: Seconds without a turn of the event loop after which it counts as blocked.
BLOCKED_SECONDS = 0.5
#: Seconds between two signs of life of the event loop.
_BEAT = 0.1
#: Seconds for set-ups, background tasks and abandoned handlers to end when the event loop closes.
CLOSE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Run:
    """One task on the event loop. The main thread supervises it; the event loop sets ``began``, ``seconds`` and ``ended``."""

    claim: Claim  # without its payload
    text: str  # the decoded payload; empty once the handler has begun
    added_at: float = field(default_factory=time.monotonic)
    began: float | None = None
    seconds: float = 0.0
    ended: Ended | None = None
    coroutine: asyncio.Task[Ended] | None = None
    progress: tuple[float, str] | None = None
    recorded: tuple[float, str] | None = None  # the progress that was recorded last
    cancelling: bool = False
    reason: Ended | None = None  # why the worker ends the run
    ending: Ending | None = None
    is_lost: bool = False
    is_abandoned: bool = False


class Blocker(NamedTuple):
    """What blocks the event loop: a run if it is known, a name for people, and since how many seconds."""

    run: Run | None
    name: str
    seconds: float


_run_here: ContextVar[Run] = ContextVar("run_here")


class EventLoop:
    """A thread with an event loop. Only `start`, `add`, `withdraw`, `cancel`, `abandon` and `close` change it from outside."""

    def __init__(
        self,
        perform: Callable[[Run], Coroutine[Any, Any, Ended]],
        *,
        concurrency: Callable[[str], int],
        most: Callable[[], int],
        leased_until: Callable[[], float],
    ) -> None:
        """``concurrency`` returns the most runs of a kind, ``most`` that of all kinds. Nothing starts after ``leased_until``,
        a monotonic time."""
        self._perform, self._concurrency, self._most, self._leased_until = perform, concurrency, most, leased_until
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards `_waiting` and `_paused`
        self._paused: set[str] = set()  # kinds that a handler has postponed, until `resume`
        self._waiting: dict[str, deque[Run]] = {}
        self._running: Counter[str] = Counter()
        self._run_of: WeakKeyDictionary[asyncio.Task[Any], Run] = WeakKeyDictionary()
        self.set_ups: dict[str, Opened | SetupFailed | None] = {}  # by kind; None: it is being entered
        self._ended: deque[Run] = deque()
        self._woken = threading.Event()
        self._beat = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._new_task)
        self._thread = threading.Thread(target=self._serve, name="headway-async", daemon=True)

    # ---- for the main thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Raises `CannotStart`."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system refuses another thread
            self._loop.close()
            raise CannotStart(f"No thread can be started for the event loop: {error}") from error

    def set_up(self, kind: str, setup: Setup) -> None:
        """Enter the set-up of a kind, whose runs start when that has succeeded."""
        self.set_ups[kind] = None
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._enter(kind, setup)))

    def _may_start(self, kind: str) -> bool:
        is_ready = kind not in self.set_ups or isinstance(self.set_ups[kind], Opened)
        return is_ready and kind not in self._paused and self._running[kind] < self._concurrency(kind)

    def add(self, runs: Iterable[Run]) -> None:
        """Start runs, or keep them until others of their kind have ended."""
        with self._lock:
            for run in runs:
                self._waiting.setdefault(run.claim.kind, deque()).append(run)
        self._loop.call_soon_threadsafe(self._start_next)

    def withdraw(self, wanted: Callable[[Run], bool]) -> list[Run]:
        """Remove and return the runs that have not begun and that ``wanted`` selects."""
        found: list[Run] = []
        with self._lock:
            for kind, waiting in self._waiting.items():
                chosen = [run for run in waiting if wanted(run)]
                if chosen:
                    found += chosen
                    self._waiting[kind] = deque(run for run in waiting if not wanted(run))
        return found

    def resume(self, kind: str) -> None:
        """Let runs of a postponed kind start again: those that waited have been withdrawn."""
        with self._lock:
            self._paused.discard(kind)

    def cancel(self, run: Run) -> None:
        """Raise `asyncio.CancelledError` in a run that has begun."""
        if run.coroutine is not None:
            self._loop.call_soon_threadsafe(run.coroutine.cancel)

    def abandon(self, run: Run) -> None:
        """Give the run's place to another one, although its coroutine has not ended."""
        self._loop.call_soon_threadsafe(self._leave, run)

    def pop_ended(self) -> list[Run]:
        """Remove and return the runs that have ended."""
        self._woken.clear()
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def wait(self, seconds: float) -> None:
        """Wait until a run ends, or for ``seconds``."""
        self._woken.wait(seconds)

    def blocker(self) -> Blocker | None:
        """Return what blocks the event loop now; None if nothing does."""
        seconds = time.monotonic() - self._beat
        if seconds < BLOCKED_SECONDS or not self._thread.is_alive():
            return None
        task = asyncio.current_task(self._loop)
        if task is None:
            return Blocker(None, "a callback", seconds)
        run = self._run_of.get(task)
        return Blocker(run, getattr(task.get_coro(), "__qualname__", "a coroutine"), seconds)

    def close(self) -> None:
        """Cancel what still runs, close set-ups and end the thread. One that cannot end is left behind and logged."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._shut_down()))
        self._thread.join(CLOSE_SECONDS + 1.0)
        if self._thread.is_alive():
            log.warning("the event loop of the worker is blocked and could not be closed")

    # ---- on the event loop -------------------------------------------------------------------------------------------

    async def _enter(self, kind: str, setup: Setup) -> None:
        try:
            self.set_ups[kind] = await enter_async(setup)
        except SetupFailed as error:
            self.set_ups[kind] = error
        self._woken.set()
        self._start_next()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._send_beat)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _send_beat(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT, self._send_beat)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task that remembers the run it belongs to, also if a handler creates it."""
        task = asyncio.Task(coro, loop=loop, **options)
        run = _run_here.get(None)
        if run is not None:
            self._run_of[task] = run
        return task

    def _start_next(self) -> None:
        # After its lease another worker may have the task. The main thread renews first, and calls this again.
        if time.monotonic() >= self._leased_until():
            return
        starting: list[Run] = []
        with self._lock:
            free = self._most() - self._running.total()
            for kind, waiting in self._waiting.items():
                while waiting and free > 0 and self._may_start(kind):
                    starting.append(waiting.popleft())
                    self._running[kind] += 1
                    free -= 1
        for run in starting:
            run.began = time.monotonic()
            before = _run_here.set(run)
            run.coroutine = self._loop.create_task(self._perform(run))
            _run_here.reset(before)
            run.coroutine.add_done_callback(partial(self._finished, run))

    def _finished(self, run: Run, coroutine: asyncio.Task[Ended]) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a process forked by a handler returned here: a second worker with our claims
        assert run.began is not None
        run.seconds = time.monotonic() - run.began
        if coroutine.cancelled():  # before its first step
            run.ended = Ended(failure=Failure("CancelledError", "the handler was cancelled before it began"))
        else:
            run.ended = coroutine.result()
        if run.ended.later is not None and run.ended.later.scope == "job":
            with self._lock:  # start no other of its kind before the main thread has released them
                self._paused.add(run.claim.kind)
        self._ended.append(run)
        self._woken.set()
        self._leave(run)

    def _leave(self, run: Run) -> None:
        if not run.is_abandoned:
            run.is_abandoned = True  # from now on its end changes nothing
            self._running[run.claim.kind] -= 1
            self._start_next()

    async def _shut_down(self) -> None:
        own = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not own]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_SECONDS / 2)
        for kind, opened in reversed(self.set_ups.items()):
            if isinstance(opened, Opened):
                try:
                    problem = await asyncio.wait_for(opened.aclose(), CLOSE_SECONDS / 2)
                except TimeoutError:
                    problem = "it did not end in time"
                if problem:
                    log.warning("a set-up could not be closed", kind=kind, error=problem)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()
