"""A worker process: runs the user's function and reports. It never touches the ledger.

Its main thread (or threads, or loop) runs items; a second thread listens to the parent. When the parent dies the
socket ends, and the worker takes itself and whatever it started down with it.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from headway.errors import HeadwayError
from headway.ledger import Failure, describe
from headway.run.wire import Slots, Wire

#: Results wait at most this long for company before they are reported.
FLUSH_SECONDS = 0.02
FLUSH_COUNT = 500

Function = Callable[[Any], Any]  # the user's: any JSON in, anything out


class GiveUp(Exception):
    """Raised by a user's function: this item will not succeed however often it is tried."""


class ResultNotJson(HeadwayError):
    """The function returned something that cannot be kept."""

    hint = "Return dicts, lists, strings and numbers, or run without --output."


def main(wire: Wire, slots: Slots, function: Function, *, mode: str, timeout: float | None, keep: bool) -> NoReturn:
    """Serve until told to stop. Ends the process: a fork's finalisers belong to the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent decides when we end. A handler, not SIG_IGN: what the function starts must not inherit that.
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(-1)
    _print_line_by_line()
    worker = Worker(wire, slots, function, keep=keep)
    try:
        if mode == "async":
            asyncio.run(worker.serve_async(timeout))
        elif slots.count == 1:
            worker.serve(0)
        else:
            worker.serve_threads()
        worker.flush()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone; there is nobody to tell
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a line that was begun and not ended; nobody may be there to read it
                stream.flush()
        os._exit(0)


def _print_line_by_line() -> None:
    """A worker may be killed, and ends without Python's finalisers: what the function printed must not wait in a buffer.

    Not write-through, as PYTHONUNBUFFERED makes it: the words of two workers would mix within a line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class Worker:
    def __init__(self, wire: Wire, slots: Slots, function: Function, *, keep: bool) -> None:
        self._wire = wire
        self._slots = slots
        self._function = function
        self._keep = keep
        self._todo: deque[tuple[int, int, Any]] = deque()
        self._wake = threading.Semaphore(0)
        self._stopping = False
        self._sending = threading.Lock()
        self._done: deque[tuple[int, float, Any]] = deque()
        self._failed: deque[tuple[Any, ...]] = deque()
        self._flushed_at = time.monotonic()
        self._on_work: Callable[[int], None] = self._wake_threads
        threading.Thread(target=self._listen, name="headway-listen", daemon=True).start()

    # ---- the three ways to run -------------------------------------------------------------------------------------

    def serve(self, slot: int) -> None:
        """One item after the other."""
        while (work := self._next()) is not None:
            self._run(slot, *work)

    def serve_threads(self) -> None:
        threads = [threading.Thread(target=self.serve, args=(slot,)) for slot in range(self._slots.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async def serve_async(self, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Semaphore(0)

        def on_work(count: int) -> None:
            def release() -> None:
                for _ in range(count):
                    arrived.release()

            with suppress(RuntimeError):  # the loop has ended: so has the work
                loop.call_soon_threadsafe(release)

        self._on_work = on_work
        on_work(len(self._todo))  # what came before we listened
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots.count):
                group.create_task(self._serve_slot(slot, arrived, timeout))

    async def _serve_slot(self, slot: int, arrived: asyncio.Semaphore, timeout: float | None) -> None:
        while True:
            try:
                idx, attempts, payload = self._todo.popleft()
            except IndexError:
                if self._stopping:
                    return
                self.flush()
                await arrived.acquire()
                continue
            began = time.monotonic()
            self._slots.begin(slot, idx, began)
            try:
                async with asyncio.timeout(timeout):
                    result = await self._function(payload)
            except Exception as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
                self._report_failure(idx, attempts, began, error)
            else:
                self._report(idx, attempts, began, result)
            finally:
                self._slots.end(slot)

    # ---- one item --------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, int, Any] | None:
        while True:
            try:
                return self._todo.popleft()
            except IndexError:
                if self._stopping:
                    return None
                self.flush()
                self._wake.acquire()

    def _run(self, slot: int, idx: int, attempts: int, payload: Any) -> None:
        began = time.monotonic()
        self._slots.begin(slot, idx, began)
        try:
            result = self._function(payload)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises is the item's outcome
            self._report_failure(idx, attempts, began, error)
        except SystemExit as error:
            # sys.exit() inside a function ends that item, not the worker.
            self._report_failure(idx, attempts, began, RuntimeError(f"the function called sys.exit({error.code!r})"))
        else:
            self._report(idx, attempts, began, result)
        finally:
            self._slots.end(slot)

    def _report(self, idx: int, attempts: int, began: float, result: Any) -> None:
        now = time.monotonic()
        kept = None
        if self._keep:
            try:
                kept = json.dumps(result, ensure_ascii=False, allow_nan=False)
                kept.encode()
            except (TypeError, ValueError, RecursionError) as error:
                failure = ResultNotJson(f"the function returned {type(result).__name__}, which is not JSON: {error}")
                self._report_failure(idx, attempts, began, failure)
                return
        self._done.append((idx, now - began, kept))
        if now - self._flushed_at > FLUSH_SECONDS or len(self._done) >= FLUSH_COUNT:
            self.flush()

    def _report_failure(self, idx: int, attempts: int, began: float, error: Exception) -> None:
        failure: Failure = describe(error)
        retryable = not isinstance(error, GiveUp | ResultNotJson)
        seconds = time.monotonic() - began
        self._failed.append(
            (idx, attempts, seconds, failure.type, failure.message, failure.frame, failure.detail, retryable)
        )
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    # ---- talking to the parent -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Report what is finished. Others append meanwhile: what is taken out one by one is neither lost nor doubled."""
        with self._sending:
            self._flushed_at = time.monotonic()
            done = [self._done.popleft() for _ in range(len(self._done))]
            failed = [self._failed.popleft() for _ in range(len(self._failed))]
            if done or failed:
                self._wire.send(json.dumps({"done": done, "failed": failed}))

    def _listen(self) -> None:
        try:
            while self._await_frame():
                for frame in self._wire.frames():
                    if "work" in frame:
                        self._todo.extend(map(tuple, frame["work"]))
                        self._on_work(len(frame["work"]))
                    else:
                        self._give_back(ending="stop" in frame)
        except OSError:
            pass
        # The parent is gone. The function may be busy for an hour: end it, and all it started, now.
        os.killpg(0, signal.SIGKILL)

    def _await_frame(self) -> bool:
        """Wait for the parent; meanwhile results must not grow old while the function is busy with a long item."""
        while not select.select([self._wire], [], [], FLUSH_SECONDS * 2 if self._done or self._failed else 0.25)[0]:
            if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                self.flush()
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
            self._wire.send(json.dumps({"back": back}))

    def _wake_threads(self, count: int) -> None:
        for _ in range(min(count, self._slots.count)):
            self._wake.release()
