"""Handlers that run in the worker's process: how they are ended, and that they leave the process as they found it."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from headway.core.lifecycle import own_handler

#: Signals by which a worker is told something, or that tell it something.
_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE,
)  # fmt: skip
#: What is below `signal`: without its conversion to enums, which takes longer than the call. Every task pays for it.
_signal: Any = import_module("_signal")
_SET, _ALARM = int(signal.SIG_SETMASK), int(signal.ITIMER_REAL)


class Interrupts:
    """Raise an exception in a handler that runs in the main thread, by SIGUSR1.

    ``asked`` returns the exception to raise, or None; the signal handler calls it. It raises only between `armed` and its
    end, so a signal that comes too late does nothing.
    """

    def __init__(self, asked: Callable[[], BaseException | None] | None = None) -> None:
        self._asked = asked or self._take_wanted
        self._wanted: BaseException | None = None
        self._armed = self._deferring = False
        self._deferred: BaseException | None = None
        self._thread = threading.main_thread().ident
        own_handler(signal.SIGUSR1, self._handle)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._wanted, self._deferred, self._armed = None, None, True
        try:
            yield
        finally:
            self._armed = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise after this block instead of inside it. For the main thread; in others it does nothing."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._armed and self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error

    def raise_in_handler(self, error: BaseException) -> None:
        self._wanted = error
        assert self._thread is not None
        if self._armed:
            signal.pthread_kill(self._thread, signal.SIGUSR1)

    def _take_wanted(self) -> BaseException | None:
        wanted, self._wanted = self._wanted, None
        return wanted

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._armed or (error := self._asked()) is None:
            return
        if self._deferring:
            self._deferred = error
            return
        raise error


class Descriptors:
    """Whether a handler left the worker's descriptors alone. One that closes them all, as what makes a daemon of its process
    does, has closed the database's: SQLite would go on by their numbers, in whichever file gets them next."""

    def __init__(self) -> None:
        self._own, other = os.pipe()
        os.close(other)
        self._inode = os.fstat(self._own).st_ino
        weakref.finalize(self, _close, self._own, self._inode)

    @property
    def are_intact(self) -> bool:
        return _is_open(self._own, self._inode)


def _is_open(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _close(descriptor: int, inode: int) -> None:
    if _is_open(descriptor, inode):
        os.close(descriptor)


class ProcessState:
    """What is the process's and not a task's: its directory, its mask of files, how it takes signals, its alarm. A handler may
    change them, for itself: left as they are, the next task would be written elsewhere, could not be ended at its timeout, or
    would be killed by an alarm; and the worker would not hear that it is to end."""

    def __init__(self) -> None:
        self._directory: str | None = None
        with suppress(OSError):  # it was deleted, as a release that another one replaced
            self._directory = os.getcwd()
        self._mask = os.umask(0o77)
        os.umask(self._mask)
        self._blocked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # None: a handler that is not Python's, which cannot put it back.
        known = [(number, _signal.getsignal(number)) for number in map(int, _SIGNALS)]
        self._handlers = [(number, handler) for number, handler in known if handler is not None]
        # One that runs before any handler is the application's, and stays.
        self._has_alarm = signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)

    def restore(self) -> None:
        """By the main thread, when a handler has ended. It takes some microseconds."""
        if not self._has_alarm:
            signal.setitimer(_ALARM, 0)
        for number, handler in self._handlers:
            if _signal.getsignal(number) != handler:
                signal.signal(number, handler)
        _signal.pthread_sigmask(_SET, self._blocked)
        os.umask(self._mask)
        if self._directory is not None and not _is_here(self._directory):
            with suppress(OSError):  # it was deleted meanwhile
                os.chdir(self._directory)


def _is_here(directory: str) -> bool:
    try:
        return os.getcwd() == directory
    except OSError:
        return False
