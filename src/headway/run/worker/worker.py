"""A worker process: runs the user's function and reports. It never touches the ledger.

Items run in the main thread, in several threads or on an event loop. Another thread listens to the parent. When the
parent dies, the socket ends, and the worker kills itself and everything it started.

No item may harm another. Every exception and every result that cannot be kept is turned into text and becomes the
outcome of its own item. A crash or a closed socket ends the process; the parent then finds the item in the shared
page.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

from headway.core.failure import kept_text
from headway.core.lifecycle import STOP_SIGNALS
from headway.core.setup import Opened, Setup, enter, enter_async
from headway.errors import HeadwayError, SetupFailed
from headway.run.output.capture import Printing
from headway.run.output.results import Keep
from headway.run.program import CannotStartNow, Program, ProgramFailed, Work
from headway.run.worker.attempt import TimeLimit, decoded, failed_row, kept_result, later_row
from headway.run.worker.protocol import Slots, Wire, unpack_work
from headway.telemetry import Log

log = Log("run")

#: Finished items are reported after at most this many seconds, or this many items.
FLUSH_SECONDS = 0.02
FLUSH_COUNT = 500
#: Maximum characters of unreported results, which bounds the worker's memory.
FLUSH_SIZE = 1_000_000

#: A program that lacks descriptors, processes or memory is retried when another one ends, at the latest after this
#: many seconds.
ROOM_SECONDS = 1.0

#: Exit code of a worker that cannot reach its parent; used only in logs.
CUT_OFF = 71

#: Result, exception and output of an async item.
_Attempted = tuple[Any, BaseException | None, str | None]
#: The same of an item whose task another item cancelled before it began.
_CANCELLED: _Attempted = (None, asyncio.CancelledError("its task was cancelled"), None)


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a worker process runs, and how."""

    work: Work
    mode: str
    timeout: float | None
    keep: Keep
    #: Entered once per process, thread or event loop; what it yields is the function's second argument.
    setup: Setup | None = None


def main(wire: Wire, slots: Slots, order: WorkerOrder) -> NoReturn:
    """Serve until told to stop, then exit. It does not return: a fork's finalizers belong to the parent."""
    for number in STOP_SIGNALS:
        # The parent decides when the worker ends. A handler, because children of the function would inherit SIG_IGN.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(-1)
    _print_line_by_line()
    code = 1
    try:
        worker = RunWorker(wire, slots, order)
        if order.mode == "async":
            asyncio.run(worker.serve_async())
        elif slots.count == 1:
            worker.serve(0)
        else:
            worker.serve_threads()
        worker.flush()
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # flush an unfinished line; its reader may be gone
                stream.flush()
        os._exit(code)


def spawned() -> NoReturn:
    """Run a spawned worker. Its socket, page and package arrive as inherited descriptors."""
    wire, page, package, count = map(int, sys.argv[1:5])
    with os.fdopen(package, "rb", closefd=True) as file:
        # Other workers share the position of this open file.
        data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    given = pickle.loads(data)  # noqa: S301 - written by our own parent to an unnamed file
    sys.argv[1:] = []
    sys.path[:] = given["path"]  # before the function is imported
    order = pickle.loads(given["work"])  # noqa: S301 - as above
    end = socket.socket(fileno=wire)
    end.set_inheritable(False)
    slots = Slots(count, page)
    os.close(page)
    main(Wire(end, blocking=True), slots, order)


