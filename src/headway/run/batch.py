"""A batch of items, as it runs in somebody's executor. `headway.run.executor` submits it and records what comes back.

Everything that comes back is text and numbers: what the function returns or raises need not survive a pickler. A batch
is short: one that meets long items gives back what it has not begun, so nothing is ever recalled from an executor that
knows no recalling.

Parent and batches of one machine share a small file, the page: it says which item each batch runs, so that the item which
kills its process is found, and it tells batches to give back what they have not begun. A batch on another machine does
without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import mmap
import os
import platform
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from headway._version import __version__
from headway.lifecycle import LOOK_SECONDS, Stopwatch
from headway.run.attempt import TimeIsUp, TimeLimit, decoded, failed_row, kept_result, watch
from headway.run.captured import Printing
from headway.run.results import Keep

#: A batch that has run for this long gives back what it has not begun.
SPELL_SECONDS = 0.5
#: Of a slot: the item that runs (its index + 1, or 0), since when, the item begun last, and the process.
_SLOT = struct.Struct("<qdqq")
_RUNNING = struct.Struct("<q")
#: Before the slots: whether batches are to give back, whether the run goes on, its process, and the machine.
_HEADER = struct.Struct("<BBq246s")
#: Batches under way that have a slot; any further ones do without.
SLOTS = 1024


@dataclass(frozen=True, slots=True)
class Orders:
    """What is the same for every batch of a run."""

    function: Callable[[Any], Any]
    keep: Keep
    timeout: float | None
    page: str


class Page:
    """The file. Its owner makes it, for this user alone, and removes it; others open it if it is theirs to see."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            size = _HEADER.size + SLOTS * _SLOT.size
            if create:
                os.truncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        if create:
            _HEADER.pack_into(self._memory, 0, 0, 1, os.getpid(), _machine())
        _, _, self.owner, machine = _HEADER.unpack_from(self._memory, 0)
        #: Process numbers and clocks mean the same here as for the owner.
        self.ours = machine.rstrip(b"\0") == _machine()

    @classmethod
    def make(cls) -> Page:
        return cls(Path(tempfile.mkdtemp(prefix="headway-")) / "page", create=True)

    def remove(self) -> None:
        """The run is over."""
        self._memory[1] = 0
        with suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    @property
    def recalled(self) -> bool:
        return self._memory[0] == 1

    def recall(self, wanted: bool) -> None:
        self._memory[0] = int(wanted)

    @property
    def goes_on(self) -> bool:
        """Whether the run does."""
        if self._memory[1] != 1:
            return False
        try:
            os.kill(self.owner, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def clear(self, slot: int) -> None:
        _SLOT.pack_into(self._memory, _HEADER.size + slot * _SLOT.size, 0, 0.0, 0, 0)

    def begin(self, slot: int, idx: int, now: float) -> None:
        _SLOT.pack_into(self._memory, _HEADER.size + slot * _SLOT.size, idx + 1, now, idx + 1, os.getpid())

    def end(self, slot: int) -> None:
        _RUNNING.pack_into(self._memory, _HEADER.size + slot * _SLOT.size, 0)

    def running(self, slot: int) -> tuple[int, float] | None:
        """(idx, since when by the machine's monotonic clock) of what runs there."""
        idx, began, _, _ = self._slot(slot)
        return (idx - 1, began) if idx else None

    def last(self, slot: int) -> tuple[int, int] | None:
        """(idx, process) of what was begun last there, whether or not it has ended."""
        _, _, last, pid = self._slot(slot)
        return (last - 1, pid) if last else None

    def _slot(self, slot: int) -> tuple[int, float, int, int]:
        return _SLOT.unpack_from(self._memory, _HEADER.size + slot * _SLOT.size)


def _machine() -> bytes:
    """What tells this machine, since it was started, and this namespace of processes from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()
    except OSError:
        return platform.node().encode()[:200]


# ---------------------------------------------------------------------------------------------------------------------
# In the executor

#: The pages of the runs that this process works for; threads of it may work for several at once.
_pages: dict[str, Page] = {}


def probe(orders: Orders) -> dict[str, Any]:
    """Whether the function arrives, and what can be done where it arrives."""
    page = _open(orders.page)
    return {"version": __version__, "page": page is not None, "main": _in_main_thread()}


def run(
    orders: Orders, ticket: int, slot: int | None, work: Sequence[tuple[int, int, str]], failures: int | None
) -> Any:
    """Run the items of ``work`` (idx, attempts, payload) one after the other; what became of them, as a frame of a worker
    process says it (`headway.run.wire`). After ``failures`` failures the rest is given back. The number of the ticket
    makes each call another one for an executor that takes calls with equal arguments for one, as Dask does."""
    page = _open(orders.page) if slot is not None else None
    done: list[tuple[Any, ...]] = []
    failed: list[tuple[Any, ...]] = []
    printed: list[tuple[int, str]] = []
    back: list[int] = []
    until = time.monotonic() + SPELL_SECONDS
    with _printing(orders.keep) as printing:
        for place, (idx, attempts, text) in enumerate(work):
            late = place and time.monotonic() > until
            if late or (page is not None and page.recalled) or (failures is not None and len(failed) >= failures):
                back = [each for each, _, _ in work[place:]]
                break
            began = time.monotonic()
            if page is not None and slot is not None:
                page.begin(slot, idx, began)
            if printing is not None:
                printing.begin()
            row, is_failure = _run_one(orders, idx, attempts, text, began, printing)
            (failed if is_failure else done).append(row)
            if not is_failure and orders.keep.printed == "all" and (words := _words(printing)):
                printed.append((idx, words))
            if page is not None and slot is not None:
                page.end(slot)
    where = f"{platform.node()} {os.getpid()}"
    return {
        "ticket": ticket, "done": done, "failed": failed, "printed": printed, "back": back,
        "where": where, "page": page is not None,
    }  # fmt: skip


def _run_one(
    orders: Orders, idx: int, attempts: int, text: str, began: float, printing: Printing | None
) -> tuple[tuple[Any, ...], bool]:
    process = os.getpid()
    try:
        result = _call(orders.function, decoded(text), orders.timeout)
        if os.getpid() != process:
            os._exit(0)  # a child that the function forked came back from it: it must not go on with our work
        seconds = time.monotonic() - began
        return (idx, seconds, kept_result(result, orders.keep)), False
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
        if os.getpid() != process:
            os._exit(0)
        return failed_row(idx, attempts, time.monotonic() - began, error, _words(printing)), True


def _words(printing: Printing | None) -> str | None:
    try:
        return None if printing is None else printing.end()
    except Exception:  # noqa: BLE001 - no memory left: what became of the item is worth more than its words
        return None


# ---- time -----------------------------------------------------------------------------------------------------------


def _call(function: Callable[[Any], Any], payload: Any, timeout: float | None) -> Any:
    if _is_async(function):
        return asyncio.run(_awaited(function, payload, timeout))
    if timeout is None:
        return function(payload)
    return (_call_with_alarm if _in_main_thread() else _call_in_thread)(function, payload, timeout)


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - a callable object may have an async __call__


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


async def _awaited(function: Callable[[Any], Any], payload: Any, timeout: float | None) -> Any:
    async with TimeLimit(timeout) if timeout is not None else nullcontext():
        return await function(payload)


def _call_with_alarm(function: Callable[[Any], Any], payload: Any, timeout: float) -> Any:
    """The alarm interrupts Python code; what C code does ends when that returns. It counts also the time in which this process
    stood still: then it is set for what is left."""
    armed, clock = [True], watch()
    began = clock.elapsed()

    def interrupt(_: int, __: FrameType | None) -> None:
        if not armed:
            return
        left = timeout - (clock.elapsed() - began)
        if left > 0:
            # Soon again: where no thread could be had that asks the watch, nobody else does. 0 would be no alarm at all.
            signal.setitimer(signal.ITIMER_REAL, max(0.001, min(left, LOOK_SECONDS)))
            return
        armed.clear()
        raise TimeIsUp(timeout)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        return function(payload)
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def _call_in_thread(function: Callable[[Any], Any], payload: Any, timeout: float) -> Any:
    """Nobody can end a thread: one that takes too long is left to itself, and what it returns then is nobody's."""
    answers: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(function(payload))
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
            errors.append(error)

    context = contextvars.copy_context()  # what it prints belongs to the item
    thread = threading.Thread(target=context.run, args=(work,), name="headway-item", daemon=True)
    thread.start()
    clock = Stopwatch()
    while thread.is_alive() and (left := timeout - clock.elapsed()) > 0:
        thread.join(min(left, LOOK_SECONDS))
    if errors:
        raise errors[0]
    if not answers:
        raise TimeIsUp(timeout)
    return answers[0]


# ---- what is printed ------------------------------------------------------------------------------------------------

#: Batches of one process run in threads beside each other, perhaps in the user's own process: they share what sees the
#: words, and the last one puts the streams back.
_sharing = threading.Lock()
_shared: Printing | None = None
_sharers = 0


@contextmanager
def _printing(keep: Keep) -> Iterator[Printing | None]:
    global _shared, _sharers
    if keep.printed == "none":
        yield None
        return
    with _sharing:
        if _shared is None:
            _shared = Printing(several=True)
        _shared.enter_worker()
        printing = _shared
        _sharers += 1
    try:
        yield printing
    finally:
        with _sharing:
            _sharers -= 1
            if not _sharers and _shared is not None:
                _shared.leave_worker()
                _shared = None


# ---- the process ----------------------------------------------------------------------------------------------------


def _open(path: str) -> Page | None:
    """The page, if it is here. This process is the executor's, and stays as it was found but for one thing: as long as the
    run goes on Ctrl-C is the run's to obey. A terminal sends it to every process, and an idle worker of a
    ProcessPoolExecutor that dies of it breaks the whole executor."""
    page = _pages.get(path)
    if page is None:
        try:
            page = Page(Path(path))
        except (OSError, ValueError):
            return None
        if not page.ours:
            return None
        for old, each in list(_pages.items()):
            if not each.goes_on:
                _pages.pop(old, None)
        _pages[path] = page
    if _in_main_thread() and page.owner != os.getpid():
        before = signal.getsignal(signal.SIGINT)
        if isinstance(before, _LeftToTheRun):
            before.page = page
        else:
            signal.signal(signal.SIGINT, _LeftToTheRun(page, before))
    return page


class _LeftToTheRun:
    """The handler of SIGINT in a process of the executor."""

    def __init__(self, page: Page, before: Any) -> None:
        self.page, self._before = page, before

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.page.goes_on:
            return
        if callable(self._before):
            self._before(signum, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
