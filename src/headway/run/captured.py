"""What was printed, as far as it is kept: of long output the beginning and the end, and how much is missing between."""

from __future__ import annotations

#: Bytes kept of what one item printed: half from the beginning, half from the end.
LIMIT = 65_536


class Captured:
    """Bytes that arrive piece by piece. It never holds more than about twice its limit, however much is printed."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        #: Bytes that were dropped from the middle for good.
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half:
                self._shorten()

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return not self._dropped and len(self._tail) <= self._half

    def text(self) -> str:
        """All of it, or head and tail with a line between that says how much was left out."""
        self._shorten()
        if not self._dropped:
            return (self._head + self._tail).decode(errors="replace")
        gap = f"\n... {self._dropped:,} bytes left out ...\n"
        return self._head.decode(errors="replace") + gap + self._tail.decode(errors="replace")

    def last_line(self) -> str:
        """The last line that says something."""
        # The newest bytes are in the tail, unless all of it fitted into the head.
        lines = (self._tail or self._head).decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _shorten(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._dropped += surplus