def _print_line_by_line() -> None:
    """Make stdout and stderr line-buffered.

    A worker may be killed and skips Python's finalizers, so output must not stay in a buffer. Write-through, as with
    PYTHONUNBUFFERED, would mix the output of two workers within a line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _nothing(_: object) -> None:
    """Stand in for the function when the worker runs a program."""


class RunWorker:
    """The worker process from inside; its parent has a `headway.run.pool.processes.WorkerHandle`."""

    def __init__(self, wire: Wire, slots: Slots, order: WorkerOrder) -> None:
        self._slots, self._timeout, self._keep = slots, order.timeout, order.keep
        self._link = ParentLink(wire, slots)
        self._reports = Reports(self._link)
        self._children = ForkedChildren(wire)
        self._program = order.work if isinstance(order.work, Program) else None
        self._function: Callable[..., Any] = _nothing if isinstance(order.work, Program) else order.work
        self._setup = order.setup
        self._printing = Printing(several=slots.count > 1) if order.keep.printed != "none" else None
        if self._printing is not None and self._program is None:
            self._printing.enter_worker()
        self._todo: deque[tuple[int, int, str]] = deque()
        self._wake = threading.Semaphore(0)
        #: Notified when a program ends, because another one may start then.
        self._room = threading.Condition()
        self._stopping = False
        self._on_work: Callable[[int], None] = self._wake_threads
        threading.Thread(target=self._listen, name="headway-listen", daemon=True).start()

    # ---- three ways to run -----------------------------------------------------------------------------------------

    def serve(self, slot: int) -> None:
        """Run one item after the other."""
        opened: Opened | None = None
        function = self._function
        if self._setup is not None:
            try:
                opened = enter(self._setup)
            except SetupFailed as error:
                self._children.end_if_child()
                self._report_setup(error)
                return
            self._children.end_if_child()
            function = self._with_value(opened)
        while (work := self._next()) is not None:
            self._run(slot, function, *work)
        if opened is not None:
            self.flush()  # first, because closing may take long or kill the process
            self._note_closed(opened.close())

    def _with_value(self, opened: Opened) -> Callable[[Any], Any]:
        function, value = self._function, opened.value
        return lambda payload: function(payload, value)

    def _report_setup(self, error: SetupFailed) -> None:
        """Tell the parent that no item can start here. It ends the run."""
        self._stopping = True
        self._link.send({"setup": str(error)})

    def _note_closed(self, problem: str) -> None:
        if problem:
            with suppress(Exception):  # a program that called `headway.map` configures no log; stderr may be closed
                sys.stderr.write(f"headway: the set-up of a worker could not be closed: {problem}\n")

    def serve_threads(self) -> None:
        """Run items in one thread per slot."""

        def serve(slot: int) -> None:
            # An unexpected error in one slot ends the process; the parent notices and finds the item.
            with _or_exit():
                self.serve(slot)

        threads = [threading.Thread(target=serve, args=(slot,)) for slot in range(self._slots.count)]
        for count, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:  # no more threads available: the running ones take all items
                if not count:
                    raise
                log.warning("fewer items run at once than requested", count=count, reason=str(error))
                del threads[count:]
                break
        for thread in threads:
            thread.join()

    async def serve_async(self) -> None:
        """Enter the set-up, run the items, and close it."""
        if self._setup is None:
            await self._serve_loop(self._function)
            return
        try:
            opened = await enter_async(self._setup)
        except SetupFailed as error:
            self._report_setup(error)
            return
        await self._serve_loop(self._with_value(opened))
        self.flush()
        self._note_closed(await opened.aclose())

    async def _serve_loop(self, function: Callable[[Any], Any]) -> None:
        """Run each item as its own task as soon as a slot is free.

        No task of ours runs beside them that a function could cancel.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        free = list(range(self._slots.count))
        running: set[asyncio.Task[_Attempted]] = set()

        def fill() -> None:
            while free and self._todo:
                idx, attempts, text = self._todo.popleft()
                slot, began = free.pop(), time.monotonic()
                self._slots.begin(slot, idx, began)
                task = loop.create_task(self._attempt(function, text))
                running.add(task)
                task.add_done_callback(partial(finish, slot, idx, attempts, began))
            if not running:
                self._reports.flush()
                if self._stopping and not ended.done():
                    ended.set_result(None)

        def finish(slot: int, idx: int, attempts: int, began: float, task: asyncio.Task[_Attempted]) -> None:
            with _or_exit():
                running.discard(task)
                result, error, printed = _CANCELLED if task.cancelled() else task.result()
                if error is None:
                    if printed and self._keep.printed == "all":
                        self._reports.add_printed(idx, printed)
                    self._report(idx, attempts, began, result)
                elif issubclass(type(error), asyncio.CancelledError) and self._slots.count > 1:
                    self._link.send(
                        {"alone": [idx]}
                    )  # cancelled by itself or by another item, which cannot be told apart
                else:
                    self._report_failure(idx, attempts, began, error, printed)
                self._slots.end(slot)
                free.append(slot)
                fill()

        def on_work(_: int) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no work is left
                loop.call_soon_threadsafe(fill)

        self._on_work = on_work
        fill()  # start the work that arrived before `on_work` was set
        while not ended.done():
            with suppress(asyncio.CancelledError):  # a function cancelled all tasks
                await asyncio.wait([ended])

    async def _attempt(self, function: Callable[[Any], Any], text: str) -> _Attempted:
        # No exception may escape: KeyboardInterrupt and SystemExit would end the loop.
        if self._printing is not None:
            self._printing.begin()
        try:
            payload = decoded(text)
            async with TimeLimit(self._timeout) if self._timeout is not None else nullcontext():
                result = await function(payload)
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
            self._children.end_if_child()
            return None, error, self._end_printing(None)
        self._children.end_if_child()
        return result, None, self._end_printing(None) if self._keep.printed == "all" else None

    # ---- one item --------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, int, str] | None:
        while True:
            try:
                return self._todo.popleft()
            except IndexError:
                if self._stopping:
                    return None
                self._reports.flush()
                self._wake.acquire()

    def _run(self, slot: int, function: Callable[[Any], Any], idx: int, attempts: int, text: str) -> None:
        began = time.monotonic()
        self._slots.begin(slot, idx, began)
        printed = None
        if self._printing is not None:
            self._printing.begin()
        try:
            if self._program is None:
                result = function(decoded(text))
            else:
                result, printed = self._program.run(idx, decoded(text), self._timeout)
        except CannotStartNow as error:
            self._slots.end(slot)
            self._todo.appendleft((idx, attempts, text))
            self._await_room(str(error))
            return
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
            if self._children.is_child:
                os._exit(0)
            self._report_failure(idx, attempts, began, error, self._end_printing(None))
        else:
            if self._children.is_child:
                os._exit(0)
            if self._keep.printed == "all":
                printed = self._end_printing(printed)
                if printed:
                    self._reports.add_printed(idx, printed)
            self._report(idx, attempts, began, result)
        self._slots.end(slot)
        if self._program is not None:
            with self._room:
                self._room.notify()

    def _await_room(self, reason: str) -> None:
        """Wait until another program has ended. Meanwhile the item counts as not begun and can be recalled."""
        self._reports.flush()
        self._link.send({"short": reason})
        with self._room:
            self._room.wait(ROOM_SECONDS)

    def _end_printing(self, by_program: str | None) -> str | None:
        """Return the output to keep of the item that just ended."""
        if self._printing is None:
            return None
        try:
            return kept_text(by_program) if by_program else self._printing.end()
        except Exception:  # noqa: BLE001 - out of memory: the outcome matters more than the output
            return None

    def _report(self, idx: int, attempts: int, began: float, result: Any) -> None:
        now = time.monotonic()
        try:
            kept = kept_result(result, self._keep)
        except (HeadwayError, MemoryError) as error:
            self._report_failure(idx, attempts, began, error)
            return
        self._reports.add_done(idx, began, now, kept)

    def _report_failure(
        self, idx: int, attempts: int, began: float, error: BaseException, printed: str | None = None
    ) -> None:
        postponed = later_row(idx, time.monotonic() - began, error)
        if postponed is not None:
            self._reports.add_later(postponed)
            if postponed[-1]:  # the job waits
                self._reports.flush()
                self._give_back(ending=False)
            return
        if type(error) is ProgramFailed:
            printed = self._end_printing(error.printed)
        self._reports.add_failed(failed_row(idx, attempts, time.monotonic() - began, error, printed))
        if self._reports.failed_too_often:
            self._reports.flush()
            self._give_back(ending=False)

    def flush(self) -> None:
        """Report all finished items."""
        self._reports.flush()

    # ---- requests of the parent ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while self._await_frame():
                for frame in self._link.frames():
                    if "work" in frame:
                        self._add_work(frame)
                    else:
                        self._give_back(ending="stop" in frame)
        finally:
            # The parent is gone. The function may run for another hour: kill it and all it started now.
            _end_group()

    def _await_frame(self) -> bool:
        """Wait for a frame. Meanwhile flush finished items while the function is busy with a long one."""
        while not self._link.wait(2 * FLUSH_SECONDS if self._reports.pending else 0.25):
            self._reports.flush_if_late()
        return self._link.receive()

    def _add_work(self, frame: dict[str, Any]) -> None:
        self._reports.failure_limit = frame["failures"]
        self._todo.extend(unpack_work(frame))
        if self._reports.failed_too_often:
            self._give_back(ending=False)  # sent before the parent received the last failures
        self._on_work(len(frame["work"]))

    def _give_back(self, *, ending: bool) -> None:
        back = []
        with suppress(IndexError):
            while True:
                back.append(self._todo.popleft()[0])
        if ending:
            self._stopping = True
            self._on_work(self._slots.count)
        self._link.send({"back": back})

    def _wake_threads(self, count: int) -> None:
        for _ in range(min(count, self._slots.count)):
            self._wake.release()


