"""How parent and workers talk: frames of JSON over a socket, and a shared page that says what runs right now.

Items travel as the JSON text they are stored as, so the parent never decodes a payload. Frames to a worker:

    {"work": [[idx, attempts, payload], ...]}     to be run, in this order
    {"recall": true}                              give back what has not begun
    {"stop": true}                                the same, then end

and from it:

    {"done": [[idx, seconds, result or null], ...],
     "failed": [[idx, attempts, seconds, type, message, frame, detail, retryable], ...]}
    {"back": [idx, ...]}                          the answer to recall and stop
"""

from __future__ import annotations

import json
import mmap
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")
_SLOT = struct.Struct("<qd")


class Wire:
    """One end of the socket. A worker's blocks; the parent's never does: what a worker does not take yet waits here, so
    that two ends which both have much to say cannot wait for each other."""

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        self.socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        end.setblocking(blocking)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: str) -> None:
        """Send a frame, as far as it goes; `push` sends the rest."""
        data = frame.encode()
        self._outgoing += _LENGTH.pack(len(data)) + data
        self.push()

    def push(self) -> None:
        """Go on sending what waits."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def receive(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:  # reset: the other end died with our words unread
            return False
        self._incoming += data
        return bool(data)

    def frames(self) -> Iterator[Any]:
        """The frames that are complete."""
        start, size = 0, len(self._incoming)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + _LENGTH.size + length
            if end > size:
                break
            yield json.loads(self._incoming[start + _LENGTH.size : end])
            start = end
        del self._incoming[:start]

    def close(self) -> None:
        self.socket.close()


class Slots:
    """Which item each slot of a worker runs and since when, readable by the parent after the worker was killed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._page = mmap.mmap(-1, max(mmap.PAGESIZE, count * _SLOT.size))

    def begin(self, slot: int, idx: int, now: float) -> None:
        _SLOT.pack_into(self._page, slot * _SLOT.size, idx + 1, now)

    def end(self, slot: int) -> None:
        _SLOT.pack_into(self._page, slot * _SLOT.size, 0, 0.0)

    def running(self) -> list[tuple[int, float]]:
        """(idx, began by the monotonic clock, which all processes of a machine share)."""
        found = []
        for slot in range(self.count):
            idx, began = _SLOT.unpack_from(self._page, slot * _SLOT.size)
            if idx:
                found.append((idx - 1, began))
        return found

    def close(self) -> None:
        self._page.close()
