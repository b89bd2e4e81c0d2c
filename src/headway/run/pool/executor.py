"""Run items in an executor that the user supplies.

The executor needs a ``submit`` like that of `concurrent.futures`; nothing else is asked of it. It belongs to the user
and is never shut down. The ledger stays in this process. Batches go out by ``submit``, and their outcomes come back
as the results of futures (`headway.run.worker.batch`). Done callbacks run in the executor's threads, where they only queue
the future and wake the loop.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any, NoReturn, Protocol

from headway._version import __version__
from headway.core.lifecycle import Budget, Shutdown
from headway.errors import HeadwayError, InvalidInput
from headway.ledger import Failure, Hold, Item, Job, Ledger, describe
from headway.run.display.display import Display
from headway.run.output.files import CsvOutput, Output
from headway.run.output.results import Keep
from headway.run.pool.loop import BATCH_BYTES, Pool, Settings, items_of
from headway.run.worker import batch

#: Items that take at least this long are not queued behind a running batch.
AHEAD_SECONDS = 0.1
#: Give up after this many consecutive batches failed for reasons other than their items.
ODD_MOST = 5
#: Seconds to wait for the result of a future that is already done.
ENDED_SECONDS = 5.0
#: Warn when the executor has started nothing for this many seconds.
SILENT_SECONDS = 30.0


class Executor(Protocol):
    """The part of an executor that Headway uses."""

    @property
    def submit(self) -> Callable[..., Any]:
        """Submit ``function(*arguments)`` and return a future."""
        ...


def check_executor(executor: object, mode: str | None) -> None:
    """Raise `InvalidInput` for an unusable executor, before anything is written."""
    if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
        what = f"the class {executor.__name__}" if isinstance(executor, type) else f"a {type(executor).__name__}"
        raise InvalidInput(
            f"executor= is {what}, which has no submit to call.",
            hint="Give what concurrent.futures calls an executor: ProcessPoolExecutor(4), loky's, "
            "Dask's client.get_executor(), mpi4py.futures.MPIPoolExecutor().",
        )
    if mode is not None:
        raise InvalidInput(
            f"mode = {mode!r} says how workers of our own run items, and executor= says who does.",
            hint="Leave one of them out.",
        )


def capacity(executor: object) -> int | None:
    """Return how many calls the executor runs at once; None if unknown."""
    for name in ("_max_workers", "num_workers"):
        if isinstance(found := getattr(executor, name, None), int) and found > 0:
            return found
    client: Any = getattr(executor, "_client", executor)
    with suppress(Exception):  # a Dask executor has a client that knows its threads
        return max(1, int(sum(client.nthreads().values())))
    return None


@dataclass(slots=True)
class _Ticket:
    """A batch that was submitted to the executor."""

    no: int
    slot: int | None
    out: dict[int, Item]
    may_fail: int = 0
    future: Any = None
    printed: dict[int, str] = field(default_factory=dict)


class ExecutorPool(Pool):
    """The pool that runs items in the user's executor."""

    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        hold: Hold,
        function: Callable[[Any], Any],
        settings: Settings,
        *,
        executor: Executor,
        display: Display,
        shutdown: Shutdown,
        output: Output | CsvOutput | None = None,
        keep: Keep,
    ) -> None:
        super().__init__(ledger, job, hold, settings, display=display, shutdown=shutdown, output=output, keep=keep)
        self._executor = executor
        self._size = settings.workers
        self._capacity = capacity(executor)
        self._page = batch.Page.make()
        self._orders = batch.Orders(function, keep, settings.timeout, str(self._page.path))
        self._bell_in, self._bell_out = socket.socketpair()
        for end in (self._bell_in, self._bell_out):
            end.setblocking(False)
        self._selector.register(self._bell_out, selectors.EVENT_READ, "executor")
        #: (ticket number, future) of finished calls; -1 is the probe. Appended by the executor's threads.
        self._news: deque[tuple[int, Any]] = deque()
        self._tickets: dict[int, _Ticket] = {}
        self._slots = list(range(batch.SLOTS))
        self._made = 0
        self._probe: Any = None
        #: Whether the probe has returned, and whether batches can see the page.
        self._answered = self._page_seen = False
        self._odd = 0
        #: Processes that were dead when the executor broke; None until it breaks.
        self._died_then: set[int] | None = None
        #: Items that ran in those processes.
        self._charged: set[int] = set()
        #: The error with which the executor refused further work.
        self._refusal: BaseException | None = None
        self._heard_at = time.monotonic()
        self._said_silent = False

    # ---- hooks of the loop -----------------------------------------------------------------------------------------

    @property
    def _busy(self) -> int:
        if self._page_seen:
            return len(self._running())
        return min(self._size, sum(1 for ticket in self._tickets.values() if ticket.out))

    @property
    def _idle(self) -> bool:
        return not self._tickets

    def _look_after(self, now: float) -> list[tuple[int, str, float]]:
        if self._refusal is not None and self._idle:
            self._end_refused(self._refusal)
        running = self._running()
        waiting = self._probe is not None and not self._answered
        if self._tickets and not running:
            waiting = waiting or self._page_seen or now - self._heard_at > 2 * SILENT_SECONDS
        if running or not waiting:
            self._heard_at = max(self._heard_at, now if running else 0.0)
        elif now - self._heard_at > SILENT_SECONDS and not self._said_silent:
            self._said_silent = True
            count = sum(len(ticket.out) for ticket in self._tickets.values())
            what = f"has begun none of the {items_of(count)} it was given" if count else "has begun nothing yet"
            self._display.say(f"The executor {what}: {SILENT_SECONDS:g} s and nothing. Are its workers up? Waiting ...")
        return running

    def _recall(self) -> None:
        """Tell batches through the page to give back items they have not begun.

        Batches that cannot see the page are short anyway. Futures are not cancelled: Dask also cancels calls that are
        running.
        """
        self._page.recall(True)

    def _resize(self, size: int) -> None:
        """Limit how many items are with the executor; its number of workers is the user's choice."""
        self._size = size

    def _abandon(self) -> None:
        """Cancel calls that have not begun. Running calls cannot be stopped and are left alone."""
        self._take_news()
        self._page.recall(True)
        left = self._busy
        for ticket in self._tickets.values():
            _cancel(ticket.future)
        self._tickets.clear()
        if left:
            self._display.say(f"{items_of(left)} may go on in the executor; what becomes of them is not recorded.")

    def _close(self) -> None:
        self._page.recall(True)  # batches that are still out begin no further items
        self._page.remove()
        self._tickets.clear()
        self._bell_in.close()
        self._bell_out.close()

    # ---- handing out -----------------------------------------------------------------------------------------------

    def _hand_out(self, now: float) -> None:
        if not self._answered:
            if self._probe is None and self._refusal is None:
                self._heard_at = now
                self._probe = self._submit(-1, batch.probe, self._orders)
            return
        self._page.recall(False)
        size = self._batch_size()
        most = self._size
        # Queue one batch ahead per worker, so that a worker is not idle while a result travels back.
        if self._capacity is not None and self._size >= self._capacity and self._settings.max_failures is None:
            most *= 2 if (self._item_seconds or AHEAD_SECONDS) < AHEAD_SECONDS else 1
        while self._refusal is None and len(self._tickets) < most:
            if self._backlog.suspects:
                self._give([self._backlog.suspects.popleft()])
                continue
            fair = -(-len(self._backlog.ready) // self._size)
            count = self._allowed(min(size, max(1, fair), len(self._backlog.ready)), now)
            if not count:
                return
            self._give(self._taken(count))

    def _taken(self, count: int) -> list[Item]:
        """Take up to ``count`` ready items, fewer if they are large."""
        items: list[Item] = []
        length = 0
        while len(items) < count and length < BATCH_BYTES:
            items.append(self._backlog.ready.popleft())
            length += len(items[-1].payload or "")
        return items

    def _give(self, items: list[Item]) -> None:
        slot = self._slots.pop() if self._slots else None
        if slot is not None:
            self._page.clear(slot)
        self._made += 1
        ticket = _Ticket(self._made, slot, {item.idx: item for item in items})
        may_fail = self._may_fail()
        ticket.may_fail = may_fail or 0
        work = [(item.idx, item.attempts, _text(item)) for item in items]
        self._tickets[ticket.no] = ticket
        ticket.future = self._submit(ticket.no, batch.run, self._orders, ticket.no, slot, work, may_fail)
        if ticket.future is None:
            self._forget(ticket)

    def _may_fail(self) -> int | None:
        """Return a batch's share of the failures that are left, at least one."""
        left = self._failures_left()
        if left is None:
            return None
        given = sum(ticket.may_fail for ticket in self._tickets.values())
        return max(1, (left - given) // max(1, self._size - len(self._tickets)))

    def _submit(self, no: int, *call: Any) -> Any:
        """Submit a call and return its future; None if the executor refuses.

        A refusal is reported once no batch is out.
        """
        try:
            future = self._executor.submit(*call)
        except BaseException as error:  # noqa: BLE001 - any exception from the user's executor counts as a refusal
            self._refusal = error
            return None
        if not all(callable(getattr(future, name, None)) for name in ("add_done_callback", "result", "cancel")):
            raise InvalidInput(
                f"The executor's submit gave a {type(future).__name__}, which is no future.",
                hint="A future has result(), cancel() and add_done_callback(), as those of concurrent.futures.",
            )
        future.add_done_callback(partial(self._hear, no))
        return future

    # ---- what comes back -------------------------------------------------------------------------------------------

    def _hear(self, no: int, future: Any) -> None:
        """Queue a finished future and wake the loop. Runs in a thread of the executor."""
        if self._died_then is None and isinstance(_error_of(future), BrokenExecutor):
            # Check now: the executor kills its other processes next, and then all of them are dead.
            self._died_then = self._dead_processes()
        self._news.append((no, future))
        with suppress(OSError):  # full: the loop is already awake; closed: the run is over
            self._bell_in.send(b"!")

    def _attend(self, source: Any, events: int) -> None:
        with suppress(BlockingIOError):
            self._bell_out.recv(4096)
        self._take_news()

    def _take_news(self) -> None:
        while self._news:
            no, future = self._news.popleft()
            error = _error_of(future)
            if no == -1:
                self._take_probe(error, None if error is not None else _answer(future, "version"))
                continue
            ticket = self._tickets.get(no)
            if ticket is None:
                continue  # abandoned in the meantime
            self._heard_at = time.monotonic()
            if error is None:
                self._take_report(ticket, _answer(future, "ticket", no))
            elif isinstance(error, BrokenExecutor):
                self._refusal = error
                self._blame_death(ticket, "the executor's process died while it ran this item")
            else:
                self._take_trouble(ticket, error)
            self._forget(ticket)

    def _forget(self, ticket: _Ticket) -> None:
        """Remove a finished ticket and put its unreported items back."""
        del self._tickets[ticket.no]
        if ticket.slot is not None:
            self._slots.append(ticket.slot)
        self._backlog.put_back(ticket.out.values())
        if self._stop_reason is not None:
            self._backlog.release()

    def _take_probe(self, error: BaseException | None, answer: Any) -> None:
        if isinstance(error, CancelledError):
            self._refusal = error
        elif error is not None:
            self._end_unsent(error)
        elif answer["version"] != __version__:
            raise HeadwayError(
                f"The executor's workers have headway {answer['version']}, and this is {__version__}.",
                hint="Install the same release on both sides.",
            )
        else:
            self._answered, self._page_seen = True, answer["page"]
            if self._settings.timeout is not None and not answer["main"]:
                self._display.say(
                    "This executor runs items in threads, which nobody can end: an item that takes longer than "
                    f"{self._settings.timeout:g} s is recorded as timed out and goes on there."
                )

    def _take_report(self, ticket: _Ticket, frame: Any) -> None:
        self._odd = 0
        self._page_seen = frame["page"]
        ticket.printed.update(frame["printed"])
        self._take_outcomes(ticket.out, frame, f"{self._hold.mark} executor {frame['where']}", ticket.printed)

    def _take_trouble(self, ticket: _Ticket, error: BaseException) -> None:
        """Handle a batch that failed while the executor still accepts work."""
        self._odd += 1
        if self._odd >= ODD_MOST and self._refusal is None:
            self._refusal = error
        if isinstance(error, CancelledError):
            return  # the batch was cancelled: treat it as never submitted
        if not _is_death(error):
            self._blame(ticket, describe(error))
        elif self._page_seen and ticket.slot is not None and self._page.last(ticket.slot) is None:
            self._odd -= 1  # it was queued behind the batch that killed the worker, which is reported separately
        else:
            self._blame(ticket, Failure("WorkerDied", "the executor lost the process that ran this item"))

    def _blame_death(self, ticket: _Ticket, why: str) -> None:
        """Charge the item whose process was dead when the executor broke.

        After Ctrl-C no item is charged, because the signal may have killed the process.
        """
        last = None if ticket.slot is None else self._page.last(ticket.slot)
        if self._shutdown.stop.is_set() or last is None:
            return
        if last[1] in (self._died_then or ()):
            self._charged.add(last[0])
            self._blame(ticket, Failure("WorkerDied", why))

    def _blame(self, ticket: _Ticket, failure: Failure) -> None:
        """Charge the item that ran when the batch failed.

        If it is unknown, rerun each item alone and count no attempt.
        """
        last = None if ticket.slot is None else self._page.last(ticket.slot)
        suspects = [last[0]] if last is not None and last[0] in ticket.out else list(ticket.out)
        if len(suspects) > 1:
            self._backlog.suspects.extend(ticket.out.values())
            ticket.out.clear()
            return
        for idx in suspects:
            item = ticket.out.pop(idx)
            self._fail(idx, item.attempts, failure, "failed", None, f"{self._hold.mark} executor")

    def _dead_processes(self) -> set[int]:
        """Return which processes with items are dead.

        A dying process closes its descriptors shortly before it has ended. The executor notices its death by those,
        so this waits up to half a second.
        """
        found = (self._page.last(ticket.slot) for ticket in list(self._tickets.values()) if ticket.slot is not None)
        processes = {last[1] for last in found if last is not None}
        patience = Budget(0.5)
        while not (dead := {pid for pid in processes if _is_dead(pid)}) and not patience.spent:
            time.sleep(0.002)
        return dead

    def _running(self) -> list[tuple[int, str, float]]:
        found = []
        for ticket in self._tickets.values():
            running = None if ticket.slot is None else self._page.running(ticket.slot)
            if running is not None and running[0] in ticket.out:
                found.append((running[0], f"{self._hold.mark} executor", running[1]))
        return found

    # ---- errors that end the run -----------------------------------------------------------------------------------

    def _end_refused(self, error: BaseException) -> NoReturn:
        self._record_what_is_known()
        why = describe(error)
        if isinstance(error, BrokenExecutor):
            what = f"The executor broke: {why.text.rstrip('.') or why.type}."
            if self._charged:
                items = "item" if len(self._charged) == 1 else "items"
                what += f" Charged for it: {items} {', '.join(map(str, sorted(self._charged)))}, which ran there."
        elif self._odd >= ODD_MOST:
            what = f"The executor gave back {self._odd} batches in a row: {why.text.rstrip('.')}."
        else:
            what = f"The executor takes no more work: {why.text.rstrip('.')}."
        raise HeadwayError(what, hint="What is recorded is kept. Make a new executor and call it again to go on.")

    def _end_unsent(self, error: BaseException) -> NoReturn:
        self._record_what_is_known()
        why = describe(error)
        if isinstance(error, PickleError | AttributeError | TypeError | ImportError):
            raise InvalidInput(
                f"The function cannot be sent to the executor: {why.text.rstrip('.')}.",
                hint="Define it in a module that the executor's workers can import, or use an executor that sends functions "
                "by value (loky, Dask). The same holds for encode=.",
            )
        raise HeadwayError(
            f"The executor could not take the function: {why.text.rstrip('.')}.",
            hint="Its workers must be able to import headway and the function's module. Nothing was run.",
        )

    def _record_what_is_known(self) -> None:
        """Commit all reported outcomes and release the running marks.

        So no result is lost and no innocent item is charged.
        """
        self._commit()
        self._job.give_back(sorted(self._noted), self._hold)
        self._noted.clear()


def _text(item: Item) -> str:
    payload: object = "null" if item.payload is None else item.payload
    # A payload that was changed to a non-text value is sent as "", which fails as damaged.
    return payload if isinstance(payload, str) else ""


def _cancel(future: Any) -> None:
    with suppress(Exception):  # the user's executor may be gone
        future.cancel()


def _error_of(future: Any) -> BaseException | None:
    """Return the exception of a finished future, or None."""
    try:
        future.result(ENDED_SECONDS)
    except BaseException as error:  # noqa: BLE001 - any exception is the future's outcome
        return error
    return None


def _answer(future: Any, name: str, value: object = None) -> Any:
    """Return what the submitted call returned, after checking its shape.

    A faulty executor may return something else, which would be recorded as wrong outcomes.
    """
    answer = future.result()
    if not isinstance(answer, dict) or name not in answer or (value is not None and answer[name] != value):
        raise HeadwayError(
            f"The executor's future gave a {type(answer).__name__} that the submitted call did not return.",
            hint="submit(function, *arguments) must give a future of function(*arguments). What was recorded is kept.",
        )
    return answer


def _is_death(error: BaseException) -> bool:
    """Return whether this is Dask's error for a batch that killed several workers."""
    return type(error).__name__ == "KilledWorker"


def _is_dead(pid: int) -> bool:
    """Return whether the process has ended, also if it is still a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return True
    except OSError:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except OSError:
        return False
