"""A batch of items inside the user's executor. `headway.run.pool.executor` submits it and records its outcomes.

A batch returns only text and numbers, so results and exceptions of the function need not be picklable. Executors
cannot recall a call, so batches are short: one that meets long items gives back the items it has not begun.

The parent and the batches on its machine share a small file, the page. It holds the item that each batch runs, which
identifies an item that kills its process. Through it, the parent also tells batches to give back items they have not
begun. A batch on another machine works without it.
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
from headway.core.lifecycle import LOOK_SECONDS, Stopwatch
from headway.run.output.capture import Printing
from headway.run.output.results import Keep
from headway.run.worker.attempt import TimeIsUp, TimeLimit, decoded, failed_row, kept_result, later_row, watch
from headway.run.worker.protocol import SLOT_SIZE, SlotTable

#: A batch that has run this many seconds gives back the items it has not begun.
SPELL_SECONDS = 0.5
#: The header: whether items are recalled, whether the run is active, its pid, and the machine.
_HEADER = struct.Struct("<BBq246s")
#: Number of slots. Further concurrent batches run without one.
SLOTS = 1024
#: What a batch without a slot has recorded.
_EMPTY = (0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Orders:
    """The part of a batch that is the same for the whole run."""

    function: Callable[[Any], Any]
    keep: Keep
    timeout: float | None
    page: str


class Page(SlotTable):
    """The shared file. The run creates it with owner-only permissions and removes it; batches open it if they can."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            size = _HEADER.size + SLOTS * SLOT_SIZE
            if create:
                os.truncate(descriptor, size)
            super().__init__(mmap.mmap(descriptor, size), _HEADER.size)
        finally:
            os.close(descriptor)
        if create:
            _HEADER.pack_into(self._memory, 0, 0, 1, os.getpid(), _machine())
        _, _, self.owner, machine = _HEADER.unpack_from(self._memory, 0)
        #: Whether this is the owner's machine and pid namespace, so that pids and clocks agree.
        self.ours = machine.rstrip(b"\0") == _machine()
        self._free = list(range(SLOTS))

    @classmethod
    def make(cls) -> Page:
        """Create a page in a new temporary directory."""
        return cls(Path(tempfile.mkdtemp(prefix="headway-")) / "page", create=True)

    def remove(self) -> None:
        """Mark the run as over and delete the file."""
        self._memory[1] = 0
        with suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    @property
    def recalled(self) -> bool:
        """Whether batches must give back items they have not begun."""
        return self._memory[0] == 1

    def recall(self, wanted: bool) -> None:
        """Set or clear the recall flag."""
        self._memory[0] = int(wanted)

    @property
    def goes_on(self) -> bool:
        """Whether the run is still active."""
        if self._memory[1] != 1:
            return False
        try:
            os.kill(self.owner, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def allot(self) -> int | None:
        """Allot an empty slot; None if all are in use."""
        slot = self._free.pop() if self._free else None
        if slot is not None:
            self.clear(slot)
        return slot

    def free(self, slot: int | None) -> None:
        """Return a slot."""
        if slot is not None:
            self._free.append(slot)

    def running(self, slot: int | None) -> tuple[int, float] | None:
        """Return (idx, start on the machine's monotonic clock) of the running item."""
        idx, began, _, _ = _EMPTY if slot is None else self.read(slot)
        return (idx - 1, began) if idx else None

    def last(self, slot: int | None) -> tuple[int, int] | None:
        """Return (idx, pid) of the last item begun, whether or not it has ended."""
        _, _, last, pid = _EMPTY if slot is None else self.read(slot)
        return (last - 1, pid) if last else None


def _machine() -> bytes:
    """Return bytes that identify this machine, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()
    except OSError:
        return platform.node().encode()[:200]


# ---------------------------------------------------------------------------------------------------------------------
# Inside the executor

#: Open pages by path. Threads of this process may work for several runs.
_pages: dict[str, Page] = {}


def probe(orders: Orders) -> dict[str, Any]:
    """Check that the function arrives, and return what this worker supports."""
    page = _open(orders.page)
    return {"version": __version__, "page": page is not None, "main": _in_main_thread()}


def run(
    orders: Orders, ticket: int, slot: int | None, work: Sequence[tuple[int, int, str]], failures: int | None
) -> Any:
    """Run the items of ``work`` (idx, attempts, payload) one after the other.

    Returns their outcomes in the format of `headway.run.worker.protocol`. After ``failures`` failures the rest is given back.
    The ticket number makes every call distinct: Dask treats calls with equal arguments as one.
    """
    page = _open(orders.page) if slot is not None else None
    done: list[tuple[Any, ...]] = []
    failed: list[tuple[Any, ...]] = []
    later: list[tuple[int, float, float, str, bool]] = []
    printed: list[tuple[int, str]] = []
    back: list[int] = []
    until = time.monotonic() + SPELL_SECONDS
    with _printing(orders.keep) as printing:
        for place, (idx, attempts, text) in enumerate(work):
            late = place and time.monotonic() > until
            late = late or any(whole_job for *_, whole_job in later)
            if late or (page is not None and page.recalled) or (failures is not None and len(failed) >= failures):
                back = [each for each, _, _ in work[place:]]
                break
            began = time.monotonic()
            if page is not None and slot is not None:
                page.begin(slot, idx, began)
            if printing is not None:
                printing.begin()
            row, error = _run_one(orders, idx, attempts, text, began, printing)
            postponed = None if error is None else later_row(idx, time.monotonic() - began, error)
            if postponed is not None:
                later.append(postponed)
            else:
                (done if error is None else failed).append(row)
            if error is None and orders.keep.printed == "all" and (words := _words(printing)):
                printed.append((idx, words))
            if page is not None and slot is not None:
                page.end(slot)
    where = f"{platform.node()} {os.getpid()}"
    return {
        "ticket": ticket, "done": done, "failed": failed, "later": later, "printed": printed, "back": back,
        "where": where, "page": page is not None,
    }  # fmt: skip


def _run_one(
    orders: Orders, idx: int, attempts: int, text: str, began: float, printing: Printing | None
) -> tuple[tuple[Any, ...], BaseException | None]:
    """Run one item. Return its row, and the exception that it raised."""
    process = os.getpid()
    try:
        result = _call(orders.function, decoded(text), orders.timeout)
        if os.getpid() != process:
            os._exit(0)  # a child forked by the function returned: it must not go on with our work
        seconds = time.monotonic() - began
        return (idx, seconds, kept_result(result, orders.keep)), None
    except BaseException as error:  # noqa: BLE001 - any exception of the user's function is the item's outcome
        if os.getpid() != process:
            os._exit(0)
        return failed_row(idx, attempts, time.monotonic() - began, error, _words(printing)), error


def _words(printing: Printing | None) -> str | None:
    try:
        return None if printing is None else printing.end()
    except Exception:  # noqa: BLE001 - out of memory: the outcome matters more than the output
        return None


# ---- timeouts -------------------------------------------------------------------------------------------------------


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
    """Call the function and interrupt it by SIGALRM on timeout.

    C code is interrupted only when it returns to Python. If this process was suspended, the alarm is set again for
    the time that is left.
    """
    armed, clock = [True], watch()
    began = clock.elapsed()

    def interrupt(_: int, __: FrameType | None) -> None:
        if not armed:
            return
        left = timeout - (clock.elapsed() - began)
        if left > 0:
            # Use short intervals: without the watch thread, only this handler reads the clock. A timer of 0 would be
            # disabled.
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
    """Call the function in a thread and wait until the timeout.

    Threads cannot be killed: a late one keeps running and its result is dropped.
    """
    answers: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(function(payload))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    context = contextvars.copy_context()  # attributes its output to the item
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


# ---- output ---------------------------------------------------------------------------------------------------------

#: Concurrent batches in the threads of one process share the capture. The last one restores the streams.
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
    """Open the page, or return None if it is not accessible here.

    It also installs a SIGINT handler; the executor's process is otherwise left unchanged. A terminal sends Ctrl-C to
    every process. While the run is active, the run handles it: a ProcessPoolExecutor breaks if an idle worker dies of
    it.
    """
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
    """A SIGINT handler that ignores the signal while the run is active."""

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
