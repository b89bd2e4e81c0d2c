"""`Subscription`: one reader of a job's states. It reads the current states, one sentinel, then every change.

The store's listener passes every change to every subscription by `offer`. It never waits for a reader and never raises,
so a slow reader delays neither the listener, nor a writer, nor another reader.

A subscription belongs to one incarnation of the job. It ends with an error if the job is deleted, or if the store is
wiped, replaced or restored to an earlier moment.
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
from typing import Self, get_args

from headway.core.lifecycle import ForkGuard
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.states.buffer import EventBuffer, Overflow
from headway.states.state import REPLAY_COMPLETE, Key, State, StateEvent, checked_seconds, replay_order
from headway.telemetry import metrics

#: Events that are buffered in memory before ``overflow`` decides.
DEPTH = 1_024
#: Minimum depth, so that a burst of four events fits.
LEAST_DEPTH = 4


def called_from_within() -> bool:
    """Return whether this thread has interrupted a call of the store.

    A signal handler or an ``accepts`` callback runs in the middle of such a call. The call holds locks and continues
    only after our caller returns, so the caller must not wait for them.
    """
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame):  # this call and its caller
        frame = frame.f_back
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to the store or to a package that it calls with locks of its own."""
    return str(frame.f_globals.get("__name__")).startswith(("headway.states.", "headway._sql.", "headway.telemetry."))


class SubscriptionClosed(HeadwayError):
    """The subscription was closed before or while it was read."""