class ForkedChildren:
    """Detaches the processes that the function forks: default signal handlers, no socket, no further items."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._mask = threading.local()
        #: Whether this process is such a child.
        self.is_child = False
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._leave)

    def end_if_child(self) -> None:
        """Exit in a child that returned from the function. It would run the remaining items a second time."""
        if self.is_child:
            os._exit(0)

    def _before_fork(self) -> None:
        # Until the child has default handlers, the worker's handler would swallow its stop signals.
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _leave(self) -> None:
        self.is_child = True
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._wire.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)


class ParentLink:
    """The worker's connection to its parent. Several threads send."""

    def __init__(self, wire: Wire, slots: Slots) -> None:
        self._wire, self._slots = wire, slots
        self._descriptor = wire.fileno()
        self._inode = os.fstat(self._descriptor).st_ino
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        #: Held while a frame is composed and sent.
        self.sending = threading.RLock()

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame. End the worker if its parent is gone."""
        with self.sending:
            self._check_socket()
            try:
                self._wire.send(json.dumps(frame))
            except (BrokenPipeError, ConnectionResetError):
                _end_group()
            except OSError:
                self._end_cut_off()

    def wait(self, seconds: float) -> bool:
        """Return whether data arrives within ``seconds``."""
        return bool(self._poll.poll(1000 * seconds))

    def receive(self) -> bool:
        """Read what has arrived. Return False if the parent is gone."""
        self._check_socket()
        return self._wire.receive()

    def frames(self) -> Iterator[dict[str, Any]]:
        """Yield the frames that have arrived completely."""
        return self._wire.frames()

    def _check_socket(self) -> None:
        """End the worker if its descriptor is no longer its socket.

        A function may close unknown descriptors, and the next opened file gets the same number.
        """
        try:
            if os.fstat(self._descriptor).st_ino == self._inode:
                return
        except OSError:
            pass
        self._end_cut_off()

    def _end_cut_off(self) -> NoReturn:
        """Exit without a connection to the parent. The shared page tells it why, and which items were begun."""
        self._slots.mark_cut_off()
        os._exit(CUT_OFF)


class Reports:
    """Finished items on their way to the parent, sent in groups.

    Several threads add items. Each row is taken once, so none is lost or sent twice.
    """

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._done: deque[tuple[int, float, str | Literal[False] | None]] = deque()
        self._failed: deque[tuple[Any, ...]] = deque()
        self._later: deque[tuple[int, float, float, str, bool]] = deque()
        self._printed: deque[tuple[int, str]] = deque()
        self._flushed_at = time.monotonic()
        self._size = 0  # size of the unreported results; a racy sum, which can only cost memory
        self._failures = 0
        #: Number of failures after which the worker gives back the rest of its items.
        self.failure_limit: int | None = None

    @property
    def pending(self) -> bool:
        """Whether items wait to be reported."""
        return bool(self._done or self._failed or self._later)

    @property
    def failed_too_often(self) -> bool:
        return self.failure_limit is not None and self._failures >= self.failure_limit

    def add_done(self, idx: int, began: float, ended: float, result: str | Literal[False] | None) -> None:
        """Add an item that is done, with its result as kept."""
        self._done.append((idx, ended - began, result))
        self._size += len(result) if result else 0
        if ended - self._flushed_at > FLUSH_SECONDS or len(self._done) >= FLUSH_COUNT or self._size >= FLUSH_SIZE:
            self.flush()

    def add_failed(self, row: tuple[Any, ...]) -> None:
        """Add an item that failed, as a row of `headway.run.worker.attempt.failed_row`."""
        self._failed.append(row)
        self._failures += 1
        self.flush_if_late()

    def add_later(self, row: tuple[int, float, float, str, bool]) -> None:
        """Add an item that was postponed, as a row of `headway.run.worker.attempt.later_row`."""
        self._later.append(row)
        self.flush_if_late()

    def add_printed(self, idx: int, text: str) -> None:
        """Add the output of an item. Call it before `add_done`, so that the output is not sent later."""
        self._printed.append((idx, text))

    def flush_if_late(self) -> None:
        """Report finished items if the last report is `FLUSH_SECONDS` old."""
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Report finished items now."""
        with self._link.sending:
            self._flushed_at, self._size = time.monotonic(), 0
            done = [self._done.popleft() for _ in range(len(self._done))]
            failed = [self._failed.popleft() for _ in range(len(self._failed))]
            later = [self._later.popleft() for _ in range(len(self._later))]
            printed = [self._printed.popleft() for _ in range(len(self._printed))]
            if done or failed or later:
                self._link.send({"done": done, "failed": failed, "later": later, "printed": printed})


@contextmanager
def _or_exit() -> Iterator[None]:
    """End the process if the block raises. No other code would notice."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - the parent learns of it by the exit
        os._exit(1)


def _end_group() -> NoReturn:
    """Kill this process and everything the function started.

    The group is named, because the function may have changed it.
    """
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(CUT_OFF)
