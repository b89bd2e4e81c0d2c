"""Detection of the times in which this process was suspended: Ctrl-Z, a paused container, a sleeping laptop."""

from __future__ import annotations

from collections import deque

from headway.core.lifecycle import STANDSTILL_SECONDS

#: Chores run ten times a second. After a gap this long, the process was certainly suspended: no commit takes that
#: long. After `STANDSTILL_SECONDS` it may have been, and the running items with it.
STOPPED_SECONDS = 20.0


class Standstills:
    """Recent standstills of the loop. The items probably stood still too, so these do not count towards timeouts."""

    def __init__(self, now: float) -> None:
        self._chores_at = now
        #: (end, length) of waits that returned too late.
        self._late_waits: deque[tuple[float, float]] = deque(maxlen=100)
        #: (end, length) of the last long gap between chores. It may have been a slow database, so only one counts.
        self._gap = (0.0, 0.0)

    def note_wait(self, late: float, now: float) -> None:
        """Note that a wait which ended at ``now`` took ``late`` seconds longer than its timeout."""
        if late > STANDSTILL_SECONDS:
            self._late_waits.append((now, late))

    def note_chores(self, now: float) -> bool:
        """Note that chores begin. Return whether the process was certainly suspended since the last ones."""
        before, self._chores_at = self._chores_at, now
        passed = now - before
        if passed > STANDSTILL_SECONDS and not (self._late_waits and self._late_waits[-1][0] > before):
            self._gap = (now, passed)
        return passed > STOPPED_SECONDS

    def since(self, began: float) -> float:
        """Return for how many seconds this process was suspended since ``began``."""
        known = (*self._late_waits, self._gap)
        return sum(min(seconds, woke_at - began) for woke_at, seconds in known if woke_at > began)
