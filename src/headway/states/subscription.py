"""One reader of a job's states: first what is current, then one sentinel, then what happens.

The store's listener hands every change to every subscription by `offer`, which neither waits for a reader nor raises, so
that no reader can hold up the listener, a writer or another reader. When more than ``depth`` events wait, the following
ones wait in a temporary file (`Spool`), so that a slow reader gets every change in order and memory stays bounded. With
``overflow="latest"``, or when the file is full or cannot be written, the newest state of each key waits instead: each
event then says how many changes it stands for, and the log says that changes are skipped.

A subscription belongs to one life of the job in its store. When that ends (the job was deleted, the store wiped,
replaced or put back to an earlier moment) the subscription ends too, with the reason as its error.
"""

from __future__ import annotations

import _thread
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Literal, Self, get_args

from headway.core.lifecycle import ForkGuard
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.states.spool import Spool
from headway.states.state import REPLAY_COMPLETE, Key, State, StateEvent, checked_seconds, replay_order
from headway.telemetry import Log, metrics

log = Log("states")

#: What happens to events beyond ``depth``: all wait on disk, the newest of each key waits, or the subscription ends
#: with an error.
Overflow = Literal["all", "latest", "close"]

#: How many events wait in memory for a reader before ``overflow`` decides.
DEPTH = 1_024
#: The least depth there is: a burst of four must fit.
LEAST_DEPTH = 4


