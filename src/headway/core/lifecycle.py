"""Process lifecycle: signals, shutdown, fork safety and file descriptors."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any, TypeVar

from headway.errors import HeadwayError, Stopping

T = TypeVar("T")

#: Signals that ask a process to stop. SIGHUP is sent when a terminal or an ssh connection closes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Flag(threading.Event):
    """An event that stays usable when a signal handler raises inside it, as RQ's job timeout does.

    `threading.Event` is written in Python. An exception inside it can leave its lock held, and every later ``set`` and
    ``wait`` hangs. Here each waiter has its own lock and acquires it in one C call, which either succeeds or does not.
    Waiters also poll the flag, because the thread in ``set`` may be interrupted before it has woken all of them.
    """

    _LOOK_SECONDS = 1.0

    def __init__(self) -> None:
        self._flag = False
        self._waiters: set[_thread.LockType] = set()

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True  # set before the loop, so that waiters added later see it
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # already woken
                waiter.release()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.add(waiter)
        try:
            while not self._flag:
                left = self._LOOK_SECONDS if deadline is None else min(self._LOOK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    break
                waiter.acquire(timeout=left)
            return self._flag
        finally:
            self._waiters.discard(waiter)


def undisturbed(work: Callable[[], T]) -> T:
    """Run ``work`` where no signal handler can interrupt it.

    Python runs signal handlers in the main thread only. So a call from the main thread runs ``work`` in another thread. If
    the caller is interrupted, ``work`` still runs to completion.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    answers: list[T] = []
    errors: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001  (raised again in the caller)
            errors.append(error)
        finally:
            done.release()

    def begin() -> None:  # not in the main thread: if `start` is interrupted there, the new thread hangs
        try:
            threading.Thread(target=run, name="headway-undisturbed", daemon=True).start()
        except RuntimeError:
            run()

    try:
        _thread.start_new_thread(begin, ())
    except RuntimeError:  # the interpreter is exiting (`atexit`), or no thread can be started
        return work()
    done.acquire()
    if errors:
        raise errors[0]
    return answers[0]


def held_here(lock: threading.RLock) -> bool:
    """Return whether the current thread holds ``lock``, by the method that `threading.Condition` uses."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001


def refuse_within(lock: threading.RLock, what: str) -> None:
    """Raise if the current thread already holds ``lock``. Call it before ``with lock``.

    This happens when a signal handler interrupts a call that holds the lock. Waiting would deadlock, and entering the
    reentrant lock would run inside the interrupted critical section.
    """
    if held_here(lock):
        raise HeadwayError(
            f"{what} is being written by the call that this one interrupts.",
            hint="A signal handler that is to write sets a flag, or raises; what it interrupted then writes.",
        )


def wait_for_children() -> None:
    """Restore the default for SIGCHLD if it is ignored, as some supervisors leave it.

    While it is ignored, the kernel discards exit statuses and waiting for a child fails. Call it only in Headway's own
    processes: in another program the choice belongs to that program.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """Return the name of a signal (SIGKILL for 9). Most real-time signals have none: ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def check_descriptors(count: int) -> None:
    """Raise OSError if this process cannot open ``count`` more files. Opens them briefly to find out."""
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in taken:
            os.close(descriptor)


class Shutdown:
    """A shutdown request. The first stop signal means *finish the current work*, the second *stop now*."""

    def __init__(self) -> None:
        self.stop = Flag()
        self.abandon = Flag()
        self.signum: int | None = None
        self._requests = count()
        self._wakers: list[Callable[[], None]] = []

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Request a shutdown. A second request abandons the current work."""
        self._announce(self._decide(signum))

    def request_from_handler(self, signum: int) -> None:
        """Request a shutdown from a signal handler.

        The handler may have interrupted `Event.wait` while it holds the event's lock. Setting the event here would deadlock,
        so another thread sets it.
        """
        _thread.start_new_thread(self._announce, (self._decide(signum),))

    def _decide(self, signum: int) -> threading.Event:
        if next(self._requests):  # atomic: exactly one of two simultaneous signals is the first
            return self.abandon
        # SIGHUP has the same meaning and exit code as SIGTERM.
        self.signum = signal.SIGTERM if signum == signal.SIGHUP else signum
        return self.stop

    def _announce(self, event: threading.Event) -> None:
        event.set()
        for wake in self._wakers:
            wake()

    def on_request(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at each request. It runs in any thread at any moment, so it must only set a flag or write."""
        self._wakers.append(wake)

    @property
    def exit_code(self) -> int:
        """The exit code by shell convention: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signum or signal.SIGTERM)

    def check(self) -> None:
        """Raise `Stopping` if a shutdown was requested. Call it before a new operation."""
        if self.stop.is_set():
            raise Stopping("The process is shutting down and accepts no new work.")