class Subscription:
    """An iterator of `StateEvent` (``for`` and ``async for``) and a context manager that closes it.

    ``timeout`` is how many seconds iteration waits for an event before it raises TimeoutError; None waits without
    limit. `close` may be called from any thread and ends a waiting read. Only the reader holds a reference, so dropping
    the subscription (``for event in subscribe(): break``) closes it.
    """

    _closed = True  # until `__init__` has finished, so that `__del__` counts nothing

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
            raise InvalidInput(f"depth must be at least {LEAST_DEPTH} (got {depth}).")
        if overflow not in get_args(Overflow):
            raise InvalidInput(f"overflow must be 'all', 'latest' or 'close' (got {overflow!r}).")
        self.timeout = checked_seconds(timeout, "timeout")
        self._accepts = accepts
        self._on_close = on_close
        self._abandoned = abandoned  # receives the number of unread events if the subscription is dropped
        self._clock = clock
        self._began = clock()
        self._guard = ForkGuard("A subscription")
        # Taken by ``with`` only, and never while waiting: the interpreter acquires it in one step, which an exception
        # of a signal handler cannot split. A Condition takes many steps and would stay locked.
        self._lock = threading.RLock()
        self._waiters: list[Callable[[], object]] = []  # wakes each waiting reader
        self._seen: dict[Key, int] = {}  # the last version per key
        self._buffer = EventBuffer(depth, overflow)
        self._error: HeadwayError | None = None
        self._closed = False

    # ---- for the store ---------------------------------------------------------------------

    def start(self, current: Iterable[State]) -> None:
        """Buffer the current states as replay. Called once, before the reader has the subscription.

        An exception of ``accepts`` reaches the subscriber.
        """
        with self._lock:
            for state in sorted(current, key=replay_order):
                accepted = self._accepts is None or self._accepts(state)
                if accepted and state.version > self._seen.get(state.key, 0):
                    self._seen[state.key] = state.version
                    self._buffer.replay(state)

    def offer(self, state: State) -> None:
        """Buffer a change. Ignored unless its version is higher than the last one of the key."""
        with self._lock:
            if self._closed or not self._accepted(state) or state.version <= self._seen.get(state.key, 0):
                return
            self._seen[state.key] = state.version
            if self._buffer.append(state, self._clock()):
                self._wake()
            else:
                self._end(Unavailable("🔴 The reader of this subscription is too slow: its buffer is full."))

    def _accepted(self, state: State) -> bool:
        try:
            return self._accepts is None or self._accepts(state)
        except BaseException as error:  # noqa: BLE001  (the subscriber's code must not end the shared listener)
            failed = HeadwayError(f"🔴 The accepts callback of this subscription raised {type(error).__name__}.")
            failed.__cause__ = error
            self._end(failed)
            return False

    def forget(self, key: Key) -> None:
        """Forget the versions of a removed key. If the key is re-created, its versions start at 1."""
        with self._lock:
            self._seen.pop(key, None)

    def end(self, error: HeadwayError | None = None) -> None:
        """End the subscription. Buffered events can still be read. Then ``error`` is raised, or iteration stops."""
        with self._lock:
            if not self._closed:
                self._end(error)

    def _end(self, error: HeadwayError | None) -> None:
        self._closed = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting readers. A waiter is removed after it was woken: an interruption wakes it twice."""
        while self._waiters:
            with suppress(RuntimeError):  # woken already, or its event loop has ended
                self._waiters[-1]()
            self._waiters.pop()

    # ---- for the reader ---------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether no further events will arrive. Buffered events may remain."""
        return self._closed

    @property
    def waiting(self) -> int:
        """The number of events that can be read at once."""
        self._guard.check()
        with self._lock:
            return self._buffer.waiting

    def get(self, timeout: float | None = None) -> StateEvent:
        """Return the next event.

        Raises TimeoutError after ``timeout`` seconds, `SubscriptionClosed` if the subscription was closed, or the error
        with which the store ended it.
        """
        self._guard.check()  # before the lock, which a thread of the parent may have held at the fork
        limit = checked_seconds(timeout, "timeout")
        deadline = None if limit is None else self._clock() + limit
        while (event := self._next()) is None:
            if not self._wait(deadline):
                raise TimeoutError(f"No event within {timeout:g} s.")
        return event

    def _wait(self, deadline: float | None) -> bool:
        """Wait until there may be something to read. Return False at the deadline."""
        woken = _thread.allocate_lock()
        woken.acquire()
        if not self._add_waiter(woken.release):
            return True
        try:
            left = -1.0 if deadline is None else min(max(0.0, deadline - self._clock()), threading.TIMEOUT_MAX)
            return woken.acquire(timeout=left)
        finally:
            self._remove_waiter(woken.release)

    def _add_waiter(self, waiter: Callable[[], object]) -> bool:
        """Register a waiting reader, unless there is something to read. Return whether it was registered."""
        with self._lock:
            if self._closed or self._buffer.readable:
                return False
            self._waiters.append(waiter)
            return True

    def _remove_waiter(self, waiter: Callable[[], object]) -> None:
        with self._lock, suppress(ValueError):  # removed when it was woken
            self._waiters.remove(waiter)

    def _next(self) -> StateEvent | None:
        """Remove and return the next event, or None if there is none yet."""
        with self._lock:
            if (found := self._buffer.pop()) is None:
                if not self._closed:
                    return None
                raise self._error or SubscriptionClosed("The subscription is closed.")
        event, arrived = found
        if arrived is not None:
            metrics.observe("headway_states_delivery_seconds", self._clock() - arrived)
        elif event is REPLAY_COMPLETE:
            metrics.observe("headway_states_replay_seconds", self._clock() - self._began)
        return event

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
        """Return the next event. Waits in the event loop without a thread, so thousands of readers may wait at once."""
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
            if not self._add_waiter(waiter):
                continue
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                    await arrived.wait()
            except TimeoutError:
                raise TimeoutError(f"No event within {self.timeout:g} s.") from None
            finally:
                self._remove_waiter(waiter)

    def close(self) -> None:
        """End the subscription now. Unread events are dropped and counted."""
        if self._guard.crossed:
            return  # it belongs to the parent process
        with self._lock:
            dropped = self._buffer.clear()
            if not self._closed:
                self._end(None)
            self._wake()  # an interrupted first `close` may have left a reader waiting
        if dropped:
            metrics.count("headway_states_dropped", dropped)
        # If this call interrupted the store, the store keeps a weak reference and skips the closed subscription.
        if self._on_close is not None and not called_from_within():
            self._on_close(self)

    def __del__(self) -> None:
        # The garbage collector may run this anywhere, also while this thread holds the lock. So it takes no lock, and
        # the store counts later.
        if not self._closed and self._abandoned is not None:
            self._abandoned.append(self._buffer.unread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
