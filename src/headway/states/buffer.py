"""`EventBuffer`: the unread events of one subscription, in memory and on disk.

Up to ``depth`` events are buffered in memory, further ones in a temporary file (`Spool`). So a slow reader gets every
change in order and memory stays bounded. With ``overflow="latest"``, and when the file is full or cannot be written, the
buffer keeps only the newest state of each key. Each of those events counts the changes it replaces.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from headway.states.spool import Spool
from headway.states.state import REPLAY_COMPLETE, Key, State, StateEvent
from headway.telemetry import Log, metrics

log = Log("states")

#: What happens to events beyond ``depth``: buffer all of them on disk, keep the newest of each key, or end the
#: subscription with an error.
Overflow = Literal["all", "latest", "close"]


class EventBuffer:
    """A queue of events. Not thread-safe: the subscription's lock serializes all calls."""

    def __init__(self, depth: int, overflow: Overflow) -> None:
        self._depth = depth
        self._overflow = overflow
        self._replay: deque[State] = deque()
        self._replaying = True  # until the sentinel has been read
        # Read in this order: `_live`, `_spool`, `_latest`.
        self._live: deque[tuple[State, float]] = deque()
        self._spool: Spool | None = None
        self._latest: dict[Key, tuple[State, float, int]] = {}  # state, time of arrival, number of replaced changes

    @property
    def readable(self) -> bool:
        """Whether `pop` returns an event."""
        return bool(self._replay or self._replaying or self._live or self._spool or self._latest)

    @property
    def unread(self) -> int:
        """The number of buffered states."""
        return len(self._replay) + len(self._live) + len(self._spool or ()) + len(self._latest)

    @property
    def waiting(self) -> int:
        """The number of events that can be read at once, with the sentinel."""
        return self.unread + self._replaying

    def replay(self, state: State) -> None:
        """Append a current state, which is read before the sentinel."""
        self._replay.append(state)

    def append(self, state: State, arrived: float) -> bool:
        """Append a change. Return False if the buffer is full and ``overflow`` is ``close``."""
        if not self._latest and not self._spool and len(self._live) < self._depth:
            self._live.append((state, arrived))
        elif self._overflow == "close":
            return False
        elif self._overflow == "latest" or self._latest or not self._append_to_spool(state, arrived):
            self._keep_latest(state, arrived)
        return True

    def _append_to_spool(self, state: State, arrived: float) -> bool:
        """Append a state to the file. Return False if the file is full or cannot be written."""
        try:
            if self._spool is None:
                self._spool = Spool()
            return self._spool.append(state, arrived)
        except OSError as error:
            log.warning("the spool of a subscription cannot be written", jobID=state.job_id, error=str(error))
            return False

    def _keep_latest(self, state: State, arrived: float) -> None:
        if not self._latest:
            log.warning(
                "a subscriber is too slow; changes are skipped until it has read its buffer",
                jobID=state.job_id, count=self._depth,
            )  # fmt: skip
        replaced = self._latest.pop(state.key, None)
        if replaced is not None:
            metrics.count("headway_states_skipped")
        self._latest[state.key] = (state, arrived, 0 if replaced is None else replaced[2] + 1)

    def pop(self) -> tuple[StateEvent, float | None] | None:
        """Remove and return the next event and its time of arrival, or None. Replayed events have no time."""
        if self._replay:
            return StateEvent(self._replay.popleft(), replay=True), None
        if self._replaying:
            self._replaying = False
            return REPLAY_COMPLETE, None
        if self._live:
            state, arrived = self._live.popleft()
            return StateEvent(state), arrived
        if self._spool:
            state, arrived = self._spool.popleft()
            return StateEvent(state), arrived
        if self._latest:
            state, arrived, skipped = self._latest.pop(next(iter(self._latest)))
            return StateEvent(state, skipped=skipped), arrived
        return None

    def clear(self) -> int:
        """Drop all events. Return the number of states dropped."""
        dropped = self.unread
        for events in (self._replay, self._live, self._latest):
            events.clear()
        if self._spool is not None:
            self._spool.close()
        self._spool, self._replaying = None, False
        return dropped
