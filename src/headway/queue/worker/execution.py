"""One run of a handler: the object it gets, the exceptions that end it, and its outcome."""

from __future__ import annotations

import inspect
import json
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from headway.core.failure import Failure, describe
from headway.core.setup import Opened, enter
from headway.core.text import printable
from headway.errors import HeadwayError, RetryLater, SetupFailed
from headway.queue.handlers import Context, Handler
from headway.queue.payload import PAYLOAD_LIMIT, holds_zero
from headway.queue.task import Claim
from headway.telemetry import Log

log = Log("queue")

#: Seconds until a set-up that failed is tried again.
SETUP_RETRY_SECONDS = 30.0
#: Maximum bytes of a handler's result, as JSON.
RESULT_LIMIT = PAYLOAD_LIMIT
#: Maximum characters of a progress message.
_MESSAGE_LIMIT = 500

Report = Callable[[float, str], None]


class TaskCancelled(BaseException):
    """The task was cancelled.

    Raised in a handler that continues after its task was cancelled. A handler may also raise it itself when `cancelled` is
    true. Not an Exception, so that ``except Exception`` does not catch it.
    """


class TaskTimeout(BaseException):
    """Raised in a handler that runs longer than its timeout. ``finally`` blocks get `queue_cancel_grace` seconds."""


class TaskTooLarge(BaseException):
    """Raised in a handler with ``isolation="none"`` that uses too much memory. A forked process is killed instead."""


class TaskStopped(BaseException):
    """Raised in a handler that still runs when its worker must exit. The task returns to its queue."""


class CannotStart(HeadwayError):
    """No process, descriptor or thread is available for a task. Nothing was started; a later attempt may succeed."""


class GiveUp(Exception):
    """Raised by a handler whose task cannot succeed: it fails without further retries."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: with a result, or with a failure."""

    result: str | None = None
    failure: Failure | None = None
    outcome: str = "failed"
    retryable: bool = True
    message: str | None = None  # the last progress message
    later: RetryLater | None = None  # the handler asks to run the task later


