"""The outcome of one attempt at an item: its result as kept, or its failure as reported.

Exceptions of the function and results that cannot be kept become text here, guarded. So they affect only their own
item and can be sent to the parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, Literal

from headway.core.failure import bounded_error
from headway.core.lifecycle import LOOK_SECONDS, Stopwatch
from headway.errors import HeadwayError, RetryLater, is_delay
from headway.ledger import Failure, describe
from headway.run.output.results import RESULT_LIMIT, Keep, as_plain
from headway.run.program import TIMED_OUT, ProgramFailed

_LAZY = (CoroutineType, GeneratorType, AsyncGeneratorType)
_PLAIN = frozenset({dict, list, str, int, float, bool, tuple})
_DECODER = json.JSONDecoder()
_scan = _DECODER.scan_once  # type: ignore[attr-defined]  # documented only in the standard library's source


class GiveUp(Exception):
    """Raised by a user's function to fail an item without retries."""


class ResultNotJson(HeadwayError):
    """The function's result cannot be kept as JSON."""

    hint = "Return dicts, lists, strings and numbers, or run without --output."


class NothingRan(HeadwayError):
    """The function returned a coroutine or generator, so its body has not run."""


class PayloadDamaged(HeadwayError):
    """The stored payload is not JSON: it was changed by hand or by a disk error."""


class TimeIsUp(BaseException):
    """An item timed out. It is not an `Exception`, so a function's ``except Exception`` does not catch it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} s")


class TimeLimit:
    """``async with TimeLimit(seconds):`` cancels the block on timeout and raises `TimeIsUp`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._watch = watch()
        self._began = self._watch.elapsed()
        self._check_within(self._seconds)

    def _check_within(self, left: float) -> None:
        self._next = asyncio.get_running_loop().call_later(min(left, LOOK_SECONDS), self._check)

    def _check(self) -> None:
        left = self._seconds - (self._watch.elapsed() - self._began)
        if left > 0:
            self._check_within(left)
        else:
            self._timeout.reschedule(0.0)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TimeIsUp(self._seconds) from None


_watched: tuple[int, Stopwatch] | None = None


def watch() -> Stopwatch:
    """Return the stopwatch of this process, creating it on first use.

    A thread also reads it regularly. Otherwise a loop blocked by an item, or a wait for an alarm, would look like a
    standstill.
    """
    global _watched
    if _watched is None or _watched[0] != os.getpid():  # a race creates two stopwatches, and both work
        made = Stopwatch()
        with suppress(RuntimeError):  # out of threads: only the waiting code reads it
            threading.Thread(target=_poll_forever, args=(made,), name="headway-watch", daemon=True).start()
        _watched = os.getpid(), made
    return _watched[1]


def _poll_forever(made: Stopwatch) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        made.elapsed()


#: Errors that a retry cannot fix.
_FINAL = (GiveUp, ResultNotJson, NothingRan, PayloadDamaged)


def describe_raised(error: BaseException) -> Failure:
    """Describe an exception without raising.

    It also explains exceptions that would normally end a process, such as SystemExit.
    """
    failure = describe(error)
    if issubclass(type(error), SystemExit):
        return replace(failure, message=f"the function called sys.exit({failure.message})")
    if not failure.message and not issubclass(type(error), Exception):
        return replace(failure, message="raised by the function")
    return failure


def _name_of(kind: type) -> str:
    """Return the class name without calling a user-defined metaclass."""
    name: str = type.__getattribute__(kind, "__name__")
    return name[:80].encode("utf-8", "replace").decode()


def encoded(result: object, encode: Callable[[Any], Any] | None = None) -> str:
    """Return the result as JSON text; raise `ResultNotJson` if impossible."""
    try:
        plain = result if encode is None else encode(result)
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, default=as_plain)
        text.encode()
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - methods of the result may raise anything
        why = describe(error)
        raise ResultNotJson(f"the function returned {_name_of(type(result))}, which is not JSON: {why.text}") from None
    return text


def refuse_lazy(result: object) -> None:
    """Raise `NothingRan` for a coroutine, generator or other awaitable."""
    kind = type(result)
    if kind in _PLAIN:
        return
    try:
        lazy = issubclass(kind, _LAZY) or hasattr(kind, "__await__")
        if issubclass(kind, CoroutineType):
            result.close()  # type: ignore[attr-defined]  # coroutines have it; otherwise Python warns that it was never awaited
    except BaseException:  # noqa: BLE001 - a class with a hostile metaclass is not a coroutine
        return
    if lazy:
        what = (
            "a generator" if issubclass(kind, GeneratorType | AsyncGeneratorType) else f"an awaitable ({kind.__name__})"
        )
        raise NothingRan(
            # The summary of a run shows only the beginning.
            f"nothing was run: the function returned {what}. Make it an async function that awaits, or a plain one "
            "that returns when its work is done"
        )


def decoded(text: str) -> Any:
    """Decode a payload. Canonical JSON has no surrounding space, but a payload registered by a program may."""
    try:
        value, end = _scan(text, 0)
        return value if end == len(text) else _DECODER.decode(text)
    except StopIteration:
        pass
    except (ValueError, RecursionError) as error:
        raise PayloadDamaged(f"the stored payload is no longer JSON: {error}") from None
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise PayloadDamaged(f"the stored payload is no longer JSON: {error}") from None


def kept_result(result: object, keep: Keep) -> str | Literal[False] | None:
    """Return the result as JSON text to keep, or None if there is nothing to keep.

    Return False for a result that is not JSON or too long, unless all results must be kept; its item is still done.
    With ``encode`` a result that cannot be encoded is a failure, and can be retried once ``encode`` is fixed.
    """
    if result is None:
        return "null" if keep.all_results else None
    refuse_lazy(result)
    if not keep.results:
        return None
    try:
        text = encoded(result, keep.encode)
    except ResultNotJson:
        if keep.all_results or keep.encode is not None:
            raise
        return False
    return text if keep.all_results or len(text) <= RESULT_LIMIT else False


def later_row(idx: int, seconds: float, error: BaseException) -> tuple[int, float, float, str, bool] | None:
    """Return a postponement in the format that is reported to the parent, or None for any other exception.

    A `RetryLater` whose fields were changed to invalid values is treated as any other exception.
    """
    if not issubclass(type(error), RetryLater):
        return None
    fields = vars(error)
    delay, reason = fields.get("seconds"), fields.get("reason")
    if not is_delay(delay) or not isinstance(reason, str):
        return None
    return idx, seconds, float(delay), bounded_error(reason), fields.get("scope") == "job"


def failed_row(idx: int, attempts: int, seconds: float, error: BaseException, printed: str | None) -> tuple[Any, ...]:
    """Return a failure in the format that is reported to the parent."""
    if type(error) is TimeIsUp:
        failure = Failure(TIMED_OUT, str(error))
    else:
        failure = error.failure if type(error) is ProgramFailed else describe_raised(error)
    # Use the type: isinstance would read ``__class__``, which the user's exception may override.
    retryable = error.retryable if type(error) is ProgramFailed else not issubclass(type(error), _FINAL)
    return idx, attempts, seconds, failure.type, failure.message, failure.frame, failure.detail, retryable, printed
