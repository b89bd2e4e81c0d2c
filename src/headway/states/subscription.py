"""One reader of a job's states: first what stands, then one sentinel, then what happens.

The store's listener hands every change to every subscription by `offer`, which neither blocks nor raises, so that no
reader can hold up the listener or another reader. A reader that falls behind by more than ``depth`` events keeps, of
those beyond, the newest state of each key: its memory stays bounded by the size of the job, it still ends at the last
version of everything, and what was skipped is counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Self

from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.states.state import REPLAY_COMPLETE, Key, State, StateEvent, replay_order
from headway.telemetry import Log, metrics

log = Log("states")

#: What happens when a reader is further behind than its depth: keep the newest of each key, or end with an error.
Overflow = Literal["latest", "close"]

#: How many events wait for a reader before ``overflow`` decides.
DEPTH = 1_024
#: The least depth there is: a burst of four must fit.
LEAST_DEPTH = 4


class SubscriptionClosed(HeadwayError):
    """The subscription was closed while, or before, it was read."""


class Subscription:
    """An iterator of `StateEvent`, and a context manager that ends it.

    ``close`` may be called from any thread; a reader that waits then stops. ``timeout`` is how long iteration waits
    for the next event before it raises TimeoutError; without one it waits for as long as the subscription lives.
    """

    def __init__(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "latest",
        timeout: float | None = None,
        on_close: Callable[[Subscription], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if depth < LEAST_DEPTH:
            raise InvalidInput(
                f"A subscription holds at least {LEAST_DEPTH} events, so a depth of {depth} is too little."
            )
        if overflow not in ("latest", "close"):
            raise InvalidInput(f"overflow={overflow!r} is not known.", hint="Use 'latest' or 'close'.")
        self.timeout = timeout
        self._accepts = accepts
        self._depth = depth
        self._overflow = overflow
        self._on_close = on_close
        self._clock = clock
        self._began = clock()
        self._changed = threading.Condition()
        self._seen: dict[Key, int] = {}
        self._replay: deque[State] = deque()
        self._replaying = True
        self._live: deque[tuple[State, float]] = deque()
        self._late: dict[Key, tuple[State, float]] = {}
        self._closed = False
        self._error: HeadwayError | None = None

    # ---- for the store ---------------------------------------------------------------------

    def start(self, current: Iterable[State]) -> None:
        """Say what stands now. Called once, before the reader has it, by a store that registered it before it looked:
        a state that was offered in between is news, not replay."""
        with self._changed:
            for state in sorted(current, key=replay_order):
                accepted = self._accepts is None or self._accepts(state)
                if accepted and state.version > self._seen.get(state.key, 0):
                    self._seen[state.key] = state.version
                    self._replay.append(state)

    def offer(self, state: State) -> None:
        """A change. Given again or out of order it is ignored: only a version that grew is news."""
        with self._changed:
            if self._closed or (self._accepts is not None and not self._accepts(state)):
                return
            if state.version <= self._seen.get(state.key, 0):
                return
            self._seen[state.key] = state.version
            entry = (state, self._clock())
            if not self._late and len(self._live) < self._depth:
                self._live.append(entry)
            elif self._overflow == "close":
                self._end(Unavailable("🔴 The reader of this subscription is too slow: its buffer ran over."))
                return
            else:
                if self._late.pop(state.key, None) is not None:
                    metrics.count("headway_states_skipped")
                self._late[state.key] = entry
            self._changed.notify()

    def forget(self, key: Key) -> None:
        """The state of ``key`` was removed; if it is made again its versions begin at 1."""
        with self._changed:
            self._seen.pop(key, None)

    def end(self, error: HeadwayError | None = None) -> None:
        """No more will come: what is waiting can still be read, then ``error`` is raised, or iteration stops."""
        with self._changed:
            self._end(error)

    def _end(self, error: HeadwayError | None) -> None:
        self._closed = True
        self._error = error
        self._changed.notify_all()

    # ---- for the reader ---------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """How many events can be read at once."""
        with self._changed:
            return len(self._replay) + self._replaying + len(self._live) + len(self._late)

    def get(self, timeout: float | None = None) -> StateEvent:
        """The next event. Raises TimeoutError when none comes in time, `SubscriptionClosed` when none will come."""
        with self._changed:
            if not self._changed.wait_for(self._readable, timeout):
                raise TimeoutError(f"No event within {timeout:g} s.")
            if self._replay:
                return StateEvent(self._replay.popleft(), replay=True)
            if self._replaying:
                self._replaying = False
                metrics.observe("headway_states_replay_seconds", self._clock() - self._began)
                return REPLAY_COMPLETE
            if self._live:
                state, since = self._live.popleft()
            elif self._late:
                state, since = self._late.pop(next(iter(self._late)))
            elif self._error is not None:
                raise self._error
            else:
                raise SubscriptionClosed("The subscription is closed.")
        metrics.observe("headway_states_delivery_seconds", self._clock() - since)
        return StateEvent(state)

    def _readable(self) -> bool:
        return bool(self._replay or self._replaying or self._live or self._late or self._closed)

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> StateEvent:
        try:
            return self.get(self.timeout)
        except SubscriptionClosed:
            raise StopIteration from None

    def close(self) -> None:
        """End it now. What was waiting is dropped, and counted."""
        with self._changed:
            dropped = len(self._replay) + len(self._live) + len(self._late)
            for buffer in (self._replay, self._live, self._late):
                buffer.clear()
            self._replaying = False
            if not self._closed:
                self._end(None)
        if dropped:
            metrics.count("headway_states_dropped", dropped)
        if self._on_close is not None:
            self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