def called_from_within() -> bool:
    """Whether our caller was called in the midst of a call of ours, in this thread: by a signal handler, or by what a
    subscription accepts. That call goes on when the caller is done, so nobody may wait for the locks it has meanwhile."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame):  # this call, and that of whoever asks
        frame = frame.f_back
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def _is_ours(frame: FrameType) -> bool:
    """Of the store, or of what it calls and has locks too."""
    return str(frame.f_globals.get("__name__")).startswith(("headway.states.", "headway._sql.", "headway.telemetry."))


class SubscriptionClosed(HeadwayError):
    """The subscription was closed while, or before, it was read."""


class Subscription:
    """An iterator of `StateEvent` (``for`` and ``async for``), and a context manager that ends it.

    ``close`` may be called from any thread; a reader that waits then stops. ``timeout`` is how long iteration waits
    for the next event before it raises TimeoutError; without one it waits for as long as the subscription lives.
    Nobody but its reader holds it: one that is dropped (``for event in subscribe(): break``) is closed by that.
    """

    _closed = True  # until it is whole, so that `__del__` has nothing to count

    def __init__(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
        timeout: float | None = None,
        on_close: Callable[[Subscription], None] | None = None,
        abandoned: deque[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not depth >= LEAST_DEPTH:
            raise InvalidInput(
                f"A subscription holds at least {LEAST_DEPTH} events, so a depth of {depth} is too little."
            )
        if overflow not in get_args(Overflow):
            raise InvalidInput(f"overflow must be 'all', 'latest' or 'close' (got {overflow!r}).")
        self.timeout = checked_seconds(timeout, "The timeout of a subscription")
        self._accepts = accepts
        self._depth = depth
        self._overflow = overflow
        self._on_close = on_close
        self._abandoned = abandoned
        self._clock = clock
        self._began = clock()
        self._guard = ForkGuard("A subscription")
        # Taken by `with` and waited for by nobody who holds it: that is one step of the interpreter, which no exception of
        # a signal handler can split. A Condition is many, and would stay locked.
        self._lock = threading.RLock()
        self._waiters: list[Callable[[], object]] = []  # one of each reader that waits, and wakes it
        self._seen: dict[Key, int] = {}
        self._replay: deque[State] = deque()
        self._replaying = True
        self._live: deque[tuple[State, float]] = deque()
        # Read in this order: `_live`, then `_spool`, then `_late`.
        self._spool: Spool | None = None
        self._late: dict[Key, tuple[State, float, int]] = {}
        self._error: HeadwayError | None = None
        self._closed = False

    # ---- for the store ---------------------------------------------------------------------

    def start(self, current: Iterable[State]) -> None:
        """Say what is current. Called once, before the reader has it, by a store that registered it before it looked:
        a state that was offered in between is news, not replay. What ``accepts`` raises here reaches the subscriber."""
        with self._lock:
            for state in sorted(current, key=replay_order):
                accepted = self._accepts is None or self._accepts(state)
                if accepted and state.version > self._seen.get(state.key, 0):
                    self._seen[state.key] = state.version
                    self._replay.append(state)

    def offer(self, state: State) -> None:
        """A change. Given again or out of order it is ignored: only a version that grew is news."""
        with self._lock:
            if self._closed or not self._accepted(state) or state.version <= self._seen.get(state.key, 0):
                return
            self._seen[state.key] = state.version
            now = self._clock()
            if not self._late and not self._spool and len(self._live) < self._depth:
                self._live.append((state, now))
            elif self._overflow == "close":
                self._end(Unavailable("🔴 The reader of this subscription is too slow: its buffer ran over."))
                return
            elif self._overflow == "latest" or self._late or not self._offer_on_disk(state, now):
                self._offer_late(state, now)
            self._wake()

    def _offer_on_disk(self, state: State, now: float) -> bool:
        """Add a state to the spool; False when there is no space for it."""
        try:
            if self._spool is None:
                self._spool = Spool()
            return self._spool.append(state, now)
        except OSError as error:
            log.warning("the spool of a subscription cannot be written", jobID=state.job_id, error=str(error))
            return False

    def _accepted(self, state: State) -> bool:
        try:
            return self._accepts is None or self._accepts(state)
        except BaseException as error:  # noqa: BLE001  (it is the subscriber's own code, in the thread that serves all)
            failed = HeadwayError(f"🔴 What this subscription accepts could not be decided: {type(error).__name__}.")
            failed.__cause__ = error
            self._end(failed)
            return False

    def _offer_late(self, state: State, now: float) -> None:
        if not self._late:
            log.warning(
                "a reader is too slow; changes are skipped until it has read what waits",
                jobID=state.job_id, count=self._depth,
            )  # fmt: skip
        replaced = self._late.pop(state.key, None)
        if replaced is not None:
            metrics.count("headway_states_skipped")
        self._late[state.key] = (state, now, 0 if replaced is None else replaced[2] + 1)

    def forget(self, key: Key) -> None:
        """The state of ``key`` was removed; if it is made again its versions begin at 1."""
        with self._lock:
            self._seen.pop(key, None)

    def end(self, error: HeadwayError | None = None) -> None:
        """No more will come: what is waiting can still be read, then ``error`` is raised, or iteration stops."""
        with self._lock:
            if not self._closed:
                self._end(error)

    def _end(self, error: HeadwayError | None) -> None:
        self._closed = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        """Every reader that waits; they look again. One is crossed off after it was woken: interrupted in between, it is
        woken twice."""
        while self._waiters:
            with suppress(RuntimeError):  # it was woken already, or its loop has ended, and the reader with it
                self._waiters[-1]()
            self._waiters.pop()

    # ---- for the reader ---------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """How many events can be read at once."""
        self._guard.check()
        with self._lock:
            return self._waiting() + self._replaying

    def _waiting(self) -> int:
        return len(self._replay) + len(self._live) + len(self._spool or ()) + len(self._late)

    def get(self, timeout: float | None = None) -> StateEvent:
        """The next event. Raises TimeoutError when none comes in time, `SubscriptionClosed` when none will come, or
        the error with which the store ended it."""
        self._guard.check()  # before the lock, which a thread of the parent may have held when this process was forked
        limit = checked_seconds(timeout, "The timeout")
        deadline = None if limit is None else self._clock() + limit
        while (event := self._next()) is None:
            if not self._wait(deadline):
                raise TimeoutError(f"No event within {timeout:g} s.")
        return event

    def _wait(self, deadline: float | None) -> bool:
        """Until there may be something to read; False when it is too late for that."""
        woken = _thread.allocate_lock()
        woken.acquire()
        with self._lock:
            if self._readable():
                return True
            self._waiters.append(woken.release)
        try:
            left = -1.0 if deadline is None else min(max(0.0, deadline - self._clock()), threading.TIMEOUT_MAX)
            return woken.acquire(timeout=left)
        finally:
            self._no_longer_waits(woken.release)

    def _no_longer_waits(self, waiter: Callable[[], object]) -> None:
        with self._lock, suppress(ValueError):  # it was woken
            self._waiters.remove(waiter)

    def _next(self) -> StateEvent | None:
        """The next event, taken; None when there is none yet."""
        with self._lock:
            if not self._readable():
                return None
            if self._replay:
                return StateEvent(self._replay.popleft(), replay=True)
            if self._replaying:
                self._replaying = False
                metrics.observe("headway_states_replay_seconds", self._clock() - self._began)
                return REPLAY_COMPLETE
            skipped = 0
            if self._live:
                state, since = self._live.popleft()
            elif self._spool:
                state, since = self._spool.popleft()
            elif self._late:
                state, since, skipped = self._late.pop(next(iter(self._late)))
            elif self._error is not None:
                raise self._error
            else:
                raise SubscriptionClosed("The subscription is closed.")
        metrics.observe("headway_states_delivery_seconds", self._clock() - since)
        return StateEvent(state, skipped=skipped)

    def _readable(self) -> bool:
        return bool(self._replay or self._replaying or self._live or self._spool or self._late or self._closed)

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> StateEvent:
        try:
            return self.get(self.timeout)
        except SubscriptionClosed:
            raise StopIteration from None

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> StateEvent:
        """Waits in the event loop and takes no thread, so thousands of readers may wait at once."""
        import asyncio
        from functools import partial

        self._guard.check()
        deadline = None if self.timeout is None else self._clock() + self.timeout
        while True:
            try:
                if (event := self._next()) is not None:
                    return event
            except SubscriptionClosed:
                raise StopAsyncIteration from None
            arrived = asyncio.Event()
            waiter = partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)
            with self._lock:
                if self._readable():
                    continue
                self._waiters.append(waiter)
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                    await arrived.wait()
            except TimeoutError:
                raise TimeoutError(f"No event within {self.timeout:g} s.") from None
            finally:
                self._no_longer_waits(waiter)

    def close(self) -> None:
        """End it now. What was waiting is dropped, and counted."""
        if self._guard.crossed:
            return  # it is the parent's
        with self._lock:
            dropped = self._drop()
            if not self._closed:
                self._end(None)
            self._wake()  # closed twice because it was interrupted: somebody may wait still
        if dropped:
            metrics.count("headway_states_dropped", dropped)
        # Else it stays in the store's set for as long as somebody holds it, and is passed over.
        if self._on_close is not None and not called_from_within():
            self._on_close(self)

    def _drop(self) -> int:
        dropped = self._waiting()
        for buffer in (self._replay, self._live, self._late):
            buffer.clear()
        if self._spool is not None:
            self._spool.close()
        self._spool, self._replaying = None, False
        return dropped

    def __del__(self) -> None:
        # The collector may run this anywhere, also inside a lock of ours: it takes none, and the store counts later.
        if not self._closed and self._abandoned is not None:
            self._abandoned.append(self._waiting())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
