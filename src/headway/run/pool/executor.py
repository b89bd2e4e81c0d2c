"""Run items in an executor that the user supplies.

The executor needs a ``submit`` like that of `concurrent.futures`; nothing else is asked of it. It belongs to the user
and is never shut down. The ledger stays in this process. Batches go out by ``submit``, and their outcomes come back
as the results of futures (`headway.run.worker.batch`). Done callbacks run in the executor's threads, where they only queue
the future and wake the loop.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any, NoReturn, Protocol

from headway._version import __version__
from headway.core.lifecycle import Budget
from headway.core.text import plural
from headway.errors import HeadwayError, InvalidInput
from headway.ledger import Failure, Item, describe
from headway.run.pool.runner import Runner, RunParts, WakeUp
from headway.run.worker import batch
from headway.run.worker.protocol import payload_text

#: Items that take at least this long are not queued behind a running batch.
AHEAD_SECONDS = 0.1
#: Give up after this many consecutive batches failed for reasons other than their items.
ODD_MOST = 5
#: Seconds to wait for the result of a future that is already done.
ENDED_SECONDS = 5.0
#: Number of the call that asks the executor's workers what they support.
PROBE = -1
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
            f"executor= is {what}, which has no submit().",
            hint="Give what concurrent.futures calls an executor: ProcessPoolExecutor(4), loky's, "
            "Dask's client.get_executor(), mpi4py.futures.MPIPoolExecutor().",
        )
    if mode is not None:
        raise InvalidInput(
            f"mode={mode!r} and executor= exclude each other: the executor decides how items run.",
            hint="Leave one out.",
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


class Calls:
    """Calls submitted to the executor. Finished futures queue here, from the executor's threads, and wake the loop."""

    def __init__(self, executor: Executor, wake: WakeUp, find_dead: Callable[[], set[int]]) -> None:
        """Prepare to submit. ``find_dead`` is called once, in a thread of the executor, when that reports that it broke."""
        self._executor, self._wake, self._find_dead = executor, wake, find_dead
        self._finished: deque[tuple[int, Any]] = deque()
        self._is_broken = False
        #: Processes that were dead when the executor broke.
        self.dead: set[int] = set()
        #: The error with which the executor refused further work.
        self.refusal: BaseException | None = None

    def submit(self, no: int, *call: Any) -> Any:
        """Submit a call and return its future; None if the executor refuses."""
        try:
            future = self._executor.submit(*call)
        except BaseException as error:  # noqa: BLE001 - any exception from the user's executor counts as a refusal
            self.refusal = error
            return None
        if not all(callable(getattr(future, name, None)) for name in ("add_done_callback", "result", "cancel")):
            raise InvalidInput(
                f"The executor's submit returned a {type(future).__name__}, which is not a future.",
                hint="A future has result(), cancel() and add_done_callback(), as those of concurrent.futures.",
            )
        future.add_done_callback(partial(self._add, no))
        return future

    def _add(self, no: int, future: Any) -> None:
        if not self._is_broken and isinstance(_error_of(future), BrokenExecutor):
            self._is_broken = True
            self.dead = self._find_dead()
        self._finished.append((no, future))
        self._wake.notify()

    def finished(self) -> Iterator[tuple[int, Any]]:
        """Yield (number, future) of finished calls."""
        while self._finished:
            yield self._finished.popleft()


