"""Captured output of items. Of long output, the beginning and the end are kept, with the number of bytes between."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Self, TextIO

from headway.core.failure import kept_text

#: Bytes kept of one item's output: half from the beginning, half from the end.
LIMIT = 65_536


class Captured:
    """Output collected piece by piece. It uses at most about twice its limit of memory."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        #: Bytes dropped from the middle.
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Append output."""
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
        """Whether nothing was left out."""
        return not self._dropped and len(self._tail) <= self._half

    def text(self) -> str:
        """Return the whole text, or head and tail with the number of bytes left out between."""
        self._shorten()
        if not self._dropped:
            return (self._head + self._tail).decode(errors="replace")
        gap = f"\n... {self._dropped:,} bytes left out ...\n"
        return self._head.decode(errors="replace") + gap + self._tail.decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line that is not blank."""
        # If nothing was dropped, head and tail are contiguous.
        kept = self._tail if self._dropped else self._head + self._tail
        lines = kept.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _shorten(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._dropped += surplus


class Printing:
    """Captures the output of each item in a worker and also passes it on.

    Call `begin` when an item starts and `end` to get its output. With one item at a time, all output is that item's,
    including that of its threads. With several, only the output of its own thread or task is. Output that bypasses
    Python's streams (C code, a child process) is not captured.
    """

    def __init__(self, *, several: bool) -> None:
        self._alone: Captured | None = None
        self._apart: ContextVar[list[Captured]] | None = ContextVar("printed") if several else None
        self._copies: dict[str, tuple[_Tee, TextIO]] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], _Tee, TextIO]] = []
        self._out: TextIO | None = None
        self._err: TextIO | None = None

    def enter_worker(self) -> None:
        """Start capturing. Called again, it also captures streams that were replaced meanwhile."""
        before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        before = {name: stream for name, stream in before.items() if not isinstance(stream, _Tee)}
        copies: dict[str, Any] = {
            name: _Tee(stream, self._add) for name, stream in before.items() if stream is not None
        }
        for name, copy in copies.items():
            setattr(sys, name, copy)
            self._copies[name] = copy, before[name]
        self._out, self._err = sys.stdout, sys.stderr
        # Logging handlers created on import still refer to the old streams.
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in {each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                for name, copy in copies.items():
                    if handler.stream is before[name]:
                        handler.setStream(copy)
                        self._handlers.append((handler, copy, before[name]))

    def leave_worker(self) -> None:
        """Stop capturing. Streams that other code installed meanwhile stay."""
        for name, (copy, before) in self._copies.items():
            with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
                copy.flush()
            if getattr(sys, name) is copy:
                setattr(sys, name, before)
        for handler, seen, stream in self._handlers:
            if handler.stream is seen:
                handler.setStream(stream)

    def begin(self) -> None:
        """Start capturing an item's output."""
        if self._apart is None:
            self._alone = None
            if sys.stdout is not self._out or sys.stderr is not self._err:
                self._restore()
        else:
            self._apart.set([])

    def end(self) -> str | None:
        """Return the item's output so far; None if it printed nothing."""
        captured: Captured | None
        if self._apart is None:
            captured, self._alone = self._alone, None
        else:
            captured = next(iter(self._apart.get([])), None)
        return None if captured is None else kept_text(captured.text())

    def _restore(self) -> None:
        """Reinstall our streams after the previous item replaced them.

        Not done with concurrent items, where a running one may have.
        """
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
        if holder is not None:  # otherwise a thread started by the function, whose item is unknown
            if not holder:
                holder.append(Captured())
            holder[0].add(data)


class _Tee:
    """A stream that also reports what is written to it. It delegates everything else."""

    def __init__(self, stream: TextIO, tell: Callable[[str], None]) -> None:
        self._stream, self._tell = stream, tell
        # Notebook streams forward every write at once, which would mix the output of two workers within a line.
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
        """Flush only: other items still use the stream."""
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
