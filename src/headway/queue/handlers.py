"""Registered handlers: the function and the settings for tasks of one kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from headway.core.ids import check_id
from headway.core.setup import Setup, checked
from headway.errors import InvalidInput
from headway.queue.task import is_number

Isolation = Literal["fork", "none"]
Runs = Literal["fork", "none", "async"]
Context = Callable[[], AbstractContextManager[Any]]
HandlerFunction = Callable[..., Any]  # (RunningTask, payload), and what its set-up yields -> a JSON value
F = TypeVar("F", bound=HandlerFunction)

#: Default of `Handler.concurrency`, for async handlers.
CONCURRENCY = 100


@dataclass(frozen=True, slots=True)
class Handler:
    """The function and settings for tasks of one kind. Times are in seconds.

    ``isolation`` says where it runs: in a forked process, in the worker's process, or on the worker's event loop.
    ``concurrency``: most tasks of the kind at once on one event loop. ``setup``: what it yields is the third argument.
    """

    kind: str
    function: HandlerFunction
    timeout: float | None
    retries: int
    retry_delay: float
    isolation: Runs
    concurrency: int = 1
    setup: Setup | None = None


def registering(
    handlers: dict[str, Handler],
    kind: str,
    *,
    timeout: float | None,
    retries: int,
    retry_delay: float,
    isolation: Isolation | None,
    concurrency: int | None = None,
    setup: object = None,
) -> Callable[[F], F]:
    """Return a decorator that adds a function to ``handlers``. Raises `InvalidInput`."""
    check_id(kind, "a kind of task")
    if kind.startswith("headway."):
        raise InvalidInput(f"The kind {kind!r} begins with 'headway.', which is reserved.")
    _check_numbers(timeout, retries, retry_delay, concurrency)
    if isolation not in ("fork", "none", None):
        raise InvalidInput(f"isolation must be 'fork' or 'none' (got {isolation!r}).")

    def register(function: F) -> F:
        if not callable(function):
            raise InvalidInput(f"The handler of {kind!r} must be a function, not {type(function).__name__}.")
        if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
            raise InvalidInput(
                f"The handler of {kind!r} is a generator function, which workers do not run.",
                hint="Use def or async def without yield, and return the result.",
            )
        is_async = _is(inspect.iscoroutinefunction, function)
        if is_async and isolation == "fork":
            raise InvalidInput(
                f"The handler of {kind!r} is async and cannot have isolation='fork': it runs on the worker's event loop.",
                hint="Leave isolation out. For a process per task use def, with asyncio.run(...) inside.",
            )
        if concurrency is not None and not is_async:
            raise InvalidInput(
                f"The handler of {kind!r} is not async, and concurrency is for async handlers.",
                hint="Use async def, or start more workers. To limit a kind: queue.limit('kind', name, concurrency=...)",
            )
        if kind in handlers and handlers[kind].function is not function:
            raise InvalidInput(f"Kind {kind!r} already has a handler.", hint="Give each handler its own kind.")
        opens = None if setup is None else checked(setup, loop=is_async)
        runs: Runs = "async" if is_async else isolation or "fork"
        at_once = (concurrency or CONCURRENCY) if is_async else 1
        handlers[kind] = Handler(kind, function, timeout, retries, retry_delay, runs, at_once, opens)
        return function

    return register


def _check_numbers(timeout: float | None, retries: int, retry_delay: float, concurrency: int | None) -> None:
    if timeout is not None and (not is_number(timeout) or not 0 < timeout <= 10**7):
        raise InvalidInput(f"timeout must be seconds above 0, or None (got {timeout!r}).")
    if type(retries) is not int or not 0 <= retries <= 1000:
        raise InvalidInput(f"retries must be an integer from 0 to 1,000 (got {retries!r}).")
    if not is_number(retry_delay) or not 0 < retry_delay <= 10**6:
        raise InvalidInput(f"retry_delay must be seconds above 0 (got {retry_delay!r}).")
    if concurrency is not None and (type(concurrency) is not int or not 1 <= concurrency <= 10_000):
        raise InvalidInput(f"concurrency must be an integer from 1 to 10,000 (got {concurrency!r}).")


def _is(test: Callable[[Any], bool], function: Any) -> bool:
    """Apply a test of `inspect` to a function, or to the ``__call__`` of a callable object."""
    while isinstance(function, partial):
        function = function.func
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - an object's own __call__