#: Signal -> (handler in this process, handler to restore in a forked child).
_own_handlers: dict[int, tuple[Any, Any]] = {}
_forking = threading.local()


def own_handler(number: int, handler: Callable[[int, FrameType | None], object]) -> Any:
    """Install a signal handler that forked children do not inherit. Return the previous handler.

    A `multiprocessing` child never reads our flags, and its parent stops it with SIGTERM. Resetting the handler in the
    child is not enough: Python drops signals that a Python handler received before the child has started. So the signals
    are blocked during the fork (`_before_fork`) and delivered when the child has its own handlers.
    """
    before = signal.signal(number, handler)
    before = signal.SIG_DFL if before is None else before  # None: a handler from C code, which Python cannot restore
    _own_handlers[number] = (handler, before)
    return before


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _own_handlers) if _own_handlers else None


def _after_fork_in_parent() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    if _forking.mask is not None:
        for number, (own, before) in _own_handlers.items():
            if signal.getsignal(number) is own:  # keep a handler that the application installed later
                signal.signal(number, before)
        _own_handlers.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@contextmanager
def on_signals(shutdown: Shutdown) -> Iterator[Shutdown]:
    """Route `STOP_SIGNALS` to ``shutdown`` while the block runs.

    Python allows signal handlers only in the main thread. In another thread nothing is installed, and only
    `Shutdown.request` can request a shutdown. An ignored SIGHUP stays ignored, because nohup sets it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return

    owner = os.getpid()

    def handle(signum: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            shutdown.request_from_handler(signum)
            return
        # A process forked by C code, without Python's hooks, still has this handler. Restore the previous handler there
        # and deliver the signal to it.
        signal.signal(signum, before[signal.Signals(signum)])
        signal.raise_signal(signum)

    wanted = [
        number for number in STOP_SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
    ]
    outer = {number: _own_handlers.get(number) for number in wanted}
    before = {number: own_handler(number, handle) for number in wanted}
    try:
        yield shutdown
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
            if (entry := outer[number]) is None:
                _own_handlers.pop(number, None)
            else:
                _own_handlers[number] = entry


class Budget:
    """A time budget that several steps of a shutdown share."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return max(0.0, self._deadline - self._clock())

    @property
    def spent(self) -> bool:
        return self.left == 0.0


#: A longer gap between two polls, minus CPU time, means that the process was suspended.
STANDSTILL_SECONDS = 1.0
#: The longest interval between two polls of a `Stopwatch`.
LOOK_SECONDS = 0.5


class Stopwatch:
    """Measures elapsed time without the time in which this process was suspended.

    A paused container or Ctrl-Z suspends the process and its children. Callers must poll `elapsed` at least every
    `LOOK_SECONDS`; several threads may do so. CPU time between two polls is not suspension: the process was computing.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._began = self._looked_at = time.monotonic()
        self._computed = time.process_time()

    def elapsed(self) -> float:
        """Return seconds since the start, without suspended time."""
        with self._asking:
            now, computed = time.monotonic(), time.process_time()
            still = now - self._looked_at - (computed - self._computed)
            if still > STANDSTILL_SECONDS:
                self._began += still
            self._looked_at, self._computed = now, computed
            return now - self._began


class ForkGuard:
    """Detects that a resource is used in a forked child.

    Connections, listeners and threads do not survive a fork: a child that used them would read its parent's replies.
    """

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def crossed(self) -> bool:
        """Whether this process is a child of the one that created the resource."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise `HeadwayError` in a forked child."""
        if self.crossed:
            raise HeadwayError(
                f"{self._what} was made before this process was forked and cannot be used here.",
                hint="Make it after the fork, in the process that uses it.",
            )
