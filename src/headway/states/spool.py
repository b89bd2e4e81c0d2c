"""`Spool`: an on-disk buffer of states for a slow subscriber.

The file is unnamed and is deleted with the subscription. It holds JSON only, which is never executed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque

from headway.states.state import State, moment

#: Maximum bytes on disk per subscription: about 800,000 small states.
LIMIT = 256 * 1024 * 1024
#: Bytes read at a time.
PAGE = 64 * 1024


class Spool:
    """A FIFO queue of (state, arrival time) in a temporary file. Not thread-safe: the caller serializes calls."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="headway-spool-")  # noqa: SIM115  # closed by `close`
        self._end = 0  # where the next record is written
        # Offset of the next page, and the records of the current one. One attribute, so that a signal handler that
        # raises leaves both or neither changed.
        self._position: tuple[int, deque[bytes]] = (0, deque())
        self._count = 0

    def __bool__(self) -> bool:
        read, page = self._position
        return bool(page) or read < self._end

    def __len__(self) -> int:
        return self._count

    def append(self, state: State, arrived: float) -> bool:
        """Append a state. Return False if the spool is full. Raises OSError if the write fails."""
        record = _encode(state, arrived)
        if self._end + len(record) > LIMIT:
            return False
        view, at = memoryview(record), self._end
        while view:
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written
        self._count += 1
        self._end = at  # last: if an append fails earlier, the queue is unchanged
        return True

    def popleft(self) -> tuple[State, float]:
        """Remove and return the oldest state."""
        if not self._position[1]:
            self._fill()
        state, arrived = _decode(self._position[1].popleft())
        self._count -= 1
        if not self:
            self._position, self._end, self._count = (0, deque()), 0, 0
            self._file.truncate(0)
        return state, arrived

    def _fill(self) -> None:
        size, read = PAGE, self._position[0]
        while True:
            data = os.pread(self._file.fileno(), min(size, self._end - read), read)
            whole = data.rfind(b"\n") + 1
            if whole:
                break
            size *= 2  # one record is longer than the page
        self._position = (read + whole, deque(data[:whole].splitlines()))

    def close(self) -> None:
        """Delete the file and drop its records."""
        self._position, self._end, self._count = (0, deque()), 0, 0
        self._file.close()


def _encode(state: State, arrived: float) -> bytes:
    time = None if state.timestamp is None else state.timestamp.timestamp()
    facts = [
        arrived, state.job_id, state.task_id, state.tag, state.status, state.message, time, state.version, state.event_id,
        None if state.payload is None else dict(state.payload), state.schema_version,
    ]  # fmt: skip
    return json.dumps(facts, separators=(",", ":"), default=dict).encode() + b"\n"


def _decode(record: bytes) -> tuple[State, float]:
    arrived, job_id, task_id, tag, status, message, time, version, event_id, payload, schema = json.loads(record)
    when = None if time is None else moment(time)
    return State(job_id, task_id, tag, status, message, when, version, event_id, payload, schema), arrived
