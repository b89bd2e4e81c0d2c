"""How a process ends: signals, drain budgets, what must not cross a fork, and the files it may still open."""

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

#: What asks a process to stop. SIGHUP comes when a terminal or an ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Flag(threading.Event):
    """An event for code that a raising signal handler may interrupt, as RQ's job timeout does.

    An exception that strikes inside `threading.Event`, which is written in Python, leaves its lock held, and every later
    ``set`` and ``wait`` hangs. Here each waiter waits for a lock of its own, by one call into C that either took it or
    did not, and nobody else waits for that lock. A waiter also looks by itself now and then, because whoever set the flag
    may have been interrupted before it woke everybody.
    """

    _LOOK_SECONDS = 1.0

    def __init__(self) -> None:
        self._flag = False
        self._waiters: set[_thread.LockType] = set()

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True  # before the waiters are woken: one that comes later sees it
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # it was woken already
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
    """Run ``work`` where no signal handler can interrupt it: Python runs handlers in the main thread only, so there it
    runs in another one. If the caller is interrupted, the work goes on to its end."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    answers: list[T] = []
    errors: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001  (it is raised where it was asked for)
            errors.append(error)
        finally:
            done.release()

    def begin() -> None:  # not in the main thread: interrupted in `start`, a thread would hang before its first line
        try:
            threading.Thread(target=run, name="headway-undisturbed", daemon=True).start()
        except RuntimeError:
            run()

    try:
        _thread.start_new_thread(begin, ())
    except RuntimeError:  # the interpreter is ending (`atexit`), or no thread is to be had
        return work()
    done.acquire()
    if errors:
        raise errors[0]
    return answers[0]


def held_here(lock: threading.RLock) -> bool:
    """Whether this very thread holds ``lock``, as `threading.Condition` asks it."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001


def refuse_within(lock: threading.RLock, what: str) -> None:
    """Before ``with lock``: raise where it is held by the call that our caller interrupted, as a signal handler does. That
    call goes on when the caller is done, so it would wait for itself, and to go in would split what the other one does."""
    if held_here(lock):
        raise HeadwayError(
            f"{what} is being written by the call that this one interrupts.",
            hint="A signal handler that is to write sets a flag, or raises; what it interrupted then writes.",
        )


def wait_for_children() -> None:
    """Undo an *ignore* of SIGCHLD, as some supervisors leave it behind: the kernel then forgets at once how a child ended,
    and every wait for one fails. Only for processes that are ours: in a program it is the program's choice."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """SIGKILL for 9; the real-time signals but two have no name, and who is killed by one of them is killed all the same."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def check_descriptors(count: int) -> None:
    """Raise the OSError of who cannot open ``count`` more files; for a moment they are open."""
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in taken:
            os.close(descriptor)


class Shutdown:
    """What signals asked for. The first of `STOP_SIGNALS` means *finish what you hold*, the second *now*."""

    def __init__(self) -> None:
        self.stop = Flag()
        self.abandon = Flag()
        self.signum: int | None = None
        self._requests = count()
        self._wakers: list[Callable[[], None]] = []

    def request(self, signum: int = signal.SIGTERM) -> None:
        self._announce(self._decide(signum))

    def request_from_handler(self, signum: int) -> None:
        """`request` for a signal handler, which interrupts the main thread anywhere: also inside `Event.wait` with
        the event's lock in hand, where setting the event would wait for itself. So another thread sets it."""
        _thread.start_new_thread(self._announce, (self._decide(signum),))

    def _decide(self, signum: int) -> threading.Event:
        if next(self._requests):  # atomic: of two signals at once one is the second
            return self.abandon
        # A lost terminal asks for what SIGTERM asks for, and ends with the same code.
        self.signum = signal.SIGTERM if signum == signal.SIGHUP else signum
        return self.stop

    def _announce(self, event: threading.Event) -> None:
        event.set()
        for wake in self._wakers:
            wake()

    def on_request(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at each request, in any thread and at any moment, so it may only set or write something."""
        self._wakers.append(wake)

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signum or signal.SIGTERM)

    def check(self) -> None:
        """Raise `Stopping` if a shutdown was requested: no new operation begins after it."""
        if self.stop.is_set():
            raise Stopping("The process is shutting down and accepts no new work.")


#: Signal -> (handler of this process, handler that a process it forks gets instead).
_own_handlers: dict[int, tuple[Any, Any]] = {}
_forking = threading.local()


def own_handler(number: int, handler: Callable[[int, FrameType | None], object]) -> Any:
    """Install a signal handler that forked children do not keep, and return the one before it.

    A child of `multiprocessing` waits for nobody who would read our flags, and its parent ends it by SIGTERM. Resetting the
    handler in the child alone is not enough: Python forgets a signal that a Python handler received before the child has
    started. So these signals are blocked during a fork (`_before_fork`) and delivered when the child has its own handlers.
    """
    before = signal.signal(number, handler)
    before = signal.SIG_DFL if before is None else before  # None: not installed by Python, which cannot restore it
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
            if signal.getsignal(number) is own:  # not one that the application has installed since
                signal.signal(number, before)
        _own_handlers.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@contextmanager
def on_signals(shutdown: Shutdown) -> Iterator[Shutdown]:
    """Route `STOP_SIGNALS` to ``shutdown``. Outside the main thread Python allows no handlers: then nothing is
    installed and the caller's own `Shutdown.request` is the only way. A SIGHUP that is ignored stays so: nohup asked
    for that."""
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return

    owner = os.getpid()

    def handle(signum: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            shutdown.request_from_handler(signum)
            return
        # A process that was forked without Python's hooks (by C code) still has our handler: it acts on the signal as if
        # we had not been there.
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
    """A share of time that several steps of a shutdown spend together."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._deadline - self._clock())

    @property
    def spent(self) -> bool:
        return self.left == 0.0


#: Who looks several times a second, and finds that so long has passed, stood still meanwhile.
STANDSTILL_SECONDS = 1.0
LOOK_SECONDS = 0.5


class Stopwatch:
    """The time that something takes, without that in which this process, and with it what it waits for, stood still (a
    container that was paused, Ctrl-Z). It is seen by asking at least every `LOOK_SECONDS`; several threads may ask.

    Who could not ask because this process was computing did not stand still: of the time between, that is the processor's.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._began = self._looked_at = time.monotonic()
        self._computed = time.process_time()

    def elapsed(self) -> float:
        with self._asking:
            now, computed = time.monotonic(), time.process_time()
            still = now - self._looked_at - (computed - self._computed)
            if still > STANDSTILL_SECONDS:
                self._began += still
            self._looked_at, self._computed = now, computed
            return now - self._began


class ForkGuard:
    """Remembers the process that made a resource. Connections, listeners and threads do not survive a fork:
    a child that used them would read its parent's replies."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def crossed(self) -> bool:
        return os.getpid() != self._pid

    def check(self) -> None:
        if self.crossed:
            raise HeadwayError(
                f"{self._what} was made before this process was forked and cannot be used here.",
                hint="Make it after the fork, in the process that uses it.",
            )