class SilenceWarning:
    """Warns once when the executor has begun nothing for `SILENT_SECONDS`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._heard_at = time.monotonic()
        self._warned = False

    def heard(self) -> None:
        """Note that the executor returned a call."""
        self._heard_at = time.monotonic()

    def is_long(self, now: float) -> bool:
        """Return whether nothing was heard for twice the limit."""
        return now - self._heard_at > 2 * SILENT_SECONDS

    def check(self, now: float, *, running: bool, waiting: bool, count: int) -> None:
        """Warn if the executor should have begun one of ``count`` items by now."""
        if running:
            self._heard_at = now
        elif waiting and now - self._heard_at > SILENT_SECONDS and not self._warned:
            self._warned = True
            what = f"has started none of {plural(count, 'item')}" if count else "has started nothing"
            self._say(f"The executor {what} in {SILENT_SECONDS:g} s. Are its workers online? Waiting ...")


class ExecutorRunner(Runner):
    """Runs items in the user's executor."""

    def __init__(self, parts: RunParts, function: Callable[[Any], Any], executor: Executor) -> None:
        self._parts = parts
        self._size = parts.settings.workers
        self._capacity = capacity(executor)
        self._page = batch.Page.make()
        self._orders = batch.Orders(function, parts.keep, parts.settings.timeout, str(self._page.path))
        self._wake = WakeUp()
        parts.selector.register(self._wake, selectors.EVENT_READ, self)
        self._calls = Calls(executor, self._wake, self._find_dead)
        self._silence = SilenceWarning(parts.context.display.say)
        self._tickets: dict[int, _Ticket] = {}
        self._made = 0
        #: Whether the probe was submitted and has returned, and whether batches can see the page.
        self._probed = self._answered = self._page_seen = False
        #: Consecutive batches that failed for reasons other than their items.
        self._odd = 0
        #: Items that ran in processes which were dead when the executor broke.
        self._charged: set[int] = set()

    @property
    def busy(self) -> int:
        if self._page_seen:
            return len(self._running())
        return min(self._size, sum(1 for ticket in self._tickets.values() if ticket.out))

    @property
    def idle(self) -> bool:
        return not self._tickets

    def check(self, now: float) -> list[tuple[int, str, float]]:
        if self._calls.refusal is not None and self.idle:
            self._end_refused(self._calls.refusal)
        running = self._running()
        waiting = self._probed and not self._answered
        if self._tickets and not running:
            waiting = waiting or self._page_seen or self._silence.is_long(now)
        count = sum(len(ticket.out) for ticket in self._tickets.values())
        self._silence.check(now, running=bool(running), waiting=waiting, count=count)
        return running

    def recall(self) -> None:
        """Tell batches through the page to give back items they have not begun.

        Batches that cannot see the page are short anyway. Futures are not cancelled: Dask also cancels calls that are
        running.
        """
        self._page.recall(True)

    def resize(self, size: int) -> None:
        """Limit how many items are with the executor; its number of workers is the user's choice."""
        self._size = size

    def abandon(self) -> None:
        """Cancel calls that have not begun. Running calls cannot be stopped and are left alone."""
        self._handle_finished()
        self._page.recall(True)
        left = self.busy
        for ticket in self._tickets.values():
            _cancel(ticket.future)
        self._tickets.clear()
        if left:
            self._say(f"{plural(left, 'item')} may go on in the executor; their outcomes are not recorded.")

    def close(self) -> None:
        self._page.recall(True)  # batches that are still out begin no further items
        self._page.remove()
        self._tickets.clear()
        self._wake.close()

    def _say(self, text: str) -> None:
        self._parts.context.display.say(text)

    # ---- handing out -----------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        if not self._answered:
            if not self._probed and self._calls.refusal is None:
                self._silence.heard()
                self._probed = self._calls.submit(PROBE, batch.probe, self._orders) is not None
            return
        self._page.recall(False)
        backlog = self._parts.backlog
        most = self._most_batches()
        while self._calls.refusal is None and len(self._tickets) < most:
            if backlog.suspects:
                self._give([backlog.suspects.popleft()])
                continue
            fair = max(1, -(-len(backlog.ready) // self._size))
            count = self._parts.gate.allow(min(self._parts.batches.size, fair, len(backlog.ready)), now)
            if not count:
                return
            self._give(backlog.next_batch(count))

    def _most_batches(self) -> int:
        """Return how many batches may be out.

        Short items get one batch ahead per worker, so that a worker is not idle while a result travels back.
        """
        if self._capacity is None or self._size < self._capacity or self._parts.settings.max_failures is not None:
            return self._size
        return self._size * (2 if (self._parts.batches.item_seconds or AHEAD_SECONDS) < AHEAD_SECONDS else 1)

    def _give(self, items: list[Item]) -> None:
        self._made += 1
        given = sum(ticket.may_fail for ticket in self._tickets.values())
        may_fail = self._parts.gate.share_of_failures(given, self._size - len(self._tickets))
        ticket = _Ticket(self._made, self._page.allot(), {item.idx: item for item in items}, may_fail or 0)
        work = [(item.idx, item.attempts, payload_text(item)) for item in items]
        self._tickets[ticket.no] = ticket
        ticket.future = self._calls.submit(ticket.no, batch.run, self._orders, ticket.no, ticket.slot, work, may_fail)
        if ticket.future is None:
            self._forget(ticket)

    # ---- what comes back -------------------------------------------------------------------------------------------

    def handle(self, source: Any, events: int) -> None:
        self._wake.clear()
        self._handle_finished()

    def _handle_finished(self) -> None:
        for no, future in self._calls.finished():
            error = _error_of(future)
            ticket = self._tickets.get(no)
            if no == PROBE:
                self._handle_probe(error, None if error is not None else _answer(future, "version"))
            elif ticket is not None:  # else it was abandoned in the meantime
                self._silence.heard()
                if error is None:
                    self._handle_report(ticket, _answer(future, "ticket", no))
                elif isinstance(error, BrokenExecutor):
                    self._calls.refusal = error
                    self._charge_death(ticket)
                else:
                    self._handle_error(ticket, error)
                self._forget(ticket)

    def _forget(self, ticket: _Ticket) -> None:
        """Remove a finished ticket and put its unreported items back."""
        del self._tickets[ticket.no]
        self._page.free(ticket.slot)
        self._parts.backlog.put_back(ticket.out.values())

    def _handle_probe(self, error: BaseException | None, answer: Any) -> None:
        if isinstance(error, CancelledError):
            self._calls.refusal = error
        elif error is not None:
            self._end_unsent(error)
        elif answer["version"] != __version__:
            raise HeadwayError(
                f"The executor's workers have headway {answer['version']}, and this is {__version__}.",
                hint="Install the same release on both sides.",
            )
        else:
            self._answered, self._page_seen = True, answer["page"]
            timeout = self._parts.settings.timeout
            if timeout is not None and not answer["main"]:
                self._say(
                    f"This executor runs items in threads, which cannot be killed: an item that takes longer than "
                    f"{timeout:g} s is recorded as timed out and keeps running there."
                )

    def _handle_report(self, ticket: _Ticket, frame: Any) -> None:
        self._odd = 0
        self._page_seen = frame["page"]
        ticket.printed.update(frame["printed"])
        self._parts.outcomes.add_report(ticket.out, frame, f"{self._name} {frame['where']}", ticket.printed)

    def _handle_error(self, ticket: _Ticket, error: BaseException) -> None:
        """Handle a batch that failed while the executor still accepts work."""
        self._odd += 1
        if self._odd >= ODD_MOST and self._calls.refusal is None:
            self._calls.refusal = error
        if isinstance(error, CancelledError):
            return  # the batch was cancelled: treat it as never submitted
        if not _is_death(error):
            self._charge(ticket, describe(error))
        elif self._page_seen and ticket.slot is not None and self._page.last(ticket.slot) is None:
            self._odd -= 1  # it was queued behind the batch that killed the worker, which is reported separately
        else:
            self._charge(ticket, Failure("WorkerDied", "the executor lost the process that ran this item"))

    def _charge_death(self, ticket: _Ticket) -> None:
        """Charge the item whose process was dead when the executor broke.

        After Ctrl-C no item is charged, because the signal may have killed the process.
        """
        last = self._page.last(ticket.slot)
        if last is not None and last[1] in self._calls.dead and not self._parts.context.shutdown.stop.is_set():
            self._charged.add(last[0])
            self._charge(ticket, Failure("WorkerDied", "the executor's process died while it ran this item"))

    def _charge(self, ticket: _Ticket, failure: Failure) -> None:
        """Charge the item that ran when the batch failed.

        If it is unknown, rerun each item alone and count no attempt.
        """
        last = self._page.last(ticket.slot)
        suspects = [last[0]] if last is not None and last[0] in ticket.out else list(ticket.out)
        if len(suspects) > 1:
            self._parts.backlog.suspect(ticket.out.values())
            ticket.out.clear()
            return
        for idx in suspects:
            self._parts.outcomes.fail(ticket.out.pop(idx), failure, self._name, None)

    def _find_dead(self) -> set[int]:
        """Return which processes with items are dead. Called in a thread of the executor when it breaks.

        It kills its other processes next, and then all of them are dead. A dying process closes its descriptors shortly
        before it has ended. The executor notices its death by those, so this waits up to half a second.
        """
        found = (self._page.last(ticket.slot) for ticket in list(self._tickets.values()))
        processes = {last[1] for last in found if last is not None}
        patience = Budget(0.5)
        while not (dead := {pid for pid in processes if _is_dead(pid)}) and not patience.spent:
            time.sleep(0.002)
        return dead

    @property
    def _name(self) -> str:
        return f"{self._parts.held.hold.mark} executor"

    def _running(self) -> list[tuple[int, str, float]]:
        found = []
        for ticket in self._tickets.values():
            running = self._page.running(ticket.slot)
            if running is not None and running[0] in ticket.out:
                found.append((running[0], self._name, running[1]))
        return found

    # ---- errors that end the run -----------------------------------------------------------------------------------

    def _end_refused(self, error: BaseException) -> NoReturn:
        self._parts.outcomes.end()
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
        raise HeadwayError(what, hint="Recorded outcomes are kept. To continue, create a new executor and call again.")

    def _end_unsent(self, error: BaseException) -> NoReturn:
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
            f"The executor's future returned a {type(answer).__name__}, which is not the result of the submitted call.",
            hint="submit(function, *arguments) must return a future of function(*arguments). Recorded outcomes are kept.",
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
