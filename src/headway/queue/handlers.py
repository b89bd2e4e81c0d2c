"""Registered handlers: the function and the settings for tasks of one kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from headway.core.ids import check_id
from headway.errors import InvalidInput
from headway.queue.task import is_number

Isolation = Literal["fork", "none"]
Context = Callable[[], AbstractContextManager[Any]]
HandlerFunction = Callable[[Any, Any], Any]  # (RunningTask, payload) -> a JSON value
F = TypeVar("F", bound=HandlerFunction)


@dataclass(frozen=True, slots=True)
class Handler:
    """The function and settings for tasks of one kind. Times are in seconds."""

    kind: str
    function: HandlerFunction
    timeout: float | None
    retries: int
    retry_delay: float
    isolation: Isolation


def registering(
    handlers: dict[str, Handler],
    kind: str,
    *,
    timeout: float | None,
    retries: int,
    retry_delay: float,
    isolation: Isolation,
) -> Callable[[F], F]:
    """Return a decorator that adds a function to ``handlers``. Raises `InvalidInput`."""
    check_id(kind, "a kind of task")
    if kind.startswith("headway."):
        raise InvalidInput(f"The kind {kind!r} begins with 'headway.', which is reserved.")
    if timeout is not None and (not is_number(timeout) or not 0 < timeout <= 10**7):
        raise InvalidInput(f"timeout must be seconds above 0, or None (got {timeout!r}).")
    if type(retries) is not int or not 0 <= retries <= 1000:
        raise InvalidInput(f"retries must be an integer from 0 to 1,000 (got {retries!r}).")
    if not is_number(retry_delay) or not 0 < retry_delay <= 10**6:
        raise InvalidInput(f"retry_delay must be seconds above 0 (got {retry_delay!r}).")
    if isolation not in ("fork", "none"):
        raise InvalidInput(f"isolation must be 'fork' or 'none' (got {isolation!r}).")

    def register(function: F) -> F:
        if not callable(function):
            raise InvalidInput(f"The handler of {kind!r} must be a function, not {type(function).__name__}.")
        if what := _not_supported(function):
            raise InvalidInput(
                f"The handler of {kind!r} is {what}, which workers do not run.",
                hint="Use a plain function: def, with asyncio.run(...) inside for async code, and return the result.",
            )
        if kind in handlers and handlers[kind].function is not function:
            raise InvalidInput(f"Kind {kind!r} already has a handler.", hint="Give each handler its own kind.")
        handlers[kind] = Handler(kind, function, timeout, retries, retry_delay, isolation)
        return function

    return register


def _not_supported(function: Any) -> str:
    """Describe a function whose call returns before its work is done; return "" for a plain function."""
    while isinstance(function, partial):
        function = function.func
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004 - an object's own async __call__
        if inspect.iscoroutinefunction(called):
            return "an async function"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "a generator function"
    return ""
