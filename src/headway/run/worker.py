"""A worker process: runs the user's function and reports. It never touches the ledger.

Its main thread (or threads, or loop) runs items; a second thread listens to the parent. When the parent dies the
socket ends, and the worker takes itself and whatever it started down with it.

Nothing an item does may cost another one anything: whatever leaves the function, an exception of any kind or a result
that cannot be kept, is turned into text here, guarded, and is the outcome of that item. What cannot be guarded (a crash,
a closed socket) ends the process, and the parent finds the item by the shared page.
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
from functools import partial
from typing import Any, Literal, NoReturn

from headway.errors import HeadwayError
from headway.failure import kept_text
from headway.lifecycle import STOP_SIGNALS
from headway.run.attempt import TimeLimit, decoded, failed_row, kept_result
from headway.run.captured import Printing
from headway.run.program import CannotStartNow, Program, ProgramFailed, Work
from headway.run.results import Keep
from headway.run.wire import Slots, Wire, unpack_work
from headway.telemetry import Log

log = Log("run")

#: Results wait at most this long for company before they are reported.
FLUSH_SECONDS = 0.02
FLUSH_COUNT = 500
#: Characters of results that wait at the most: a worker needs no memory for results that are long.
FLUSH_SIZE = 1_000_000

#: A program that cannot be started for lack of descriptors, processes or memory is tried again when another one has ended,
#: and at the latest after this long.
ROOM_SECONDS = 1.0

#: How the process ends when it cannot reach its parent; only to be told apart in a log.
CUT_OFF = 71

Function = Callable[[Any], Any]  # the user's: any JSON in, anything out

#: What an async item returned, what it raised, and what it printed.
_Attempted = tuple[Any, BaseException | None, str | None]


def main(wire: Wire, slots: Slots, function: Work, *, mode: str, timeout: float | None, keep: Keep) -> NoReturn:
    """Serve until told to stop. Ends the process: a fork's finalisers belong to the parent."""
    for number in STOP_SIGNALS:
        # The parent decides when we end. A handler, not SIG_IGN: what the function starts must not inherit that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(-1)
    _print_line_by_line()
    code = 1
    try:
        worker = Worker(wire, slots, function, timeout=timeout, keep=keep)
        os.register_at_fork(
            before=worker.before_fork, after_in_parent=worker.after_fork, after_in_child=worker.leave_in_child
        )
        if mode == "async":
            asyncio.run(worker.serve_async())
        elif slots.count == 1:
            worker.serve(0)
        else:
            worker.serve_threads()
        worker.flush()
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a line that was begun and not ended; nobody may be there to read it
                stream.flush()
        os._exit(code)


def spawned() -> NoReturn:
    """The process of a worker that was started anew instead of being forked: what it works with comes by descriptors."""
    wire, page, package, count = map(int, sys.argv[1:5])
    with os.fdopen(package, "rb", closefd=True) as file:
        # Other workers read the same open file: its position is theirs too.
        data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    given = pickle.loads(data)  # noqa: S301 - of our own parent, by a file that has no name
    sys.argv[1:] = []
    sys.path[:] = given["path"]  # before the function is looked for
    function, mode, timeout, keep = pickle.loads(given["work"])  # noqa: S301 - the same
    end = socket.socket(fileno=wire)
    end.set_inheritable(False)
    slots = Slots(count, page)
    os.close(page)
    main(Wire(end, blocking=True), slots, function, mode=mode, timeout=timeout, keep=keep)


