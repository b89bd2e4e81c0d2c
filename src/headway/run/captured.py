"""What was printed, as far as it is kept: of long output the beginning and the end, and how much is missing between."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Self, TextIO

from headway.failure import kept_text

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
        # The newest bytes are in the tail; as long as nothing was dropped, the head is what comes before them.
        kept = self._tail if self._dropped else self._head + self._tail
        lines = kept.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _shorten(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._dropped += surplus


class Printing:
    """What the items of a worker print, apart for each, besides going where it went before.

    `begin` at the start of an item, `end` for what it has printed. With one item at a time everything that is printed is
    that item's, also by threads it started; with several, what its own thread or task prints. What goes past Python's
    streams (C code, a child process) is not seen here.
    """

    def __init__(self, *, several: bool) -> None:
        self._alone: Captured | None = None
        self._apart: ContextVar[list[Captured]] | None = ContextVar("printed") if several else None
        self._copies: dict[str, tuple[_Tee, TextIO]] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], _Tee, TextIO]] = []
        self._out: TextIO | None = None
        self._err: TextIO | None = None

    def enter_worker(self) -> None:
        """In the worker: from now on see what is printed. Called again it sees streams that somebody replaced meanwhile."""
        before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        before = {name: stream for name, stream in before.items() if not isinstance(stream, _Tee)}
        copies: dict[str, Any] = {
            name: _Tee(stream, self._add) for name, stream in before.items() if stream is not None
        }
        for name, copy in copies.items():
            setattr(sys, name, copy)
            self._copies[name] = copy, before[name]
        self._out, self._err = sys.stdout, sys.stderr
        # Handlers that were made when the user's module was imported write to the streams of that time.
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in {each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                for name, copy in copies.items():
                    if handler.stream is before[name]:
                        handler.setStream(copy)
                        self._handlers.append((handler, copy, before[name]))

    def leave_worker(self) -> None:
        """See nothing more. What somebody else put into our place meanwhile stays there."""
        for name, (copy, before) in self._copies.items():
            with suppress(OSError, ValueError):  # nobody is there to read it, or it was closed
                copy.flush()
            if getattr(sys, name) is copy:
                setattr(sys, name, before)
        for handler, seen, stream in self._handlers:
            if handler.stream is seen:
                handler.setStream(stream)

    def begin(self) -> None:
        if self._apart is None:
            self._alone = None
            if sys.stdout is not self._out or sys.stderr is not self._err:
                self._restore()
        else:
            self._apart.set([])

    def end(self) -> str | None:
        """What the item has printed so far, to be kept; None if nothing."""
        captured: Captured | None
        if self._apart is None:
            captured, self._alone = self._alone, None
        else:
            captured = next(iter(self._apart.get([])), None)
        return None if captured is None else kept_text(captured.text())

    def _restore(self) -> None:
        """The item before put other streams in the place of ours; where several run at once, one may be at it now."""
        if self._out is not None:
            sys.stdout = self._out
        if self._err is not None:
            sys.stderr = self._err

    def _add(self, text: str) -> None:
        data = text.encode(errors="replace")
        if self._apart is None:
            captured = self._alone
            if captured is None:
                captured = self._alone = Captured()
            captured.add(data)
            return
        holder = self._apart.get(None)
        if holder is not None:  # else nobody's: a thread that the function started
            if not holder:
                holder.append(Captured())
            holder[0].add(data)


class _Tee:
    """A stream that also tells somebody what is written to it. In all else it is the stream itself."""

    def __init__(self, stream: TextIO, tell: Callable[[str], None]) -> None:
        self._stream, self._tell = stream, tell
        # Those of a notebook pass on every word as it comes, and the words of two workers would mix within a line.
        self._by_line = not isinstance(stream, io.TextIOWrapper)
        self._rest = ""

    def write(self, text: str) -> int:
        self._tell(text)
        if not self._by_line:
            return self._stream.write(text)
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._stream.write(lines + newline)
        return len(text)

    def flush(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, ""
            self._stream.write(rest)
        self._stream.flush()

    def close(self) -> None:
        """Whoever closes it has written everything; the others go on printing."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
