"""What becomes of one try at an item, wherever it runs: its result as it is kept, or its failure as it is reported.

Whatever leaves the user's function, an exception of any kind or a result that cannot be kept, is turned into text here,
guarded, so that it costs its own item only and can be sent to the parent.
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

from headway.errors import HeadwayError
from headway.ledger import Failure, describe
from headway.lifecycle import LOOK_SECONDS, Stopwatch
from headway.run.program import TIMED_OUT, ProgramFailed
from headway.run.results import RESULT_LIMIT, Keep, as_plain

_LAZY = (CoroutineType, GeneratorType, AsyncGeneratorType)
_PLAIN = frozenset({dict, list, str, int, float, bool, tuple})
_DECODER = json.JSONDecoder()
_scan = _DECODER.scan_once  # type: ignore[attr-defined]  # documented in the standard library's source only


class GiveUp(Exception):
    """Raised by a user's function: this item will not succeed however often it is tried."""


class ResultNotJson(HeadwayError):
    """The function returned something that cannot be kept."""

    hint = "Return dicts, lists, strings and numbers, or run without --output."


class NothingRan(HeadwayError):
    """The function returned a coroutine or a generator: its body has not been executed."""


class PayloadDamaged(HeadwayError):
    """What the ledger has as the item's payload is no JSON: a foreign hand or a broken disk changed it."""


class TimeIsUp(BaseException):
    """An item took longer than it may. Not an Exception: a function that catches all of those does not catch this."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} s")


class TimeLimit:
    """``async with TimeLimit(seconds):`` cancels what is awaited in it when its time is up, and raises `TimeIsUp`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._watch = watch()
        self._began = self._watch.elapsed()
        self._look_again_within(self._seconds)

    def _look_again_within(self, left: float) -> None:
        self._next = asyncio.get_running_loop().call_later(min(left, LOOK_SECONDS), self._look)

    def _look(self) -> None:
        left = self._seconds - (self._watch.elapsed() - self._began)
        if left > 0:
            self._look_again_within(left)
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
    """This process's, which a thread asks as well: a loop that is blocked by an item, or who waits for an alarm, asks nothing,
    and that time is no standstill."""
    global _watched
    if _watched is None or _watched[0] != os.getpid():  # two at once make two of them, and each does
        made = Stopwatch()
        with suppress(RuntimeError):  # there may be no more threads: then who waits asks alone
            threading.Thread(target=_ask_for_ever, args=(made,), name="headway-watch", daemon=True).start()
        _watched = os.getpid(), made
    return _watched[1]


def _ask_for_ever(made: Stopwatch) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        made.elapsed()


#: Trying again cannot help.
_FINAL = (GiveUp, ResultNotJson, NothingRan, PayloadDamaged)


def describe_raised(error: BaseException) -> Failure:
    """`describe`, which never raises, and in words what a function did that ends a process elsewhere."""
    failure = describe(error)
    if issubclass(type(error), SystemExit):
        return replace(failure, message=f"the function called sys.exit({failure.message})")
    if not failure.message and not issubclass(type(error), Exception):
        return replace(failure, message="raised by the function")
    return failure


def _name_of(kind: type) -> str:
    """The class's name past its metaclass, which is the user's too."""
    name: str = type.__getattribute__(kind, "__name__")
    return name[:80].encode("utf-8", "replace").decode()


def encoded(result: object, encode: Callable[[Any], Any] | None = None) -> str:
    """The result as JSON text, or `ResultNotJson`."""
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
    """Raise `NothingRan` for a result that only promises to do something."""
    kind = type(result)
    if kind in _PLAIN:
        return
    try:
        lazy = issubclass(kind, _LAZY) or hasattr(kind, "__await__")
        if issubclass(kind, CoroutineType):
            result.close()  # type: ignore[attr-defined]  # of a coroutine: else Python complains that nobody awaited it
    except BaseException:  # noqa: BLE001 - a class with a hostile metaclass is no coroutine
        return
    if lazy:
        what = (
            "a generator" if issubclass(kind, GeneratorType | AsyncGeneratorType) else f"an awaitable ({kind.__name__})"
        )
        raise NothingRan(
            # The summary of a run shows the beginning only.
            f"nothing was executed: the function returned {what}. Make it an async function that awaits, or a plain one "
            "that returns when its work is done"
        )


def decoded(text: str) -> Any:
    """A payload. Canonical JSON has no space around it; what a program registered itself may."""
    try:
        value, end = _scan(text, 0)
        return value if end == len(text) else _DECODER.decode(text)
    except StopIteration:
        pass
    except (ValueError, RecursionError) as error:
        raise PayloadDamaged(f"the stored payload is not JSON any more: {error}") from None
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise PayloadDamaged(f"the stored payload is not JSON any more: {error}") from None


def kept_result(result: object, keep: Keep) -> str | Literal[False] | None:
    """The result as it is kept, None if there is nothing to keep. Where nobody asked for all of them, one that has no
    JSON form or is very long is not kept (False), and its item is done all the same. Whoever brings an ``encode`` asks for
    what it makes: an item whose result it cannot encode failed, and can be tried again once that is repaired."""
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


def failed_row(idx: int, attempts: int, seconds: float, error: BaseException, printed: str | None) -> tuple[Any, ...]:
    """A failure as it is reported to the parent."""
    if type(error) is TimeIsUp:
        failure = Failure(TIMED_OUT, str(error))
    else:
        failure = error.failure if type(error) is ProgramFailed else describe_raised(error)
    # By the type alone: isinstance would ask the exception for its __class__, which is the user's to refuse.
    retryable = error.retryable if type(error) is ProgramFailed else not issubclass(type(error), _FINAL)
    return idx, attempts, seconds, failure.type, failure.message, failure.frame, failure.detail, retryable, printed