def _print_line_by_line() -> None:
    """A worker may be killed, and ends without Python's finalisers: what the function printed must not wait in a buffer.

    Not write-through, as PYTHONUNBUFFERED makes it: the words of two workers would mix within a line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _nothing(_: object) -> None:
    """The function of a worker that runs a program."""


class Worker:
    """The process from inside; its parent has a `headway.run.crew.WorkerHandle` of it."""

    def __init__(self, wire: Wire, slots: Slots, function: Work, *, timeout: float | None, keep: Keep) -> None:
        self._wire = wire
        self._descriptor = wire.fileno()
        self._inode = os.fstat(self._descriptor).st_ino
        self._slots = slots
        self._printing = Printing(several=slots.count > 1) if keep.printed != "none" else None
        if self._printing is not None and not isinstance(function, Program):
            self._printing.enter_worker()
        self._program = function if isinstance(function, Program) else None
        self._function: Function = _nothing if isinstance(function, Program) else function
        self._timeout = timeout
        self._keep = keep
        self._todo: deque[tuple[int, int, str]] = deque()
        self._wake = threading.Semaphore(0)
        self._room = threading.Condition()
        self._stopping = False
        self._sending = threading.Lock()
        self._done: deque[tuple[int, float, str | Literal[False] | None]] = deque()
        self._failed: deque[tuple[Any, ...]] = deque()
        self._printed: deque[tuple[int, str]] = deque()
        self._failures = 0
        self._most_failures: int | None = None
        self._flushed_at = time.monotonic()
        self._size = 0  # of the results that wait; threads may miss each other's, which costs memory and nothing else
        self._is_child = False
        self._mask = threading.local()
        self._on_work: Callable[[int], None] = self._wake_threads
        threading.Thread(target=self._listen, name="headway-listen", daemon=True).start()

    # ---- the three ways to run -------------------------------------------------------------------------------------

    def serve(self, slot: int) -> None:
        """One item after the other."""
        while (work := self._next()) is not None:
            self._run(slot, *work)

    def serve_threads(self) -> None:
        def serve(slot: int) -> None:
            # Should one slot fail in a way we did not foresee, all end: the parent sees that and finds the item.
            with _or_exit():
                self.serve(slot)

        threads = [threading.Thread(target=serve, args=(slot,)) for slot in range(self._slots.count)]
        for count, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no more: those that run take the items of all
                if not count:
                    raise
                log.warning("fewer items run at once than asked for", count=count, reason=str(error))
                del threads[count:]
                break
        for thread in threads:
            thread.join()

    async def serve_async(self) -> None:
        """Each item is a task of its own, started as soon as a slot is free: what it cancels or leaves behind is its
        own, and no task of ours runs beside it that a function could cancel."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        free = list(range(self._slots.count))
        running: set[asyncio.Task[_Attempted]] = set()

        def fill() -> None:
            while free and self._todo:
                idx, attempts, text = self._todo.popleft()
                slot, began = free.pop(), time.monotonic()
                self._slots.begin(slot, idx, began)
                task = loop.create_task(self._attempt(text))
                running.add(task)
                task.add_done_callback(partial(finish, slot, idx, attempts, began))
            if not running:
                self.flush()
                if self._stopping and not ended.done():
                    ended.set_result(None)

        def finish(slot: int, idx: int, attempts: int, began: float, task: asyncio.Task[_Attempted]) -> None:
            with _or_exit():
                running.discard(task)
                # Cancelled by another item before it began, if it has no outcome of its own.
                cancelled = None, asyncio.CancelledError("its task was cancelled"), None
                result, error, printed = cancelled if task.cancelled() else task.result()
                if error is None:
                    if printed and self._keep.printed == "all":
                        self._printed.append((idx, printed))
                    self._report(idx, attempts, began, result)
                elif issubclass(type(error), asyncio.CancelledError) and self._slots.count > 1:
                    self._report_disturbed(idx)  # by itself or by another item, nobody can tell
                else:
                    self._report_failure(idx, attempts, began, error, printed)
                self._slots.end(slot)
                free.append(slot)
                fill()

        def on_work(_: int) -> None:
            with suppress(RuntimeError):  # the loop has ended: so has the work
                loop.call_soon_threadsafe(fill)

        self._on_work = on_work
        fill()  # what came before we listened
        while not ended.done():
            with suppress(asyncio.CancelledError):  # a function cancelled every task there is
                await asyncio.wait([ended])

    async def _attempt(self, text: str) -> _Attempted:
        # Nothing may leave here as an exception: KeyboardInterrupt and SystemExit would end the loop.
        if self._printing is not None:
            self._printing.begin()
        try:
            payload = decoded(text)
            async with TimeLimit(self._timeout) if self._timeout is not None else nullcontext():
                result = await self._function(payload)
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
            self._end_child()
            return None, error, self._end_printing(None)
        self._end_child()
        return result, None, self._end_printing(None) if self._keep.printed == "all" else None

    # ---- one item --------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, int, str] | None:
        while True:
            try:
                return self._todo.popleft()
            except IndexError:
                if self._stopping:
                    return None
                self.flush()
                self._wake.acquire()

    def _run(self, slot: int, idx: int, attempts: int, text: str) -> None:
        began = time.monotonic()
        self._slots.begin(slot, idx, began)
        printed = None
        if self._printing is not None:
            self._printing.begin()
        try:
            if self._program is None:
                result = self._function(decoded(text))
            else:
                result, printed = self._program.run(idx, decoded(text), self._timeout)
        except CannotStartNow as error:
            self._slots.end(slot)
            self._todo.appendleft((idx, attempts, text))
            self._await_room(str(error))
            return
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
            if self._is_child:
                self._end_child()
            self._report_failure(idx, attempts, began, error, self._end_printing(None))
        else:
            if self._is_child:
                self._end_child()
            if self._keep.printed == "all":
                printed = self._end_printing(printed)
                if printed:
                    self._printed.append((idx, printed))
            self._report(idx, attempts, began, result)
        self._slots.end(slot)
        if self._program is not None:
            with self._room:
                self._room.notify()

    def _await_room(self, reason: str) -> None:
        """Wait until another program has ended. Meanwhile the item is as if it had not begun, and can be recalled."""
        self.flush()
        with self._sending:
            self._send({"short": reason})
        with self._room:
            self._room.wait(ROOM_SECONDS)

    def _end_printing(self, by_program: str | None) -> str | None:
        """What the item that has just ended printed, to be kept."""
        if self._printing is None:
            return None
        try:
            return kept_text(by_program) if by_program else self._printing.end()
        except Exception:  # noqa: BLE001 - no memory left: what became of the item is worth more than its words
            return None

    def _report(self, idx: int, attempts: int, began: float, result: Any) -> None:
        now = time.monotonic()
        try:
            kept = kept_result(result, self._keep)
        except (HeadwayError, MemoryError) as error:
            self._report_failure(idx, attempts, began, error)
            return
        self._done.append((idx, now - began, kept))
        self._size += len(kept) if kept else 0
        if now - self._flushed_at > FLUSH_SECONDS or len(self._done) >= FLUSH_COUNT or self._size >= FLUSH_SIZE:
            self.flush()

    def _report_failure(
        self, idx: int, attempts: int, began: float, error: BaseException, printed: str | None = None
    ) -> None:
        if type(error) is ProgramFailed:
            printed = self._end_printing(error.printed)
        self._failed.append(failed_row(idx, attempts, time.monotonic() - began, error, printed))
        self._failures += 1
        if self._most_failures is not None and self._failures >= self._most_failures:
            self.flush()
            self._give_back(ending=False)
        elif time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def _report_disturbed(self, idx: int) -> None:
        with self._sending:
            self._send({"alone": [idx]})

    # ---- children of the function ----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        # A signal for the child must wait until its handlers are the usual ones, or our own would swallow it.
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def leave_in_child(self) -> None:
        """In a process that the function forked: it is the function's own, with signals as any process has them at its
        start, and without our socket."""
        self._is_child = True
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._wire.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _end_child(self) -> None:
        """A forked child that came back from the function must not go on with our work: it would run it twice."""
        if self._is_child:
            os._exit(0)

    # ---- talking to the parent -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Report what is finished. Others append meanwhile: what is taken out one by one is neither lost nor doubled."""
        with self._sending:
            self._flushed_at, self._size = time.monotonic(), 0
            done = [self._done.popleft() for _ in range(len(self._done))]
            failed = [self._failed.popleft() for _ in range(len(self._failed))]
            # Noted before the item was: whatever is in ``done`` has its words here, or they went before.
            printed = [self._printed.popleft() for _ in range(len(self._printed))]
            if done or failed:
                self._send({"done": done, "failed": failed, "printed": printed})

    def _send(self, frame: dict[str, Any]) -> None:
        self._check_socket()
        try:
            self._wire.send(json.dumps(frame))
        except (BrokenPipeError, ConnectionResetError):
            _end_group()
        except OSError:
            self._end_cut_off()

    def _check_socket(self) -> None:
        """Is our descriptor still our socket? A function may close descriptors it does not know, and the next file that
        is opened gets our number."""
        try:
            if os.fstat(self._descriptor).st_ino == self._inode:
                return
        except OSError:
            pass
        self._end_cut_off()

    def _end_cut_off(self) -> NoReturn:
        """The parent cannot be told anything any more. The page tells it that, and what was begun."""
        self._slots.mark_cut_off()
        os._exit(CUT_OFF)

    def _listen(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            while self._await_frame(poll):
                for frame in self._wire.frames():
                    if "work" in frame:
                        self._take_work(frame)
                    else:
                        self._give_back(ending="stop" in frame)
        finally:
            # The parent is gone. The function may be busy for an hour: end it, and all it started, now.
            _end_group()

    def _take_work(self, frame: dict[str, Any]) -> None:
        self._most_failures = frame["failures"]
        self._todo.extend(unpack_work(frame))
        if self._most_failures is not None and self._failures >= self._most_failures:
            self._give_back(ending=False)  # it was sent before the parent heard of the last failures
        self._on_work(len(frame["work"]))

    def _await_frame(self, poll: select.poll) -> bool:
        """Wait for the parent; meanwhile results must not grow old while the function is busy with a long item."""
        while not poll.poll(2000 * FLUSH_SECONDS if self._done or self._failed else 250):
            if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                self.flush()
        self._check_socket()
        return self._wire.receive()

    def _give_back(self, *, ending: bool) -> None:
        back = []
        with suppress(IndexError):
            while True:
                back.append(self._todo.popleft()[0])
        if ending:
            self._stopping = True
            self._on_work(self._slots.count)
        with self._sending:
            self._send({"back": back})

    def _wake_threads(self, count: int) -> None:
        for _ in range(min(count, self._slots.count)):
            self._wake.release()


@contextmanager
def _or_exit() -> Iterator[None]:
    """End the process if the block raises: nobody else would notice."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told by our end
        os._exit(1)


def _end_group() -> NoReturn:
    """End this process and whatever the function started. The group is named: a function may have changed ours."""
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(CUT_OFF)
