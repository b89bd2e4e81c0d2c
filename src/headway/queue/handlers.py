"""How tasks of each kind are run: what an application says when it registers a handler, checked."""

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
HandlerFunction = Callable[[Any, Any], Any]  # (the running task, its payload) -> a result that is JSON
F = TypeVar("F", bound=HandlerFunction)


@dataclass(frozen=True, slots=True)
class Handler:
    """How tasks of one kind are run."""

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
    """A decorator that puts a function among the ``handlers``."""
    check_id(kind, "a kind of task")
    if kind.startswith("headway."):
        raise InvalidInput(f"Kinds of task that begin with headway. are its own, as {kind!r} would be.")
    if timeout is not None and (not is_number(timeout) or not 0 < timeout <= 10**7):
        raise InvalidInput(f"timeout={timeout!r} is no number of seconds.", hint="Use seconds above 0, or None.")
    if type(retries) is not int or not 0 <= retries <= 1000:
        raise InvalidInput(f"retries={retries!r} is no number of retries.", hint="Use a whole number from 0.")
    if not is_number(retry_delay) or not 0 < retry_delay <= 10**6:
        raise InvalidInput(f"retry_delay={retry_delay!r} is no number of seconds.", hint="Use seconds above 0.")
    if isolation not in ("fork", "none"):
        raise InvalidInput(f"isolation={isolation!r} is not known.", hint="Use 'fork' or 'none'.")

    def register(function: F) -> F:
        if not callable(function):
            raise InvalidInput(
                f"A {type(function).__name__} cannot handle tasks of kind {kind!r}.", hint="Use a function."
            )
        if what := _not_supported(function):
            raise InvalidInput(
                f"The handler of {kind!r} is {what}, which workers do not run.",
                hint="Use a plain function: def, with asyncio.run(...) inside for async code, and return the result.",
            )
        if kind in handlers and handlers[kind].function is not function:
            raise InvalidInput(f"There are two handlers for tasks of kind {kind!r}.", hint="Give each its own kind.")
        handlers[kind] = Handler(kind, function, timeout, retries, retry_delay, isolation)
        return function

    return register


def _not_supported(function: Any) -> str:
    """Name the kind of function whose call would return before its work is done; empty for a plain one."""
    while isinstance(function, partial):
        function = function.func
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004 - an object's own async __call__
        if inspect.iscoroutinefunction(called):
            return "an async function"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "a generator function"
    return ""
