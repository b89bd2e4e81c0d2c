"""The process of a handler: interrupt it, and restore what a handler may have changed."""

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

#: Signals whose handlers the worker relies on.
_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE,
)  # fmt: skip
#: The C module below `signal`, without the conversion to enums, which would take longer than the call, for every task.
_signal: Any = import_module("_signal")
_SET, _ALARM = int(signal.SIG_SETMASK), int(signal.ITIMER_REAL)


class Interrupts:
    """Raise an exception in a handler that runs in the main thread, by SIGUSR1.

    ``wanted`` returns the exception to raise, or None; the signal handler calls it. It raises only inside `armed`, so a
    signal that comes too late does nothing.
    """

    def __init__(self, wanted: Callable[[], BaseException | None] | None = None) -> None:
        self._next = wanted or self._pop_wanted
        self._wanted: BaseException | None = None
        self._armed = self._deferring = False
        self._deferred: BaseException | None = None
        self._thread = threading.main_thread().ident
        own_handler(signal.SIGUSR1, self._handle)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Allow exceptions to be raised inside this block."""
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
        """Raise ``error`` in the main thread, if it is inside `armed`. Any thread may call this."""
        self._wanted = error
        assert self._thread is not None
        if self._armed:
            signal.pthread_kill(self._thread, signal.SIGUSR1)

    def _pop_wanted(self) -> BaseException | None:
        wanted, self._wanted = self._wanted, None
        return wanted

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._armed or (error := self._next()) is None:
            return
        if self._deferring:
            self._deferred = error
            return
        raise error


class Descriptors:
    """Detects a handler that closed the worker's descriptors, as code that daemonizes its process does.

    The database's descriptors are closed then too. SQLite would continue to use their numbers, for whichever file gets them
    next.
    """

    def __init__(self) -> None:
        self._own, other = os.pipe()
        os.close(other)
        self._inode = os.fstat(self._own).st_ino
        weakref.finalize(self, _close, self._own, self._inode)

    @property
    def are_intact(self) -> bool:
        """Whether our own descriptor is still open."""
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
    """Saves and restores the process state that a handler may change: directory, umask, signal handlers and alarm.

    Otherwise the next task would write to another directory, could not be ended at its timeout, or would be killed by an
    alarm, and the worker would not receive a shutdown signal.
    """

    def __init__(self) -> None:
        self._directory: str | None = None
        with suppress(OSError):  # it was deleted, as a replaced release is
            self._directory = os.getcwd()
        self._mask = os.umask(0o77)
        os.umask(self._mask)
        self._blocked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # None: a handler that was not set by Python, which cannot restore it.
        known = [(number, _signal.getsignal(number)) for number in map(int, _SIGNALS)]
        self._handlers = [(number, handler) for number, handler in known if handler is not None]
        # An alarm that is set before any handler runs is the application's, and stays.
        self._has_alarm = signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)

    def restore(self) -> None:
        """Restore the state after a handler. Only for the main thread; takes some microseconds."""
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