class RunningTask:
    """What a handler gets: the task's ids, a way to report progress, and whether to stop."""

    __slots__ = ("_cancelled", "_report", "_stopping", "attempts", "id", "kind", "role", "saw_cancelled", "user_id")

    def __init__(
        self,
        claim: Claim,
        report: Report,
        cancelled: Callable[[], bool],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stopping = stopping
        self.id, self.kind, self.user_id, self.role = claim.id, claim.kind, claim.user_id, claim.role
        self.attempts = claim.attempts
        self._report, self._cancelled = report, cancelled
        self.saw_cancelled = False  # the handler read `cancelled` when it was true

    def progress(self, percent: float, message: str = "") -> None:
        """Report progress from 0 to 100 and what the handler does.

        It may be called often: only the newest report is stored, a few times a second.
        """
        number = round(float(percent), 6)  # a sum of fractions may be 100.00000000000006
        if not 0.0 <= number <= 100.0:
            raise ValueError(f"progress must be 0 to 100 (got {percent})")
        self._report(number, printable(str(message)[:_MESSAGE_LIMIT]))  # databases refuse U+0000 and lone surrogates

    @property
    def cancelled(self) -> bool:
        """Whether the task was cancelled. Return or raise soon: the task ends CANCELLED either way.

        `TaskCancelled` is raised in a handler that continues; after a grace period it is killed.
        """
        if self._cancelled():
            self.saw_cancelled = True
        return self.saw_cancelled

    @property
    def stopping(self) -> bool:
        """Whether the worker is about to exit. A task that still runs at the end of the drain returns to its queue.

        Only useful to a handler that can give back unfinished work by itself.
        """
        return self._stopping()


def perform(
    task: RunningTask, function: Callable[..., Any], text: str, context: Context | None, extra: Sequence[Any] = ()
) -> Ended:
    """Call the handler and return its outcome. ``extra``: the value of its set-up, if it has one. Raises only `TaskStopped`."""
    try:
        with (context or nullcontext)():
            value = function(task, json.loads(text), *extra)
        return _ended_with(task, value)
    except TaskStopped:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit, KeyboardInterrupt and others fail this run only
        return _failed_by(error)


async def perform_async(
    task: RunningTask, function: Callable[..., Any], text: str, context: Context | None, extra: Sequence[Any] = ()
) -> Ended:
    """Await the handler and return its outcome. Raises nothing, not even `asyncio.CancelledError`."""
    try:
        with (context or nullcontext)():
            value = await function(task, json.loads(text), *extra)
        return _ended_with(task, value)
    except BaseException as error:  # noqa: BLE001 - every exception, SystemExit too, fails this run only
        return _failed_by(error)


def _ended_with(task: RunningTask, value: object) -> Ended:
    """Return the outcome of a handler that has returned."""
    if task.saw_cancelled:
        return Ended(failure=Failure("TaskCancelled", "the handler returned because the task was cancelled"))
    return Ended(result=_result(value))


def _failed_by(error: BaseException) -> Ended:
    """Return the outcome of a handler that raised."""
    match error:
        case GiveUp():
            return Ended(failure=describe(error), retryable=False)
        case TaskTimeout() | TaskTooLarge() | TaskCancelled():
            return ended_by(error)
        case RetryLater():
            return Ended(failure=Failure("RetryLater", str(error)), outcome="later", later=error)
        case _ResultRefused():
            return Ended(failure=Failure("ResultRefused", str(error)), retryable=False)
    return Ended(failure=describe(error))


def ended_by(error: TaskTimeout | TaskTooLarge | TaskCancelled) -> Ended:
    """Return the outcome of a run that the worker ended by this exception."""
    if isinstance(error, TaskTimeout):
        return Ended(failure=Failure("TimedOut", str(error)), outcome="timeout")
    if isinstance(error, TaskTooLarge):
        return Ended(failure=Failure("MemoryLimit", str(error)), outcome="memory")
    return Ended(failure=Failure("TaskCancelled", "the handler was ended because the task was cancelled"))


def no_result_within(seconds: float | None) -> str:
    """Return the message of a timeout."""
    return "no result in time" if seconds is None else f"no result within {seconds:g} s"


class Setups:
    """The set-ups of handlers that were entered in this process, by kind."""

    def __init__(self) -> None:
        self._opened: dict[str, Opened] = {}
        self._retry_at: dict[str, float] = {}  # kinds whose set-up failed

    def is_ready(self, handler: Handler) -> bool:
        """Return whether the handler's tasks can run: it has no set-up, or its set-up was entered."""
        return handler.setup is None or handler.kind in self._opened

    def open(self, handler: Handler) -> None:
        """Enter the handler's set-up. If that fails, log it and leave the kind alone for a while."""
        assert handler.setup is not None
        try:
            self._opened[handler.kind] = enter(handler.setup)
        except SetupFailed as error:
            self._retry_at[handler.kind] = time.monotonic() + SETUP_RETRY_SECONDS
            log_failed_setup(handler.kind, error)

    def arguments(self, kind: str) -> tuple[Any, ...]:
        """Return the further arguments of the kind's handler."""
        return (self._opened[kind].value,) if kind in self._opened else ()

    @property
    def failed(self) -> set[str]:
        """The kinds whose set-up failed a short time ago."""
        now = time.monotonic()
        return {kind for kind, at in self._retry_at.items() if now < at}

    def close(self) -> None:
        """Close all set-ups, the last one first."""
        while self._opened:
            kind, opened = self._opened.popitem()
            if problem := opened.close():
                log.warning("a set-up could not be closed", kind=kind, error=problem)


def log_failed_setup(kind: str, error: SetupFailed) -> None:
    """Log that tasks of a kind wait, because its set-up failed."""
    log.error(
        f"the set-up of a handler failed; its tasks wait and it is tried again in {SETUP_RETRY_SECONDS:g} s",
        kind=kind, error=str(error),
    )  # fmt: skip


class _ResultRefused(Exception):
    """The handler's result cannot be stored."""


def _result(value: Any) -> str | None:
    """Encode a handler's result as JSON."""
    if value is None:
        return None
    if inspect.iscoroutine(value):
        value.close()  # or Python would warn that it was never awaited
        raise _ResultRefused("the handler returned a coroutine; write it as async def, or await it")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except Exception as error:  # an object may raise anything while it is encoded
        raise _ResultRefused(f"the handler returned {type(value).__name__}, which is not JSON") from error
    if size > RESULT_LIMIT or holds_zero(text):
        raise _ResultRefused(f"the handler returned {size:,} bytes; at most {RESULT_LIMIT:,} are kept, without U+0000")
    return text


def rss(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended or the system does not report it."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
