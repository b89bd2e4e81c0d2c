"""Set-ups: what a worker opens once and passes to every call.

    with_client = checked(open_client, loop=False)    # refuses what cannot be a set-up
    opened = enter(with_client)                       # raises SetupFailed
    work(item, opened.value)
    problem = opened.close()

A set-up is a callable without arguments that returns a context manager or an async context manager. A generator function
is wrapped by `contextlib`. Async ones need an event loop, where both kinds can be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.core.failure import describe
from headway.errors import InvalidInput, SetupFailed

#: A checked set-up. It can be pickled if the user's callable can.
Setup = Callable[[], Any]


def checked(setup: object, *, loop: bool, name: str = "setup") -> Setup:
    """Return the set-up as a factory of context managers, or raise `InvalidInput`.

    ``loop`` says whether it is entered on an event loop. ``name`` names the argument in messages.
    """
    if not isinstance(setup, type) and (_is_sync(setup) or _is_async(setup)):
        raise InvalidInput(
            f"{name}= is a context manager, and each worker needs one of its own.",
            hint=f"Pass the function that makes it: {name}=lambda: ..., without calling it first.",
        )
    if not callable(setup):
        raise InvalidInput(
            f"{name}= must be a function that returns a context manager (got {_kind(setup)}).", hint=_HOW
        )
    if _is(inspect.iscoroutinefunction, setup):
        raise InvalidInput(
            f"{name}= is an async function without a yield; its result is a coroutine, not a context manager.",
            hint=_HOW,
        )
    _check_arguments(setup, name)
    if _is(inspect.isgeneratorfunction, setup):
        return partial(_wrapped, contextlib.contextmanager, setup)
    if _is(inspect.isasyncgenfunction, setup):
        if not loop:
            raise InvalidInput(f"{name}= is async, and the function is not.", hint=_HOW_SYNC)
        return partial(_wrapped, contextlib.asynccontextmanager, setup)
    if isinstance(setup, type):
        _check_kind(setup, loop=loop, name=name)
    return setup


_HOW = "Write a function with one yield: what it yields is passed to every call, and what follows closes it."
_HOW_SYNC = "Make the function async, or the set-up a plain context manager."


def _wrapped(wrap: Callable[[Any], Callable[[], Any]], setup: Callable[[], Any]) -> Any:
    return wrap(setup)()


def _is(test: Callable[[Any], bool], setup: Any) -> bool:
    """Apply a test of `inspect` to a function, or to the ``__call__`` of a callable object."""
    inner = setup
    while isinstance(inner, partial):
        inner = inner.func
    return test(inner) or (not isinstance(inner, type) and test(getattr(inner, "__call__", None)))  # noqa: B004 - its kind is tested


def _check_arguments(setup: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(setup)
    except (ValueError, TypeError):  # a built-in without a signature fails when it is called
        return
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidInput(
            f"{name}= must not need arguments ({error}).", hint=f"Bind them: {name}=lambda: ..."
        ) from None


def _is_sync(value: object) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return hasattr(kind, "__enter__") and hasattr(kind, "__exit__")


def _is_async(value: object) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__")


def _check_kind(manager: object, *, loop: bool, name: str) -> None:
    """Raise `InvalidInput` unless ``manager`` can be entered here."""
    if _is_sync(manager) or (loop and _is_async(manager)):
        return
    if _is_async(manager):
        raise InvalidInput(f"{name}= makes an async context manager, and the function is not async.", hint=_HOW_SYNC)
    raise InvalidInput(f"{name}= must return a context manager (got {_kind(manager)}).", hint=_HOW)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"


@dataclass(slots=True)
class Opened:
    """An entered set-up."""

    #: What it yielded.
    value: Any
    _manager: Any = None

    def close(self) -> str:
        """Close it. Return what went wrong, or an empty string."""
        try:
            self._manager.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return describe(error).text
        return ""

    async def aclose(self) -> str:
        """Close it on the event loop that entered it. Return what went wrong, or an empty string."""
        if not _is_async(self._manager):
            return self.close()
        try:
            await self._manager.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return describe(error).text
        return ""


def enter(setup: Setup) -> Opened:
    """Enter a checked set-up; raise `SetupFailed` if that fails."""
    try:
        manager = setup()
        _check_kind(manager, loop=False, name="setup")
        return Opened(manager.__enter__(), manager)
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


async def enter_async(setup: Setup) -> Opened:
    """Enter a checked set-up on the running event loop; raise `SetupFailed` if that fails."""
    try:
        manager = setup()
        _check_kind(manager, loop=True, name="setup")
        if _is_async(manager):
            return Opened(await manager.__aenter__(), manager)
        return Opened(manager.__enter__(), manager)
    except asyncio.CancelledError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> SetupFailed:
    return SetupFailed(f"The set-up of a worker failed: {describe(error).text}.".replace("..", "."))
